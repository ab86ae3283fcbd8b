"""The whole path: agent -> gateway -> upstream -> agent, and the record. Every way it can end."""

import asyncio
import dataclasses
import json
import socket
import time

import aiohttp
import pytest

from gateway import app as app_module
from gateway.pipeline import LARGE
from tests.support.fake_upstream import HELLO, FakeUpstream, Stream, Whole, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Gateway, ask, settings


@pytest.fixture
async def up():
    async with FakeUpstream() as fake:
        yield fake


async def test_a_stream_passes_through_byte_for_byte(up, tmp_path) -> None:
    async with Gateway(settings(up.base, "openai"), tmp_path) as gw:
        got = await gw.post(ask(stream=True, stream_options={"include_usage": True}))
    wire = b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in HELLO.items)
    assert got.status == 200 and got.body == wire + b"data: [DONE]\n\n"
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.headers["x-moorage-request-id"].startswith("req_")


async def test_a_whole_answer_passes_through_byte_for_byte(up, tmp_path) -> None:
    choice = b'{"index":0,"message":{"role":"assistant","content":"Hi \\u00e9"},"finish_reason":"stop"}'
    raw = b'{ "id":"x","choices":[' + choice + b'], "odd" : 1.0 }'
    up.script(Whole(raw))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(ask())
    assert (got.status, got.body) == (200, raw)


async def test_unchanged_request_bytes_reach_a_plain_upstream_unchanged(up, tmp_path) -> None:
    up.script(Whole(message()))
    raw = b'{ "messages" : [ {"content":"caf\\u00e9 \xc3\xa9","role":"user"} ],\n "temperature": 0.70, "model":"m", "top_k":40 } '
    async with Gateway(settings(up.base, "openai"), tmp_path) as gw:
        await gw.post(raw)
        (record,) = await gw.records()
    assert up.requests[0].body == raw
    assert "moorage" not in up.requests[0].json
    assert record["received"]["body"].encode() == raw == record["sent"]["body"].encode()
    assert record["decisions"] == []


async def test_hints_are_spliced_in_for_our_engine_and_nothing_else_changes(up, tmp_path) -> None:
    up.script(Whole(message()))
    raw = b'{ "messages" : [ {"content":"hi","role":"user"} ], "model":"m" }\n'
    async with Gateway(settings(up.base), tmp_path) as gw:
        await gw.post(raw, x_moorage_session="s1")
    sent = up.requests[0].body
    assert sent.startswith(b'{ "messages" : [ {"content":"hi","role":"user"} ], "model":"m","moorage":')
    hints = up.requests[0].json["moorage"]
    assert hints["session"] == "s1" and {"message": 0, "edge": "start", "kind": "user", "weight": 0.9} in hints["anchors"]


