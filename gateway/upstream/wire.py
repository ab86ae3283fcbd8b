"""HTTP/1.1 over a bare asyncio protocol: what posting a body and reading a stream needs of it, and nothing else.

A request through aiohttp costs 105 us of CPU, through this 35, and all that the gateway does with one may cost 660
(ops/bench/gateway.py). httptools does the parsing. Plain http only: https, and whatever is no turn's answer, is aiohttp's.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

import httptools

# Bytes of an answer that nobody has read yet before the upstream is made to wait: a slow client must not fill our memory.
HIGH_WATER = 256 << 10
# Of an answer's head, interim ones included; the largest seen, of a provider behind two proxies, has 4 KiB.
MAX_HEAD_BYTES = 256 << 10
# Below this one write of head and body together costs less than a gathering one; above, the copy does.
COPIED = 32 << 10


class Broken(ConnectionError):
    """The other side closed in the middle, or what it said is no HTTP. `unanswered`: before the first byte of its answer."""

    def __init__(self, why: str, unanswered: bool) -> None:
        super().__init__(why)
        self.unanswered = unanswered


class NoConnection(OSError):
    """Nobody took the connection."""


class Reply:
    """The answer to one request. `head` first, then `read` until b""."""

    __slots__ = ("_connection", "_error", "_parts", "_size", "_waiter", "ended", "headers", "status", "until_close")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.ended = False
        self.until_close = False  # the body ends with the connection

    async def head(self, timeout: float) -> None:
        """Wait for status and headers, however slowly they drip. Raises TimeoutError and Broken."""
        until = asyncio.get_running_loop().time() + timeout
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait(until - asyncio.get_running_loop().time())

    async def read(self, timeout: float) -> bytes:
        """What has come of the body, b"" at its end. Raises TimeoutError and Broken, but first gives what came before."""
        while not self._parts:
            if self.ended:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait(timeout)
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self.flooded and not self.ended and not self._connection.lost:
            self._connection.transport.resume_reading()
        self._size = 0
        return data

    async def _wait(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(timeout, _expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def close(self) -> None:
        """Drop the connection unless the answer is complete; the other side then stops working."""
        if not self.ended:
            self._connection.drop()

    @property
    def flooded(self) -> bool:
        """More has come than is read: the connection does not read on."""
        return self._size > HIGH_WATER

    # --- from the connection

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add(self, part: bytes) -> None:
        before = self._size
        self._parts.append(part)
        self._size += len(part)
        if before <= HIGH_WATER < self._size:
            self._connection.transport.pause_reading()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error  # the first one says why, and closing is what follows from it
        self.wake()


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


class Connection(asyncio.Protocol):
    """One connection to an upstream; one request at a time. `free` is called when it may take the next one."""

    def __init__(self, free: Callable[[Connection], None]) -> None:
        self._free = free
        self._reply: Reply | None = None
        self._parser = httptools.HttpResponseParser(self)  # of one answer after the other
        self._headers: dict[str, str] = {}
        self._heard = False
        self._head = 0  # bytes of the answer's head
        self.transport: asyncio.Transport
        self.lost = False
        self.idle_since = 0.0

    def send(self, head: bytes, body: bytes) -> Reply:
        self._heard, self._head = False, 0
        self._reply = reply = Reply(self)
        if len(body) < COPIED:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        return reply

    def drop(self) -> None:
        self.lost = True
        self.transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:  # nothing was asked
            self.drop()
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            self.drop()
            reply.fail(Broken(f"no HTTP: {e}", False))
        if not reply.status:
            self._head += len(data)
            if self._head > MAX_HEAD_BYTES:
                self.drop()
                reply.fail(Broken(f"a head of more than {MAX_HEAD_BYTES >> 10} KiB", False))
        reply.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        reply, self._reply = self._reply, None
        if reply is None:
            return
        if reply.until_close and error is None:
            reply.ended = True
            reply.wake()
        else:
            reply.fail(Broken("the connection was closed", not self._heard))

    # --- httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # an interim answer (100, 103) is followed by the real one
            reply = self._reply
            reply.until_close = not ("content-length" in self._headers or "transfer-encoding" in self._headers)
            reply.headers, reply.status = self._headers, status
        self._headers = {}

    def on_body(self, part: bytes) -> None:
        self._reply.add(part)

    def on_message_complete(self) -> None:
        reply = self._reply
        if not reply.status:
            return
        self._reply, reply.ended = None, True
        if self._parser.should_keep_alive() and not self.lost:
            if reply.flooded:
                self.transport.resume_reading()
            self._free(self)
        else:
            self.drop()


class Pool:
    """Connections by address; an idle one is used again within `keep` seconds, the newest first."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._idle: dict[tuple[str, int], deque[Connection]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, address: tuple[str, int], head: bytes, body: bytes, connect: float) -> Reply:
        """Send a whole request. Raises NoConnection, its cause what the system said, after at most `connect` seconds."""
        return (self._take(address) or await self._connect(address, connect)).send(head, body)

    def _take(self, address: tuple[str, int]) -> Connection | None:
        idle = self._idle.get(address)
        oldest = asyncio.get_running_loop().time() - self._keep
        while idle:
            connection = idle.pop()
            if not connection.lost and not connection.transport.is_closing() and connection.idle_since >= oldest:
                return connection
            connection.drop()
        return None

    async def _connect(self, address: tuple[str, int], timeout: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(lambda: Connection(lambda c: self._put(address, c)), *address)
        except OSError as e:  # TimeoutError is one
            raise NoConnection from e
        return connection

    def _put(self, address: tuple[str, int], connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        if self._closed:
            connection.drop()
            return
        connection.idle_since = loop.time()
        self._idle.setdefault(address, deque()).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._keep, self._sweep)

    def _sweep(self) -> None:
        """Close what was idle for too long; come back while anything is idle."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._keep
        for idle in self._idle.values():
            while idle and (idle[0].lost or idle[0].idle_since < oldest):
                idle.popleft().drop()
        self._sweeper = loop.call_later(self._keep, self._sweep) if any(self._idle.values()) else None

    def close(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for idle in self._idle.values():
            while idle:
                idle.pop().drop()
