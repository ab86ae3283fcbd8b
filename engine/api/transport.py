"""HTTP around a running answer: server-sent events with keep-alives, and noticing at once when the client goes away."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from engine.api.errors import ApiError, bug

log = logging.getLogger("moorage.api")
T = TypeVar("T")

# Below the idle limits of common proxies (30-60 s) and SDK read timeouts; a long prefill sends nothing else.
KEEP_ALIVE_S = 10.0
_ENCODER = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def event(body: object) -> bytes:
    return b"data: " + _ENCODER.encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class TextEvent:
    """An event that differs from others in one text alone, which is most of them: the rest is encoded once."""

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make` gives the event with its text."""
        mark = secrets.token_hex(16)  # in no name or id
        self._before, self._behind = make(mark).split(_ENCODER.encode(mark))

    def __call__(self, text: str) -> bytes:
        return self._before + _ENCODER.encode(text) + self._behind


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; cancel it and raise ClientGone when the client leaves first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


@dataclass
class Begun:
    """Events of which somebody waited for the first one already."""

    first: asyncio.Future[bytes]
    rest: AsyncGenerator[bytes, None]

    async def close(self) -> None:
        self.first.cancel()
        await asyncio.wait({self.first})
        await self.rest.aclose()


async def begun(events: AsyncGenerator[bytes, None], wait_s: float) -> Begun:
    """`events`, after waiting a moment for its first one: an ApiError in that time is raised here and gets an HTTP status."""
    first = asyncio.ensure_future(anext(events))
    await asyncio.wait({first}, timeout=wait_s)
    if first.done() and first.exception() is not None:
        await events.aclose()
        raise first.exception()
    return Begun(first, events)


class EventStream:
    """ASGI response over event bytes. The events are awaited in the task of the request, one hop from the engine's message to the
    socket: the cores that carry a token to its client are those that compute the next one.

    An error inside the generator becomes an `error` event and the stream ends without `[DONE]`: nothing that looks finished.
    """

    def __init__(self, events: Begun, headers: dict[str, str], on_gone: Callable[[], None], keep_alive_s: float) -> None:
        self._events, self._on_gone, self._keep_alive_s = events, on_gone, keep_alive_s
        self._headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache",
                         "x-accel-buffering": "no", **headers}  # fmt: skip
        self._sent = 0  # events, comments not counted
        self._gone = self._over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        task = asyncio.current_task()
        watch = asyncio.ensure_future(_disconnected(receive))
        watch.add_done_callback(lambda _: self._leave(task))
        beat = asyncio.ensure_future(self._beat(send))
        try:
            await self._send_all(send, beat)
        except asyncio.CancelledError:
            if not self._gone or task.uncancel():  # somebody else wants this task to end
                raise
            self._on_gone()
        finally:
            self._over = True
            watch.cancel()
            beat.cancel()
            await self._events.close()

    async def _send_all(self, send: Send, beat: asyncio.Future[None]) -> None:
        try:
            await _body(send, await self._events.first)
            self._sent += 1
            async for data in self._events.rest:
                await _body(send, data)
                self._sent += 1
        except Exception as e:
            if not isinstance(e, ApiError | StopAsyncIteration):
                log.exception("a stream failed")
                e = bug()
            if isinstance(e, ApiError):
                await _body(send, event(e.body()))
        self._over = True
        beat.cancel()
        await asyncio.wait({beat})  # nothing of it may come behind the end
        await send({"type": "http.response.body", "body": b""})

    def _leave(self, task: asyncio.Task[None]) -> None:
        """The client went away: whatever the task waits for, an event or room in the socket, it need not wait any more."""
        if not self._over:
            self._gone = self._over = True
            task.cancel()

    async def _beat(self, send: Send) -> None:
        """A comment whenever nothing else was sent for `keep_alive_s`."""
        while True:
            before = self._sent
            await asyncio.sleep(self._keep_alive_s)
            if self._sent == before:
                await _body(send, b": keep-alive\n\n")


async def _body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
