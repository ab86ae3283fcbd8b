"""An engine that says what a test tells it, behind the real HTTP app on a real socket. No model, no second process.

async with api(text_dir, answer("Hello")) as server:
    await server.openai.chat.completions.create(...)
    server.engine.requests[0].tokens
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from engine.app import create_app
from engine.ipc import BACKGROUND, ControlReply, Done, Generate, RequestError, Started, TokenLogprob, Tokens
from engine.protocol import MoorageUsage
from engine.supervisor import EngineState

Message = Started | Tokens | Done | RequestError
Script = Callable[["FakeEngine", Generate], AsyncIterator[Message]]


class FakeStream:
    def __init__(self, engine: FakeEngine, request: Generate) -> None:
        self.request, self._engine = request, engine
        self.cancelled = ""
        self._ended = False
        self._cancel = asyncio.Event()
        self._script = engine.script(engine, request)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Message:
        if self._ended:
            raise StopAsyncIteration
        step = asyncio.ensure_future(anext(self._script))
        stop = asyncio.ensure_future(self._cancel.wait())
        try:
            await asyncio.wait({step, stop}, return_when=asyncio.FIRST_COMPLETED)
            if step.done() and not self._cancel.is_set():
                message = step.result()
            else:
                message = Done(id=self.request.id, reason="cancelled", usage=usage(self.request), completion=1)
        finally:
            step.cancel()
            stop.cancel()
        self._ended = isinstance(message, Done | RequestError)
        return message

    def cancel(self, reason: str = "client gone") -> None:
        if not self._ended:
            self.cancelled = reason
            self._cancel.set()

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


@dataclass
class FakeEngine:
    script: Script
    state: EngineState = field(
        default_factory=lambda: EngineState(
            phase="ready", fraction=1.0, stage="", max_context=4096, vocab=700, model={"family": "fake"}
        )
    )
    streams: list[FakeStream] = field(default_factory=list)
    controls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    encode: Callable[[str], list[int]] = lambda text: []

    @property
    def requests(self) -> list[Generate]:
        """What clients asked for, in order."""
        return [s.request for s in self.streams if s.request.priority > BACKGROUND]

    @property
    def prepared(self) -> list[Generate]:
        """What the engine asked of itself for the next turn."""
        return [s.request for s in self.streams if s.request.priority <= BACKGROUND]

    def generate(self, request: Generate) -> FakeStream:
        self.streams.append(FakeStream(self, request))
        return self.streams[-1]

    async def control(self, verb: str, timeout: float = 30.0, **args: Any) -> ControlReply:
        self.controls.append((verb, args))
        return ControlReply(id="c", body={"verb": verb, **args})

    def not_ready(self) -> str:
        return f"the model is loading ({self.state.fraction:.0%}, {self.state.stage}): retry in a moment"


def usage(request: Generate) -> MoorageUsage:
    count = len(request.tokens)
    return MoorageUsage(prompt=count, common=count // 2, new=count - count // 2, source="ram")


def logprobs(request: Generate, token: int) -> list[TokenLogprob] | None:
    if request.logprobs is None:
        return None
    return [TokenLogprob(token, -0.5, [(token, -0.5), (0, -float("inf"))][: request.logprobs])]


def answer(*parts: str | float | RequestError, end: str = "stop", prefill_s: float = 0.0) -> Script:
    """Says each string token by token; a number is a pause in seconds, an error ends the answer."""

    async def script(engine: FakeEngine, request: Generate) -> AsyncIterator[Message]:
        await asyncio.sleep(prefill_s)
        if parts and isinstance(parts[0], RequestError):
            yield RequestError(id=request.id, status=parts[0].status, message=parts[0].message, code=parts[0].code)
            return
        scored = None
        if request.prompt_logprobs is not None:
            scored = [TokenLogprob(t, -1.0, [(t, -1.0)][: request.prompt_logprobs]) for t in request.tokens[1:]]
        yield Started(id=request.id, usage=usage(request), prompt_logprobs=scored)
        count = 0
        for part in parts:
            if isinstance(part, RequestError):
                yield RequestError(id=request.id, status=part.status, message=part.message, code=part.code)
                return
            if not isinstance(part, str):
                await asyncio.sleep(part)
                continue
            for token in engine.encode(part):
                if count == request.max_new:
                    yield Done(id=request.id, reason="length", usage=usage(request), completion=count)
                    return
                count += 1
                yield Tokens(id=request.id, tokens=[token], logprobs=logprobs(request, token))
        extra = end == "stop"  # the stop token was sampled too
        yield Done(id=request.id, reason=end, usage=usage(request), completion=count + extra)

    return script


@dataclass
class Server:
    engine: FakeEngine
    base: str
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    service: Any

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def chat(self, text: str = "hi", **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": text}], **body})


@contextlib.asynccontextmanager
async def api(path: Path, script: Script, model: str = "tiny", wait: bool = True) -> AsyncIterator[Server]:
    engine = FakeEngine(script)
    app = create_app(engine, model, str(path), manage=False)
    service = app.state.service
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, http="httptools"))
    running = asyncio.create_task(server.serve(sockets=[sock]))
    base = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        while not server.started or (wait and service.text is None and not service.text_error):
            await asyncio.sleep(0.005)
        if service.text:
            engine.encode = lambda text: service.text.tokenizer.encode(text)
        async with (
            httpx.AsyncClient(base_url=base, timeout=30) as http,
            openai.AsyncOpenAI(base_url=base + "/v1", api_key="x", max_retries=0) as client,
        ):
            yield Server(engine, base, http, client, service)
    finally:
        server.should_exit = True
        await running
