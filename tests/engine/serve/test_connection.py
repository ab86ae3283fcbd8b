"""The API process's end of the socket to its engine."""

from __future__ import annotations

import asyncio

from engine.connection import Connection


class Transport:
    """One whose loop hands over bytes that were read before it was told to pause."""

    def __init__(self) -> None:
        self.closing, self.paused = False, False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


def test_what_comes_before_somebody_listens_is_kept() -> None:
    async def run() -> None:
        made: list[Connection] = []
        connection, transport, heard = Connection(made.append), Transport(), []
        connection.connection_made(transport)

        def arrives(data: bytes) -> None:
            connection.get_buffer(-1)[: len(data)] = data
            connection.buffer_updated(len(data))

        def received(frames: object, data: memoryview) -> bool:
            heard.append(bytes(data))
            return data[-1:] != b"!"

        arrives(b"ear")
        arrives(b"ly")
        assert made == [connection] and transport.paused and not heard
        connection.listen(received)
        arrives(b"later")
        assert heard == [b"early", b"later"] and not transport.paused and not connection.closed.done()
        arrives(b"bad!")
        assert connection.closed.done() and transport.closing

    asyncio.run(run())