async def test_usage_is_asked_for_and_kept_from_those_who_did_not_ask(up, tmp_path) -> None:
    async with Gateway(settings(up.base, "openai"), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert up.requests[0].json["stream_options"] == {"include_usage": True}
    assert b"usage" not in got.body and got.text() == "Hello world" and got.events[-1] == "[DONE]"
    assert record["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert record["reuse"] == {"prompt": 12, "common": 8, "new": 4}
    assert "read.usage" in got.headers["x-moorage-decisions"]


async def test_the_record_has_channels_with_their_own_first_token_times(up, tmp_path) -> None:
    items = [
        reasoning("I "),
        reasoning("think"),
        0.05,
        content("so"),
        0.05,
        tool_call(0, '{"a":', "c1", "run"),
        tool_call(0, "1}"),
    ]
    up.script(Stream([*items, finish("tool_calls"), usage(5, 5)]))
    async with Gateway(settings(up.base), tmp_path) as gw:
        await gw.post(ask(stream=True), user_agent="opencode/1.0", session_id="abc")
        (record,) = await gw.records()
    channels = record["answer"]["channels"]
    assert list(channels) == ["reasoning_content", "content", "tool_calls"]
    assert channels["reasoning_content"]["text"] == "I think" and channels["content"]["text"] == "so"
    firsts = [c["first_ms"] for c in channels.values()]
    assert firsts == sorted(firsts) and firsts[2] - firsts[0] >= 90
    assert record["answer"]["tool_calls"] == [{"choice": 0, "id": "c1", "name": "run", "arguments": '{"a":1}'}]
    assert record["outcome"] == "ok" and record["answer"]["finish_reason"] == "tool_calls"
    assert record["session"] == {"id": "abc", "source": "header:session-id", "agent": "opencode", "turn_class": "side"}


async def test_an_upstream_that_dies_mid_stream_ends_in_an_error_and_never_looks_finished(up, tmp_path) -> None:
    up.script(Stream([content("Hel"), content("lo"), 0.05], die_after=3))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert got.text() == "Hello" and "[DONE]" not in got.events
    error = got.events[-1]["error"]
    assert error["code"] == "upstream_died" and "Send the request again" in error["message"]
    assert record["outcome"] == "died" and record["answer"]["channels"]["content"]["text"] == "Hello"
    assert record["attempts"][0]["error"] and record["error"]["code"] == "upstream_died"


async def test_a_stream_that_just_stops_is_an_error_too(up, tmp_path) -> None:
    up.script(Stream([content("Hel")], done=False))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
    assert got.events[-1]["error"]["code"] == "upstream_died" and "[DONE]" not in got.events


async def test_half_an_event_of_a_dead_upstream_never_reaches_the_client(up, tmp_path) -> None:
    up.script(Stream([content("a"), b'data: {"choices":[{"del', 0.05], die_after=3))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
    assert got.events[-1]["error"]["code"] == "upstream_died" and b'{"del' not in got.body.replace(b'{"delta"', b"")


async def test_an_error_event_of_the_upstream_ends_the_stream_as_an_error(up, tmp_path) -> None:
    up.script(Stream([content("a"), 0.05, {"error": {"message": "out of pages", "code": "oom"}}]))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert got.events[-1]["error"]["message"] == "out of pages" and "[DONE]" not in got.events
    assert record["outcome"] == "error" and record["error"]["code"] == "oom"


@pytest.mark.parametrize("stream", [True, False])
async def test_error_statuses_keep_their_words_and_retry_after(up, tmp_path, stream) -> None:
    body = {"error": {"message": "context too long: 9000 > 8192", "type": "invalid_request_error", "code": "context_length"}}
    up.script(Whole(body, 400), Whole({"error": {"message": "busy"}}, 429, {"retry-after": "7"}))
    async with Gateway(settings(up.base), tmp_path) as gw:
        first, second = await gw.post(ask(stream=stream)), await gw.post(ask(stream=stream))
    assert first.status == 400 and first.json["error"]["message"] == "context too long: 9000 > 8192"
    assert first.json["error"]["code"] == "context_length"
    assert second.status == 429 and second.headers["retry-after"] == "7"


async def test_no_upstream_is_a_clear_503(tmp_path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    async with Gateway(settings(f"http://127.0.0.1:{port}"), tmp_path) as gw:
        got = await gw.post(ask())
        (record,) = await gw.records()
    assert got.status == 503 and "moorage engine serve" in got.json["error"]["message"]
    assert record["outcome"] == "error" and record["status"] == 503


async def leave(gw: Gateway, up: FakeUpstream, body: dict, first: bytes) -> None:
    """Send a request and hang up once the upstream has it and the client has read `first`."""
    read = asyncio.Event()

    async def ask_and_read(http: aiohttp.ClientSession) -> None:
        async with http.post(gw.url + "/v1/chat/completions", json=body) as response:
            await response.content.readuntil(first)
            read.set()
            await response.read()

    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(ask_and_read(http))
        while not up.requests:
            await asyncio.sleep(0.005)
        if first:
            await asyncio.wait_for(read.wait(), 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("answer", "stream", "first"),
    [
        (Stream([content("a"), 300.0]), True, b"}\n\n"),  # mid-stream
        (Stream([content("a")], head_delay=300.0), True, b""),  # during prefill
        (Whole(message(), head_delay=300.0), False, b""),  # in a non-stream call
    ],
)
async def test_a_client_that_leaves_cancels_the_upstream_within_a_second(up, tmp_path, answer, stream, first) -> None:
    up.script(answer)
    async with Gateway(settings(up.base), tmp_path) as gw:
        await leave(gw, up, ask(stream=stream), first)
        left = time.monotonic()
        while not up.cancelled and time.monotonic() - left < 10:  # a second on a machine that has nothing else to do
            await asyncio.sleep(0.01)
        (record,) = await gw.records()
    assert up.cancelled == 1
    assert record["outcome"] == "cancelled"
    if first:
        assert record["answer"]["channels"]["content"]["text"] == "a"


async def test_keepalives_go_out_during_a_long_prefill(up, tmp_path) -> None:
    up.script(Stream([content("late"), finish()], head_delay=0.5))
    async with Gateway(settings(up.base, timeouts={"keepalive": 0.1}), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert got.body.startswith(b": keep-alive\n\n") and got.text() == "late" and got.events[-1] == "[DONE]"
    assert record["answer"]["keepalives"] >= 2


async def test_an_error_after_a_keepalive_is_an_event(up, tmp_path) -> None:
    up.script(Whole({"error": {"message": "no"}}, 400, head_delay=0.3))
    async with Gateway(settings(up.base, timeouts={"keepalive": 0.1}), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
    assert got.status == 200 and got.events[-1]["error"]["message"] == "no"


async def test_prefill_and_idle_have_timeouts_of_their_own(up, tmp_path) -> None:
    up.script(Stream([content("x")], head_delay=5.0), Stream([content("x"), 5.0, finish()]))
    async with Gateway(settings(up.base, timeouts={"prefill": 0.2, "idle": 0.1}), tmp_path) as gw:
        prefill, idle = await gw.post(ask(stream=True)), await gw.post(ask(stream=True))
    assert prefill.status == 504 and "0.2 s" in prefill.json["error"]["message"]
    assert idle.events[-1]["error"]["code"] == "upstream_timeout" and idle.text() == "x"


async def test_completions_pass_through(up, tmp_path) -> None:
    raw = b'{"model":"m","prompt":[1,2,3],"logprobs":5,"echo":true}'
    up.script(Whole({"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "out", "finish_reason": "stop"}]}))
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(raw, "/v1/completions")
        (record,) = await gw.records()
    assert got.json["choices"][0]["text"] == "out" and up.requests[0].path == "/v1/completions"
    assert up.requests[0].body == raw and record["answer"]["channels"]["content"]["text"] == "out"


BAD = [
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_json"),
    (b"{}", 400, "invalid_request"),
    (b'{"model":"m","messages":[]}', 400, "invalid_request"),
    (b'{"model":"m","messages":[{"role":"robot","content":"x"}]}', 400, "invalid_request"),
    (b'{"model":"m","messages":[7]}', 400, "invalid_request"),
    (b'{"model":3,"messages":[{"role":"user","content":"x"}]}', 400, "invalid_request"),
    (b'{"model":"m","stream":"yes","messages":[{"role":"user","content":"x"}]}', 400, "invalid_request"),
    (b'{"model":"nope","messages":[{"role":"user","content":"x"}]}', 404, "model_not_found"),
]


@pytest.mark.parametrize(("raw", "status", "code"), BAD)
async def test_bad_requests_are_refused_clearly_and_recorded(up, tmp_path, raw, status, code) -> None:
    async with Gateway(settings(up.base), tmp_path) as gw:
        got = await gw.post(raw)
        (record,) = await gw.records()
    assert (got.status, got.json["error"]["code"]) == (status, code) and up.requests == []
    assert record["outcome"] == "refused" and record["received"]["body"].encode() == raw


async def test_half_an_emoji_does_not_refuse_a_request(up, tmp_path) -> None:
    up.script(Whole(message()))
    raw = b'{"model":"m","messages":[{"role":"user","content":"cut \\ud83d, whole \\ud83d\\ude00, \\\\ud83d"}]}'
    async with Gateway(settings(up.base, "openai"), tmp_path) as gw:
        got = await gw.post(raw)
    assert got.status == 200 and up.requests[0].body == raw.replace(b"cut \\ud83d", b"cut \\ufffd")
    assert "read.surrogate" in got.headers["x-moorage-decisions"]


async def test_models_health_metrics_and_unknown_paths(up, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(app_module, "HEALTH_S", 0.0)
    data = settings(up.base)
    data["model_list"].append({"model_name": "*", "litellm_params": {"model": "moorage/*", "api_base": up.base}})
    async with Gateway(data, tmp_path) as gw:
        await gw.post(ask(stream=True))
        models, health, metrics = await gw.get("/v1/models"), await gw.get("/health"), await gw.get("/metrics")
        missing, wrong = await gw.get("/nope"), await gw.get("/v1/chat/completions")
        up.health_status, up.health = 503, {"status": "loading", "progress": 0.4}
        loading = await gw.get("/health")
        ready = await gw.get("/health/readiness")
    assert [m["id"] for m in models.json["data"]] == ["m"]
    assert health.json["status"] == "ok" and health.json["upstreams"]["m#0"]["state"] == "ready"
    assert b'moorage_requests_total{dialect="chat",model="m",outcome="ok"} 1.0' in metrics.body
    assert missing.status == 404 and wrong.status == 405 and wrong.headers["allow"] == "POST, HEAD"
    assert loading.status == 200 and loading.json["status"] == "loading" and ready.status == 503
    assert loading.json["upstreams"]["m#0"]["detail"]["progress"] == 0.4


async def test_keys_are_asked_for_when_configured(up, tmp_path) -> None:
    up.script(Whole(message()))
    data = settings(up.base, keys=[{"name": "desk", "key": "sk-one"}, {"name": "lab", "key": "sk-two"}])
    async with Gateway(data, tmp_path) as gw:
        none, wrong = await gw.post(ask()), await gw.post(ask(), authorization="Bearer sk-three")
        first, second = await gw.post(ask(), authorization="Bearer sk-one"), await gw.post(ask(), x_api_key="sk-two")
        records = await gw.records(4)
    assert [none.status, wrong.status, first.status, second.status] == [401, 401, 200, 200]
    assert [r["caller"] for r in records] == ["anonymous", "anonymous", "desk", "lab"]
    assert "sk-" not in gw.path.read_text()


async def test_the_next_deployment_answers_when_the_first_is_gone(up, tmp_path) -> None:
    data = settings("http://127.0.0.1:9")
    data["model_list"] += settings(up.base)["model_list"]
    async with Gateway(data, tmp_path) as gw:
        got = await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert got.text() == "Hello world"
    assert [bool(a["error"]) for a in record["attempts"]] == [True, False] and record["sent"]["deployment"] == "m#1"


async def test_other_streams_go_on_between_the_stages_of_a_large_request(up, tmp_path, monkeypatch) -> None:
    up.script(Whole(message()))
    async with Gateway(settings(up.base), tmp_path) as gw:
        order: list[str] = []

        def stage(name: str):
            def run(turn):
                order.append(name)
                asyncio.get_running_loop().call_soon(order.append, "others")
                return turn

            return run

        pipeline = gw.app.pipeline
        gw.app.pipeline = dataclasses.replace(pipeline, before=(stage("first"), *pipeline.before, stage("last")))
        together, apart = ["first", "last", "others", "others"], ["first", "others", "last", "others"]
        for size, stretch, want in ((10, 0.0, together), (LARGE, 0.0, apart), (LARGE, 60.0, together)):
            order.clear()
            monkeypatch.setattr("gateway.pipeline.STRETCH_S", stretch)
            await gw.post(ask("x" * size))
            assert order == want


async def test_of_several_large_requests_one_computes_before_others_go_on(up, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gateway.pipeline.STRETCH_S", 0.0)
    up.script(*[Whole(message())] * 4)
    async with Gateway(settings(up.base), tmp_path) as gw:
        order: list[str] = []

        def stage(turn):
            order.append("stage")
            asyncio.get_running_loop().call_soon(order.append, "others")
            return turn

        gw.app.pipeline = dataclasses.replace(gw.app.pipeline, before=(stage, *gw.app.pipeline.before, stage))
        await asyncio.gather(*(gw.post(ask("x" * LARGE)) for _ in range(4)))
    assert order.count("stage") == 8 and all(pair != ("stage", "stage") for pair in zip(order, order[1:], strict=False))


async def test_a_request_that_waits_in_line_is_kept_alive_in_every_dialect(up, tmp_path) -> None:
    """While one request holds the only place, another one's line is not silent, and its refusal is an event."""
    rules = {"limits": {"concurrency": 1, "wait": 1}, "timeouts": {"keepalive": 0.1}}
    asked = {"/v1/chat/completions": ask(), "/v1/messages": ask(max_tokens=9), "/v1/responses": {"model": "m", "input": "x"}}
    ends = {"/v1/chat/completions": b"rate_limit_error", "/v1/messages": b"event: error", "/v1/responses": b"response.failed"}
    up.script(Stream([content("a"), 300.0]))
    async with Gateway(settings(up.base) | rules, tmp_path) as gw:
        first = asyncio.create_task(gw.post(ask(stream=True)))
        while not up.requests:
            await asyncio.sleep(0.005)
        line = asyncio.create_task(gw.post(ask(stream=True)))
        while b"moorage_waiting_requests 1.0" not in (await gw.get("/metrics")).body:
            await asyncio.sleep(0.005)
        await line
        for path, body in asked.items():
            got = await gw.post(body | {"stream": True}, path)
            assert got.status == 200 and ends[path] in got.body, got
        plain = await gw.post(ask())
        first.cancel()
        records = await gw.records(6)
        assert b"moorage_waiting_requests 0.0" in (await gw.get("/metrics")).body
    assert plain.status == 429 and "retry-after" in plain.headers
    waited = [r for r in records if r["stream"] and r["outcome"] == "refused"]
    assert len(waited) == 4 and all(r["answer"]["keepalives"] for r in waited) and len(up.requests) == 1


BIG = content("x" * (12 << 20))  # more than the system takes for a client that reads nothing
UNREAD = {
    "goes on": Stream([content("x" * 100_000)] * 1000 + [300.0]),
    "ends": Stream([BIG, finish()]),
    "breaks off": Stream([BIG], die_after=1),
    "falls silent": Stream([BIG, 300.0]),
    "reports an error": Stream([BIG, {"error": {"message": "no"}}]),
    "is whole": Whole(message("x" * (12 << 20))),
}


QUICK = ("goes on", "breaks off")


@pytest.mark.parametrize("upstream", [pytest.param(u, marks=() if u in QUICK else pytest.mark.slow) for u in UNREAD])
async def test_a_client_that_reads_nothing_is_given_up(up, tmp_path, upstream) -> None:
    """Whatever its upstream does meanwhile: it leaves a record, its place is free again, and its connection goes."""
    up.script(UNREAD[upstream])
    rules = {"timeouts": {"idle": 1, "keepalive": 0.2}, "limits": {"concurrency": 1}}
    async with Gateway(settings(up.base, **rules), tmp_path) as gw:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gw.url.rpartition(":")[2]), limit=1024)
        body = json.dumps(ask(stream=upstream != "is whole")).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        (record,) = await gw.records()
        assert gw.app.pipeline.limits.status()["running"].get("anonymous", 0) == 0
        while gw.connections:  # our client holds its end open
            await asyncio.sleep(0.05)
        writer.transport.abort()
    # What ends at once is handed over at once: to us it looks like any other answer.
    looks = {"goes on": ("cancelled",), "ends": ("ok", "cancelled"), "is whole": ("ok",)}
    assert record["outcome"] in looks.get(upstream, ("cancelled", "died", "error"))
    assert record["answer"]["bytes"] < 100_000_000


async def test_without_keepalives_a_long_prefill_is_silent(up, tmp_path) -> None:
    up.script(Stream([content("late"), finish()], head_delay=0.3))
    async with Gateway(settings(up.base, timeouts={"keepalive": 0}), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
        (record,) = await gw.records()
    assert got.text() == "late" and record["answer"]["keepalives"] == 0
