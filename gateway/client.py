"""The client's side of one exchange: response start, body, keep-alives, over bare ASGI `send`.

The response starts with its first byte. When a streaming client has heard nothing for the keep-alive interval, a keep-alive goes
out by itself, starting the response if it must: a long prefill then never looks like a dead line. From there on an error can
only be an event inside the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from gateway.answer import Answer
from gateway.dialects.base import Writer
from gateway.turn import Decision, Turn

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Proxies and clients limit the size of one header line; 8 KiB is the common bound, the record has all decisions.
MAX_DECISIONS_HEADER = 2048
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

# A request younger than this is not watched: most short ones are over by then, and a task for each would cost them 9 us.
WATCH_AFTER_S = 0.1


class Watch:
    """Waits for the client to leave; if its answer is not complete by then, what answers it is cancelled."""

    def __init__(self, client: Client, receive: Receive) -> None:
        self._client, self._receive = client, receive
        self._watching: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(WATCH_AFTER_S, lambda: self._begin(loop))

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watching = loop.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client.leave()

    def cancel(self) -> None:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()


class Client:
    """One response to one client. All sends are serialised, so a keep-alive never cuts an event."""

    def __init__(self, send: Send, turn_id: str) -> None:
        self._send = send
        self._id = turn_id
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        self.task = asyncio.current_task()  # what answers this client
        self._decisions: Sequence[Decision] = ()
        self._last = 0.0
        self._held = b""
        self.status = 0  # 0 = nothing was sent yet
        self.over = False  # the last bytes are on their way, no others follow
        self._done = False  # they were taken, by the server at least
        self.gone = False  # it left before the answer was complete

    def leave(self) -> None:
        """It has gone; if its answer is not complete, the work on it ends."""
        if not self._done and self.task is not None:
            self.gone = True
            self.task.cancel("client gone")

    @property
    def started(self) -> bool:
        return self.status != 0 or bool(self._held)

    def stream_headers(self, decisions: Sequence[Decision]) -> None:
        """A stream starts with these decisions in its headers, once it starts."""
        self._decisions = decisions

    def _ours(self, decisions: Iterable[Decision]) -> list[tuple[bytes, bytes]]:
        names = ",".join(dict.fromkeys([f"{d.stage}.{d.rule}" for d in decisions]))
        safe = names.encode("ascii", "replace")[:MAX_DECISIONS_HEADER].replace(b"\r", b"?").replace(b"\n", b"?")
        return [(b"x-moorage-request-id", self._id.encode()), (b"x-moorage-decisions", safe)]

    async def write(self, data: bytes) -> None:
        """Bytes of the stream; the first ones start the response."""
        async with self._lock:
            await self._write(data)

    def hold(self, data: bytes) -> None:
        """Bytes that go out with the next ones: the end of a stream is known to follow."""
        self._held += data

    async def _write(self, data: bytes) -> None:
        if self.over:
            return
        await self._begin()
        data, self._held = self._held + data, b""
        self._last = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _begin(self) -> None:
        if not self.status:
            self.status = 200
            headers = [*STREAM_HEADERS, *self._ours(self._decisions)]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def end(self, data: bytes = b"") -> None:
        """The last bytes of a stream. Without any, a stream that never began stays unbegun."""
        async with self._lock:
            if self.over or not (data or self.started):
                return
            self.over = True
            self._last = asyncio.get_running_loop().time()
            await self._begin()
            await self._send({"type": "http.response.body", "body": self._held + data, "more_body": False})
            self._done = True

    async def whole(
        self, status: int, body: bytes, decisions: Iterable[Decision], headers: Mapping[str, str] | None = None
    ) -> None:
        """A complete JSON response."""
        async with self._lock:
            self.status, self.over = status, True
            head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            more = [(k.encode("latin-1", "replace"), v.encode("latin-1", "replace")) for k, v in (headers or {}).items()]
            head += self._ours(decisions) + more
            await self._send({"type": "http.response.start", "status": status, "headers": head})
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
            self._done = True

    def keep_alive(self, turn: Turn, answer: Answer, writer: Writer, interval: float, patience: float) -> None:
        """From now on no silence longer than `interval` seconds, until `stop`. The first interval begins now.

        A client that takes nothing of what it is sent for `patience` seconds has left, whatever its connection says.
        """
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        self.stream_headers(turn.decisions)
        self._timer = loop.call_later(interval or patience, self._tick, loop, answer, writer, interval, patience)

    def _tick(self, loop: asyncio.AbstractEventLoop, answer: Answer, writer: Writer, interval: float, patience: float) -> None:
        if self._lock.locked() and loop.time() - self._last > patience:
            self.leave()
            return
        pause = interval or patience
        wait = self._last + pause - loop.time()
        if wait <= 0 and interval and (self._beat is None or self._beat.done()):
            self._beat = loop.create_task(self._keepalive(answer, writer))
        self._timer = loop.call_later(wait if wait > 0 else pause, self._tick, loop, answer, writer, interval, patience)

    async def _keepalive(self, answer: Answer, writer: Writer) -> None:
        if self._lock.locked():
            return  # something is being sent: the line is not silent
        async with self._lock:
            # Made only now, so that a writer that counts its events sees this one in its place.
            answer.keepalives += 1
            await self._write(writer.keepalive())

    def stop(self) -> None:
        """No more keep-alives."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._beat is not None:
            self._beat.cancel()
