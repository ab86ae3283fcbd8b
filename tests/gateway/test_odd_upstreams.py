"""Upstreams that report trouble in odd ways: under a good status, in the middle, by saying nothing. None of it looks finished."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.support.fake_upstream import FakeUpstream, Stream, Whole, chunk, content, finish, usage
from tests.support.gateway import Gateway, ask, settings

DIALECTS = {
    "/v1/chat/completions": ask(),
    "/v1/messages": ask(max_tokens=9),
    "/v1/responses": {"model": "m", "input": "hello"},
    "/v1/completions": {"model": "m", "prompt": "x"},
}
TOO_LONG = "maximum context length is 10 tokens"
ERRORS = {
    "as OpenAI writes it": {"error": {"message": TOO_LONG, "type": "BadRequestError", "code": 400}},
    "as vLLM wrote it": {"object": "error", "message": TOO_LONG, "type": "BadRequestError", "param": None, "code": 400},
    "as text": {"error": TOO_LONG},
    "beside choices": {"choices": [], "error": {"message": TOO_LONG}},
}
FINISHED = (b"[DONE]", b"message_stop", b"response.completed", b'"end_turn"', b'"completed"')


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("path", DIALECTS)
async def test_an_error_under_a_good_status_is_an_error_in_every_dialect(tmp_path, path, error) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai"), tmp_path) as gw:
        up.script(Whole(error))
        whole, unstreamed = await gw.post(DIALECTS[path], path), await gw.post(DIALECTS[path] | {"stream": True}, path)
        up.script(Stream([error]))
        first = await gw.post(DIALECTS[path] | {"stream": True}, path)
        up.script(Stream([chunk({"content": "a"}) | {"n": 1}, 0.05, error]))
        late = await gw.post(DIALECTS[path] | {"stream": True}, path)
        records = await gw.records(4)
    for got in (whole, unstreamed, first):
        assert got.status == 502 and TOO_LONG in got.json["error"]["message"], got
    assert late.status == 200 and TOO_LONG.encode() in late.body and not any(word in late.body for word in FINISHED), late
    assert [r["outcome"] for r in records] == ["error"] * 4 and all(TOO_LONG in r["error"]["message"] for r in records)


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": None}, {"choices": ["x"]}, {"detail": "x"}], ids=json.dumps)
async def test_a_whole_answer_without_a_choice_is_no_answer(tmp_path, path, answer) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai"), tmp_path) as gw:
        up.script(Whole(answer))
        got = await gw.post(DIALECTS[path], path)
    assert got.status == 502 and "no choices" in got.json["error"]["message"]


def second(text: str, reason: str | None = None) -> dict:
    return {"choices": [{"index": 1, "delta": {"content": text}, "finish_reason": reason}]}


# What came before the end of the connection, whether [DONE] was there, whether that is a finished answer.
ENDS = [
    ([], True, False),  # [DONE] behind nothing
    ([chunk({"role": "assistant", "content": ""})], True, False),
    ([content("a")], True, True),  # [DONE] without a reason
    ([content("a")], False, False),
    ([content("a"), finish("stop")], False, True),  # a reason without [DONE]
    ([content("a"), finish("length"), usage(1, 1)], False, True),
    ([finish("stop")], False, True),  # an answer may say nothing
    ([content("a"), second("b"), finish("stop")], False, False),  # of two choices one never ended
    ([content("a"), second("b"), finish("stop"), second("", "stop")], False, True),
]


@pytest.mark.parametrize(("items", "done", "good"), ENDS)
async def test_a_stream_is_finished_only_when_its_upstream_said_so(tmp_path, items, done, good) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai"), tmp_path) as gw:
        up.script(Stream(items, done=done))
        chat, anthropic = await gw.post(ask(stream=True, n=2)), await gw.post(ask(stream=True, max_tokens=9), "/v1/messages")
        records = await gw.records(2)
    assert [r["outcome"] == "ok" for r in records] == [good, good]
    for got in (chat, anthropic):
        assert any(word in got.body for word in FINISHED) == good and (b'"error"' in got.body) != good, got


# --- upstreams below the level of answers: what comes over the wire is no answer, or not all of it

EVENT_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
LAST_CHUNK = b"0\r\n\r\n"
STALL = 60.0
NONSENSE = (
    b"data: {oops\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"\xff\xfe"}}]}\n\n',
    b'data: [1, 2]\n\ndata: "x"\n\ndata: 5\n\ndata: null\n\n',
    b"event: error\ndata: \n\n:::\n\nid\n\n\n\n",
    b"data: " + b"[" * 100_000 + b"\n\n",
    bytes(range(256)) + b"\n\n",
)


def part(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


Said = Sequence[bytes | float]  # bytes to send, seconds to wait; the connection closes at the end
# What is said, and the outcome in the record: `died` is an answer that had begun.
BROKEN: dict[str, tuple[Said, str]] = {
    "closes before a word": ([], "error"),
    "closes in the head": ([b"HTTP/1.1 200 OK\r\ncontent-ty"], "error"),
    "speaks no HTTP": ([b"SSH-2.0-OpenSSH_9.6\r\n", STALL], "error"),
    "stalls before the head": ([STALL], "error"),
    "stalls behind the head": ([EVENT_STREAM, STALL], "error"),
    "stalls between events": ([EVENT_STREAM + part(WORD), STALL], "error"),
    "stalls in an event": ([EVENT_STREAM + part(WORD + WORD[:20]), STALL], "error"),
    "closes between events": ([EVENT_STREAM + part(WORD)], "died"),
    "closes in an event": ([EVENT_STREAM + part(WORD + WORD[:20])], "died"),
    "closes in a chunk": ([EVENT_STREAM + part(WORD) + b"ff\r\n" + WORD[:20]], "died"),
    "ends in an event": ([EVENT_STREAM + part(WORD + WORD[:20]) + LAST_CHUNK], "died"),
    "ends behind half of the last event": ([EVENT_STREAM + part(WORD + END[:40]) + LAST_CHUNK], "died"),
    "sends a chunk of no size": ([EVENT_STREAM + part(WORD) + b"zz\r\n"], "died"),
    "sends nothing but nonsense": (
        [EVENT_STREAM + part(b"".join(NONSENSE)) + LAST_CHUNK],
        "died or error",
    ),  # a dialect that translates had nothing to begin with
    "sends nonsense and stops": ([EVENT_STREAM + part(WORD) + part(b"".join(NONSENSE))], "died"),
    "sends an event without an end": ([EVENT_STREAM + part(WORD), *[part(b"data: " + b"x" * (1 << 20))] * 17], "error"),
    "sends a page": ([b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>"], "error"),
}


@asynccontextmanager
async def raw_upstream(said: list[Said]) -> AsyncIterator[str]:
    """Says the next of `said` to each request, without knowing HTTP; the last one again and again."""
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                for item in said.pop(0) if len(said) > 1 else said[0]:
                    if isinstance(item, float):
                        await asyncio.sleep(item)
                    else:
                        writer.write(item)
                        await writer.drain()
                return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()


GOOD: Said = [EVENT_STREAM + part(WORD + END) + LAST_CHUNK]
QUICK = {"timeouts": {"prefill": 0.5, "idle": 0.5, "keepalive": 10}, "routing": {"retries": 0}}
PATHS = [path for path in DIALECTS if path != "/v1/completions"]


LONG = "sends an event without an end"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == LONG else ()) for n in BROKEN])
async def test_whatever_breaks_off_ends_in_an_error_in_every_dialect(tmp_path, name) -> None:
    said, outcome = BROKEN[name]
    # One that closes before a word may have closed a pooled connection; it is asked twice.
    script = [*([said] * (2 if name == "closes before a word" else 1)), GOOD] * len(PATHS)
    async with raw_upstream(script) as base, Gateway(settings(base, "openai", **QUICK), tmp_path) as gw:
        for path in PATHS:
            broken = await gw.post(DIALECTS[path] | {"stream": True}, path)
            well = await gw.post(DIALECTS[path] | {"stream": True}, path)
            assert broken.status >= 500 or b'"error"' in broken.body or b"event: error" in broken.body, broken
            assert not any(word in broken.body for word in FINISHED), broken
            assert any(word in well.body for word in FINISHED) and b"error" not in well.body.replace(b'"error":null', b""), well
        records = await gw.records(2 * len(PATHS))
    assert all(r["outcome"] in outcome for r in records[::2]), [(r["outcome"], r["error"]) for r in records]
    assert [r["outcome"] for r in records[1::2]] == ["ok"] * len(PATHS)


async def test_nonsense_between_events_harms_nothing_and_is_counted(tmp_path) -> None:
    """In a good answer it is left out where it is translated, passed on where it is not; the record counts it."""
    said = [EVENT_STREAM + part(WORD + b"".join(NONSENSE) + WORD + END) + LAST_CHUNK]
    async with raw_upstream([said]) as base, Gateway(settings(base, "openai", **QUICK), tmp_path) as gw:
        got = {path: await gw.post(DIALECTS[path] | {"stream": True}, path) for path in PATHS}
        records = await gw.records(len(PATHS))
    assert [r["outcome"] for r in records] == ["ok"] * len(PATHS)
    assert all(r["answer"]["malformed"] >= 5 and r["answer"]["channels"]["content"]["text"] == "aa" for r in records)
    for path in PATHS[1:]:
        for event in got[path].body.split(b"\n\n"):
            data = event.partition(b"data: ")[2]
            assert not data or json.loads(data)
