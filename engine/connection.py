"""The API process's end of the socket to the engine process. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.ipc import FrameReader

RECEIVE = 1 << 16  # bytes a read asks for: a step's tokens are a few hundred


class Connection(asyncio.BufferedProtocol):
    """The worker's connection: every message is taken in the turn of the loop that read it, without a task in between."""

    def __init__(self, connected: Callable[[Connection], None]) -> None:
        self._connected = connected
        self._buffer = bytearray(RECEIVE)
        self._frames = FrameReader(to_worker=False)
        self._received: Callable[[FrameReader, memoryview], bool] | None = None
        self._early = b""  # what came before somebody listened

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        transport.pause_reading()  # until somebody listens
        self._connected(self)

    def listen(self, received: Callable[[FrameReader, memoryview], bool]) -> None:
        self._received = received
        early, self._early = self._early, b""
        if early:
            self._take(memoryview(early))
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        self._take(memoryview(self._buffer)[:count])

    def _take(self, data: memoryview) -> None:
        if self._received is None:  # uvloop hands over what was there already when reading was paused
            self._early += bytes(data)
        elif not self._received(self._frames, data):
            self._close()

    def eof_received(self) -> None:
        self._close()

    def connection_lost(self, problem: Exception | None) -> None:
        self._close()

    def _close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        self.transport.close()
