"""An answer's way from the engine's messages to the socket: order, keep-alives, slow and lost clients, one write a token."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.api.errors import ApiError
from engine.api.transport import EventStream, TextEvent, begun, event
from engine.ipc import Done, Tokens
from engine.protocol import MoorageUsage
from engine.state import Stream
from tests.support.fake_engine import answer, api
from tests.support.text import tool

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
FOREVER = 3600.0


class Socket:
    """What an ASGI server does: `send` blocks when `room` bodies were taken, `receive` waits until the client leaves."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.sent: list[dict] = []
        self.left, self.blocked, self._room = asyncio.Event(), asyncio.Event(), room

    async def send(self, message: dict) -> None:
        if len(self.bodies) >= self._room:
            self.blocked.set()
            await asyncio.Event().wait()
        self.sent.append(message)

    async def receive(self) -> dict:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body"]


class Source:
    """Events, and what became of them."""

    def __init__(self, *parts: bytes | Exception | None) -> None:
        self.parts, self.closed = parts, False

    async def __call__(self):
        try:
            for part in self.parts:
                if part is None:
                    await asyncio.Event().wait()
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.closed = True


async def stream(source: Source, gone: list, keep_alive_s: float = FOREVER) -> EventStream:
    return EventStream(await begun(source(), 0.01), {}, lambda: gone.append(1), keep_alive_s)


async def test_events_come_in_order_and_the_end_is_last() -> None:
    socket, source, gone = Socket(), Source(b"a", b"b", b"c"), []
    await (await stream(source, gone))({}, socket.receive, socket.send)
    assert socket.bodies == [b"a", b"b", b"c", b""] and source.closed and not gone
    assert not socket.sent[-1].get("more_body")


@pytest.mark.parametrize("parts", [(None,), (b"a", None)], ids=["before the first event", "between events"])
async def test_a_lost_client_ends_its_events(parts) -> None:
    socket, source, gone = Socket(), Source(*parts), []
    running = asyncio.create_task((await stream(source, gone))({}, socket.receive, socket.send))
    while len(socket.bodies) < len(parts) - 1 or not socket.sent:
        await asyncio.sleep(0)
    socket.left.set()
    await asyncio.wait_for(running, 10)
    assert gone == [1] and source.closed and not running.cancelled()


async def test_a_slow_client_holds_its_events_and_may_leave_meanwhile() -> None:
    socket, source, gone = Socket(room=1), Source(b"a", b"b", AssertionError("read on for a client that takes nothing")), []
    running = asyncio.create_task((await stream(source, gone))({}, socket.receive, socket.send))
    await asyncio.wait_for(socket.blocked.wait(), 10)
    socket.left.set()
    await asyncio.wait_for(running, 10)
    assert gone == [1] and source.closed and socket.bodies == [b"a"]


async def test_an_end_from_elsewhere_is_no_lost_client() -> None:
    socket, source, gone = Socket(), Source(b"a", None), []
    running = asyncio.create_task((await stream(source, gone))({}, socket.receive, socket.send))
    while not socket.bodies:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not gone and source.closed


@pytest.mark.parametrize("problem", [ApiError(502, "the engine died", "engine_restarted"), RuntimeError("a bug")])
async def test_an_error_is_the_last_event(problem) -> None:
    socket, source, gone = Socket(), Source(b"a", problem), []
    await (await stream(source, gone))({}, socket.receive, socket.send)
    assert socket.bodies[0] == b"a" and b'"error"' in socket.bodies[1] and socket.bodies[2:] == [b""] and not gone


async def test_silence_is_filled_and_nothing_comes_behind_the_end() -> None:
    socket, ready = Socket(), asyncio.Event()

    async def late():
        await ready.wait()
        yield b"a"

    events = EventStream(await begun(late(), 0.001), {}, lambda: None, 0.001)
    running = asyncio.create_task(events({}, socket.receive, socket.send))
    while len(socket.bodies) < 3:
        await asyncio.sleep(0.001)
    ready.set()
    await running
    *before, text, end = socket.bodies
    assert (text, end) == (b"a", b"") or b"keep-alive" in text  # one may have been due between the two
    assert b"a" in socket.bodies and socket.bodies[-1] == b"" and before[0] == b": keep-alive\n\n"


@pytest.mark.parametrize("text", ["", "a", '"\\\n\u2028', "größe \U0001f600", "\x00\x7f</s>"])
def test_a_text_event_is_the_event_with_that_text(text) -> None:
    def make(content: str) -> bytes:
        return event({"id": "x", "choices": [{"delta": {"content": content}, "logprobs": None}], "usage": None})

    assert TextEvent(make)(text) == make(text)


async def test_a_reader_gets_what_came_before_and_while_it_waits() -> None:
    class Owner:
        def cancel(self, id: str, reason: str) -> None: ...

    usage, inbox = MoorageUsage(prompt=1, common=0, new=1), Stream(Owner(), "r")
    inbox.put(Tokens(id="r", tokens=[1]))
    inbox.put(Tokens(id="r", tokens=[2]))
    reading = asyncio.create_task(_all(inbox))
    await asyncio.sleep(0)
    impatient = Stream(Owner(), "s")
    waiting = asyncio.create_task(anext(impatient))
    await asyncio.sleep(0)
    waiting.cancel()  # a reader that went away loses nothing for the next one
    await asyncio.wait({waiting})
    impatient.put(Done(id="s", reason="stop", usage=usage, completion=0))
    assert [type(m) for m in await _all(impatient)] == [Done]
    inbox.put(Tokens(id="r", tokens=[3]))
    inbox.put(Done(id="r", reason="stop", usage=usage, completion=3))
    assert [m.tokens for m in (await reading)[:-1]] == [[1], [2], [3]]


async def _all(inbox: Stream) -> list:
    return [m async for m in inbox]


@pytest.mark.parametrize("n", [1, 2])
async def test_what_a_token_brings_is_one_write(dirs, monkeypatch, n) -> None:
    writes: list[bytes] = []
    monkeypatch.setattr("engine.api.transport._body", _noting(writes))
    async with api(dirs["json_calls"], answer("Hi. ", CALL)) as server:
        reply = await server.chat(stream=True, n=n, tools=[tool("read_file", path="string")])
    assert "".join(w.decode() for w in writes) == reply.text
    tokens = len(server.engine.encode("Hi. ")) + len(server.engine.encode(CALL))
    assert len(writes) <= n * (tokens + 2) + 1, "more than a start, the tokens and an end of each, and the end of all"
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert {c["choices"][0]["index"] for c in chunks} == set(range(n))


def _noting(writes: list[bytes]):
    async def body(send, data: bytes) -> None:
        writes.append(data)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    return body
