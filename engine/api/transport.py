"""HTTP around a running answer: server-sent events with keep-alives, and noticing at once when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
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


async def begun(events: AsyncGenerator[bytes, None], wait_s: float) -> AsyncGenerator[bytes, None]:
    """`events`, after waiting a moment for its first one: an ApiError in that time is raised here and gets an HTTP status."""
    first = asyncio.ensure_future(anext(events))
    await asyncio.wait({first}, timeout=wait_s)
    if first.done() and first.exception() is not None:
        await events.aclose()
        raise first.exception()
    return _continued(first, events)


async def _continued(first: asyncio.Future[bytes], rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield await first
        async for data in rest:
            yield data
    finally:
        first.cancel()
        await asyncio.wait({first})
        await rest.aclose()


class EventStream:
    """ASGI response over an async generator of event bytes.

    An error inside the generator becomes an `error` event and the stream ends without `[DONE]`: nothing that looks finished.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        on_gone: Callable[[], None],
        keep_alive_s: float,
    ) -> None:
        self._events, self._on_gone, self._keep_alive_s = events, on_gone, keep_alive_s
        self._headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache",
                         "x-accel-buffering": "no", **headers}  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        watch = asyncio.ensure_future(_disconnected(receive))
        following: asyncio.Future[bytes] | None = None
        try:
            while True:
                following = following or asyncio.ensure_future(anext(self._events))
                await asyncio.wait({following, watch}, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    self._on_gone()
                    return
                if not following.done():
                    await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
                    continue
                done, following = following, None
                try:
                    body = done.result()
                except StopAsyncIteration:
                    break
                except Exception as e:
                    if not isinstance(e, ApiError):
                        log.exception("a stream failed")
                        e = bug()
                    await send({"type": "http.response.body", "body": event(e.body()), "more_body": True})
                    break
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            watch.cancel()
            if following is not None:
                following.cancel()
                await asyncio.wait({following})
            await self._events.aclose()
