"""uvicorn's protocol with the head of a response and the first bytes of its body in one packet.

uvicorn writes them apart, and on a connection without Nagle each write is a system call, a packet and a client that wakes up for
nothing: a tenth of all that a short streamed request costs.
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


class CorkedProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Corked(transport))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if (self.parser.should_upgrade() and self._should_upgrade()) or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > BODY_WAITS:
            self.flow.pause_reading()
        cycle.message_event.set()
