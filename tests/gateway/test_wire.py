"""The thin HTTP client: every way an upstream can answer, cut anywhere, and every way it can go away."""

import asyncio
import contextlib
import gzip
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream import wire
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, message
from tests.support.gateway import Gateway, ask, settings

BODY = b'{"a":1}' * 50


def chunked(body: bytes, *cuts: int) -> bytes:
    edges = [0, *sorted(min(c, len(body)) for c in cuts), len(body)]
    pieces = [body[a:b] for a, b in zip(edges, edges[1:], strict=False) if a < b]
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY, 3, 90),
    "interim": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    "to the end": b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
    "trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(BODY)[:-2] + b"x: y\r\n\r\n",
}


class Server:
    """Answers each request on a connection with the next script: pieces of bytes; None closes."""

    def __init__(self, *scripts: list[bytes | None]) -> None:
        self.scripts = list(scripts)
        self.connections = 0
        self.seen: list[bytes] = []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.address = self.server.sockets[0].getsockname()[:2]
        self.pool = wire.Pool(keep=30)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pool.close()
        self.server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while self.scripts:
                self.seen.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in self.scripts.pop(0):
                    if piece is None:
                        break
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                else:
                    continue
                break
        writer.close()

    async def ask(self) -> tuple[int, bytes]:
        reply = await self.pool.send(self.address, b"POST / HTTP/1.1\r\n\r\n", b"", 5)
        await reply.head(5)
        parts = []
        while part := await reply.read(5):
            parts.append(part)
        return reply.status, b"".join(parts)


@pytest.mark.parametrize("kind", ANSWERS)
async def test_every_framing_is_read_and_the_connection_used_again_where_it_may(kind: str) -> None:
    ending: list[bytes | None] = [None] if kind == "to the end" else []
    async with Server([ANSWERS[kind], *ending], [ANSWERS["length"]]) as server:
        assert await server.ask() == (200, BODY)
        assert await server.ask() == (200, BODY)
        assert server.connections == (2 if kind == "to the end" else 1)


@given(st.sampled_from(sorted(ANSWERS)), st.lists(st.integers(0, 600), max_size=6))
def test_answers_cut_anywhere_read_the_same(kind: str, cuts: list[int]) -> None:
    class Transport:
        def write(self, data: bytes) -> None: ...
        def pause_reading(self) -> None: ...
        def abort(self) -> None: ...

    async def main() -> None:
        connection = wire.Connection(lambda c: None)
        connection.transport = Transport()
        reply = connection.send(b"", b"")
        raw = ANSWERS[kind]
        edges = [0, *sorted(min(c, len(raw)) for c in cuts), len(raw)]
        for a, b in zip(edges, edges[1:], strict=False):
            connection.data_received(raw[a:b]) if a < b else None
        connection.connection_lost(None)
        await reply.head(1)
        parts = []
        while part := await reply.read(1):
            parts.append(part)
        assert (reply.status, b"".join(parts)) == (200, BODY)

    asyncio.run(main())


@given(st.binary(max_size=200))
def test_garbage_is_an_error_and_never_an_answer(garbage: bytes) -> None:
    async def main() -> None:
        connection = wire.Connection(lambda c: None)
        connection.transport = type("T", (), {"write": lambda s, d: None, "abort": lambda s: None})()
        reply = connection.send(b"", b"")
        connection.data_received(b"no HTTP: " + garbage)
        with pytest.raises(wire.Broken) as e:
            await reply.head(1)
        assert not e.value.unanswered

    asyncio.run(main())


