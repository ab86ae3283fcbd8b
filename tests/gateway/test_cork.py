"""The head of a response and its body's first bytes leave together, and nothing ever stays behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from gateway.cork import BODY_WAITS, Corked, CorkedProtocol

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"


class Transport:
    def __init__(self) -> None:
        self.seen: list[bytes | str] = []
        self.name = "its own"

    def write(self, data: bytes) -> None:
        self.seen.append(data)

    def close(self) -> None:
        self.seen.append("closed")


async def test_a_head_waits_for_its_body_and_for_nothing_else() -> None:
    transport = Transport()
    corked = Corked(transport)
    corked.write(HEAD)
    corked.write(b"5\r\nhello\r\n")
    corked.write(b"0\r\n\r\n")
    assert transport.seen == [HEAD + b"5\r\nhello\r\n", b"0\r\n\r\n"] and corked.name == "its own"


async def test_a_head_without_a_body_goes_out_in_the_next_turn() -> None:
    transport = Transport()
    Corked(transport).write(HEAD)
    assert transport.seen == []
    await asyncio.sleep(0)
    assert transport.seen == [HEAD]


async def test_closing_lets_go_what_is_held() -> None:
    transport = Transport()
    corked = Corked(transport)
    corked.write(HEAD)
    corked.close()
    assert transport.seen == [HEAD, "closed"]


async def test_what_must_not_wait_does_not() -> None:
    transport = Transport()
    corked = Corked(transport)
    for data in (b"HTTP/1.1 100 Continue\r\n\r\n", b"5\r\nhello\r\n", HEAD + b"Invalid HTTP request received."):
        corked.write(data)
        assert transport.seen.pop() == data


async def test_a_client_waits_when_a_mebibyte_of_its_body_does() -> None:
    waits: list[int] = []
    cycle = SimpleNamespace(body=bytearray(), response_complete=False, message_event=asyncio.Event())
    flow = SimpleNamespace(pause_reading=lambda: waits.append(len(cycle.body)))
    protocol = SimpleNamespace(cycle=cycle, flow=flow, parser=SimpleNamespace(should_upgrade=lambda: False))
    for size in (BODY_WAITS // 2, BODY_WAITS - BODY_WAITS // 2, 1):
        CorkedProtocol.on_body(protocol, b"x" * size)
        assert cycle.message_event.is_set()
    assert waits == [BODY_WAITS + 1] and len(cycle.body) == BODY_WAITS + 1
    cycle.response_complete = True
    CorkedProtocol.on_body(protocol, b"x")
    assert len(cycle.body) == BODY_WAITS + 1
