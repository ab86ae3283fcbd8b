"""A scriptable OpenAI-compatible upstream for gateway tests: a real HTTP server that says exactly what a test tells it.

    async with FakeUpstream() as up:
        up.script(Stream([content("Hi"), content(" there"), finish("stop"), usage(10, 2)]))
        ... ask a gateway that points at up.base ...
        up.requests[0].body, up.requests[0].json

Each request takes the next scripted answer; the last one repeats. `up.cancelled` counts answers whose client left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class Stream:
    """A streamed answer. Items: dict = one chunk; bytes = raw bytes as they are; float = seconds to wait.

    `die_after` = close the connection without an end after that many items. `done` = send [DONE].
    """

    items: Sequence[dict[str, Any] | bytes | float] = ()
    done: bool = True
    die_after: int | None = None
    head_delay: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Whole:
    """A non-streamed answer; a dict body is sent as JSON."""

    body: dict[str, Any] | bytes = b"{}"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    head_delay: float = 0.0


# --- pieces of chat completions


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]} | more


def content(text: str) -> dict[str, Any]:
    return chunk({"content": text})


def reasoning(text: str, name: str = "reasoning_content") -> dict[str, Any]:
    return chunk({name: text})


def tool_call(index: int, arguments: str, id: str = "", name: str = "") -> dict[str, Any]:
    head = {"id": id, "type": "function"} if id else {}
    function = ({"name": name} if name else {}) | {"arguments": arguments}
    return chunk({"tool_calls": [{"index": index, **head, "function": function}]})


def finish(reason: str = "stop") -> dict[str, Any]:
    return chunk({}, reason)


def usage(prompt: int, completion: int, cached: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    counts |= {"prompt_tokens_details": {"cached_tokens": cached}} | more
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": counts}


def message(text: str | None = "Hi", finish_reason: str = "stop", **fields: Any) -> dict[str, Any]:
    """A whole chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text} | fields, "finish_reason": finish_reason}
    counts = usage(10, 2)["usage"]
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": counts}


HELLO = Stream([chunk({"role": "assistant", "content": ""}), content("Hello"), content(" world"), finish(), usage(12, 2, 8)])


class FakeUpstream:
    def __init__(self, port: int = 0) -> None:
        self.port = port  # 0 = a free one
        self.requests: list[Seen] = []
        self.answers: list[Stream | Whole] = [HELLO]
        self.cancelled = 0
        self.health: dict[str, Any] = {"status": "ok"}
        self.health_status = 200
        self.models = ["m"]
        self._runner: web.AppRunner | None = None
        self.base = ""

    def script(self, *answers: Stream | Whole) -> None:
        self.answers = list(answers)

    async def __aenter__(self) -> FakeUpstream:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.base = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(self.health, status=self.health_status)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": m, "object": "model"} for m in self.models]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, await request.read()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        try:
            await asyncio.sleep(answer.head_delay)
            if isinstance(answer, Whole):
                body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
                head = {"content-type": "application/json"} | answer.headers
                return web.Response(body=body, status=answer.status, headers=head)
            return await self._stream(request, answer)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise

    async def _stream(self, request: web.Request, answer: Stream) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"} | answer.headers)
        await response.prepare(request)
        for i, item in enumerate(answer.items):
            if answer.die_after == i:
                break
            if isinstance(item, float):
                await asyncio.sleep(item)
            else:
                await response.write(item if isinstance(item, bytes) else b"data: " + json.dumps(item).encode() + b"\n\n")
        if answer.die_after is not None:
            request.transport.abort()
            return response
        if answer.done:
            await response.write(b"data: [DONE]\n\n")
        return response