@pytest.mark.parametrize(
    "piece", [b"HTTP/1.1 100 Continue\r\n\r\n", b"a: b\r\n", b"x" * 9999], ids=["interim", "headers", "a line"]
)
async def test_a_head_without_an_end_is_given_up(piece: bytes) -> None:
    begin = b"" if piece.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\nx: "
    async with Server([begin + piece, *[piece * (1 + 9999 // len(piece))] * 60]) as server:
        with pytest.raises(wire.Broken, match="a head of more than 256 KiB"):
            await server.ask()


async def test_a_head_that_drips_is_waited_for_no_longer_than_one_that_does_not_come() -> None:
    connection = wire.Connection(lambda c: None)
    connection.transport = type("T", (), {"write": lambda s, d: None, "abort": lambda s: None})()
    reply = connection.send(b"", b"")
    drip = asyncio.create_task(dripping(connection))
    with pytest.raises(TimeoutError):
        await reply.head(0.2)
    drip.cancel()


async def dripping(connection: wire.Connection) -> None:
    connection.data_received(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        await asyncio.sleep(0.01)
        connection.data_received(b"x")


@pytest.mark.parametrize(
    ("pieces", "unanswered"),
    [
        ([None], True),
        ([b"HTTP/1.1 2", None], False),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", None], False),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", None], False),
    ],
)
async def test_a_connection_that_closes_early_is_broken_and_what_came_is_given_first(pieces, unanswered) -> None:
    async with Server(pieces) as server:
        reply = await server.pool.send(server.address, b"POST / HTTP/1.1\r\n\r\n", b"", 5)
        got = b""
        with pytest.raises(wire.Broken) as e:
            await reply.head(5)
            while part := await reply.read(5):
                got += part
        assert e.value.unanswered == unanswered and got == (b"abc" if reply.status else b"")


async def test_silence_is_a_timeout_and_closing_tells_the_other_side() -> None:
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reply = await wire.Pool(keep=1).send(server.sockets[0].getsockname()[:2], b"POST / HTTP/1.1\r\n\r\n", b"", 5)
        await reply.head(5)
        assert await reply.read(5) == b"ab"
        with pytest.raises(TimeoutError):
            await reply.read(0.01)
        reply.close()
        await asyncio.wait_for(left.wait(), 5)


async def test_nobody_there_says_why() -> None:
    pool = wire.Pool(keep=1)
    with pytest.raises(wire.NoConnection) as e:
        await pool.send(("127.0.0.1", 1), b"", b"", 5)
    assert isinstance(e.value.__cause__, ConnectionRefusedError)


async def test_a_slow_reader_makes_the_upstream_wait() -> None:
    size = 64 << 20
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    async with Server([head, bytes(size)], [ANSWERS["length"]]) as server:
        reply = await server.pool.send(server.address, b"POST / HTTP/1.1\r\n\r\n", b"", 5)
        await reply.head(30)
        await asyncio.sleep(0.2)
        assert reply._size < size // 4  # what the sockets hold is not ours
        total = 0
        while part := await reply.read(30):
            total += len(part)
        assert total == size
        assert await server.ask() == (200, BODY)


async def test_idle_connections_are_closed_after_their_time() -> None:
    async with Server([ANSWERS["length"]], [ANSWERS["length"]]) as server:
        server.pool = wire.Pool(keep=0.05)
        await server.ask()
        (idle,) = server.pool._idle.values()
        while idle:
            await asyncio.sleep(0.01)
        await server.ask()
        assert server.connections == 2


async def test_a_compressed_answer_is_unpacked(tmp_path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        up.script(Whole(gzip.compress(b'{"choices":[{}]}'), headers={"content-encoding": "gzip"}))
        assert (await gw.post(ask())).body == b'{"choices":[{}]}'
        up.script(
            Stream([gzip.compress(b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n')], done=False)
        )
        up.answers[0].headers["content-encoding"] = "gzip"
        assert (await gw.post(ask(stream=True))).text() == "x"
        up.script(Whole(b"no gzip", headers={"content-encoding": "gzip"}))
        assert (await gw.post(ask())).json["error"]["code"] == "upstream_protocol"


async def test_a_line_break_in_a_key_is_said_and_not_sent(tmp_path) -> None:
    async with FakeUpstream() as up:
        up.script(Whole(message()))
        params = {"model": "openai/m", "api_base": up.base + "/v1", "api_key": "k\r\nx-evil: 1"}
        async with Gateway({"model_list": [{"model_name": "m", "litellm_params": params}]}, tmp_path) as gw:
            got = await gw.post(ask())
    assert got.status == 502 and "line break" in got.json["error"]["message"] and not up.requests


async def test_a_stream_that_is_read_slowly_arrives_whole(tmp_path) -> None:
    text = "x" * 200_000
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        up.script(Stream([content(text) for _ in range(20)]))
        got = await gw.post(ask(stream=True))
    assert got.text() == text * 20


@pytest.mark.parametrize("user", ["", "user:word@"])  # with a name in the address aiohttp does the asking, as for https
async def test_both_ways_to_an_upstream_pass_and_fail_alike(user: str, tmp_path) -> None:
    async with FakeUpstream() as up:
        base = up.base.replace("http://", f"http://{user}")
        async with Gateway(settings(base), tmp_path) as gw:
            assert (await gw.post(ask(stream=True))).text() == "Hello world"
            up.script(Whole(message("whole")))
            assert (await gw.post(ask())).json["choices"][0]["message"]["content"] == "whole"
            up.script(Whole({"error": {"message": "busy", "code": "b"}}, 422))
            got = await gw.post(ask())
            assert (got.status, got.json["error"]["message"], got.json["error"]["code"]) == (422, "busy", "b")
            up.script(Stream([content("half")], die_after=1))
            assert (await gw.post(ask(stream=True))).events[-1]["error"]["code"] == "upstream_died"
        async with Gateway(settings(f"http://{user}127.0.0.1:1"), tmp_path) as gw:
            assert (await gw.post(ask())).json["error"]["code"] == "upstream_connect"
        assert ("authorization" in up.requests[0].headers) == bool(user)


@pytest.mark.parametrize("size", [0, 1, wire.COPIED - 1, wire.COPIED, 3 << 20])
async def test_a_body_arrives_whole_behind_its_head_however_long_it_is(size) -> None:
    head, body, seen = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size, random.Random(size).randbytes(size), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readexactly(len(head) + size))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    pool = wire.Pool(keep=30)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reply = await pool.send(server.sockets[0].getsockname()[:2], head, body, 5)
        await reply.head(5)
        pool.close()
    assert seen == [head + body]
