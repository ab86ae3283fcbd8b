"""uvicorn's protocol with the head of a response and the first bytes of its body in one packet, and with bounded request heads.

uvicorn writes them apart, and on a connection without Nagle each write is a system call, a packet and a client that wakes up for
nothing: a tenth of all that a short streamed request costs. And it waits for the rest of a head for as long, and keeps as much of
it, as anybody likes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD, INTERIM = b"HTTP/1.1 ", b"HTTP/1.1 1"


class Corked:
    """A transport that holds a response's head until its body comes, or until the event loop comes round; all else is its own."""

    __slots__ = ("_held", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(HEAD) and data.endswith(b"\r\n\r\n") and not data.startswith(INTERIM):
            self._held = data
            asyncio.get_running_loop().call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            self._transport.write(data)


# Bytes of a request's body that wait for the gateway before its client is made to wait. uvicorn's 64 KiB stop and start the
# reading of every long conversation several times, a turn of the event loop each.
BODY_WAITS = 1 << 20
# Of a request's head: agents send 1 to 3 KB, and all of it in one packet.
MAX_HEAD_BYTES = 64 << 10
HEAD_S = 60.0
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class CorkedProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Corked(transport))  # type: ignore[arg-type]
        self._heading = False  # a head has begun and is not complete
        self._head = 0  # bytes of it
        self._late: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def connection_lost(self, error: Exception | None) -> None:
        self._in_time()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._heading or self.cycle is None or self.cycle.response_complete:
            self._no_request_yet(len(data))

    def _no_request_yet(self, size: int) -> None:
        """Part of a head came, or what is none: blank lines, the rest of a body that was refused."""
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)
        self._head += size if self._heading else 0
        if self._head > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:  # an answer in progress is only cut
                self.transport.write(TOO_LARGE)
            self.transport.close()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def on_message_begin(self) -> None:
        self._heading, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._heading = False
        self._in_time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if (self.parser.should_upgrade() and self._should_upgrade()) or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > BODY_WAITS:
            self.flow.pause_reading()
        cycle.message_event.set()
