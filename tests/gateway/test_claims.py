"""What gateways get wrong in public reports, where no other test of ours says that it is right here."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest

from gateway import records as records_module
from gateway.affinity import Affinity
from gateway.answer import Attempt
from gateway.config import Timeouts
from gateway.config_file import parse
from gateway.dialects.chat import Chat
from gateway.errors import UpstreamError
from gateway.routing import Balanced
from gateway.turn import Received, Turn
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, chunk, content, finish, message, tool_call, usage
from tests.support.gateway import Gateway, ask, settings

PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}


def asked(path: str, stream: bool = False) -> dict[str, Any]:
    body = {"model": "m", "input": "hi"} if path == PATHS[2] else ask("hi")
    return body | {"stream": stream} | ({"max_tokens": 99} if path == PATHS[1] else {})


VENDOR = {
    "top_k": 40,
    "min_p": 0.05,
    "cache_salt": "tenant-1",
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "repetition_penalty": 1.1,
    "unheard_of": {"deep": [1, None, 1e2]},
}


@pytest.mark.parametrize("path", PATHS)
async def test_vendor_fields_reach_the_upstream_in_every_dialect(tmp_path, path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai"), tmp_path) as gw:
        up.script(Whole(message()))
        assert (await gw.post(asked(path) | VENDOR, path)).status == 200
    assert {k: up.requests[0].json.get(k) for k in VENDOR} == VENDOR


async def test_unknown_fields_of_an_answer_reach_the_client_streamed_and_whole(tmp_path) -> None:
    more = {"timings": {"predicted_per_second": 31.5}, "x_vendor": [None, {"a": 1}], "system_fingerprint": "fp"}
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        up.script(Whole(message("Hi") | more), Stream([content("Hi") | more, finish()]))
        whole, streamed = await gw.post(ask(tools=[TOOL])), await gw.post(ask(tools=[TOOL], stream=True))
    assert {k: whole.json[k] for k in more} == more and {k: streamed.events[0][k] for k in more} == more


async def test_bytes_of_what_a_policy_does_not_change_stay_as_they_were(tmp_path) -> None:
    said = b'[ {"content":"caf\\u00e9 \\/ \xc3\xa9", "role":"user"} ]'
    raw = b'{ "messages":%s,"top_p":1.0, "seed":1e3,\n "temperature":9,"model":"m" }' % said
    policies = [{"clamp": {"temperature": {"max": 1}}}]
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai", policies=policies), tmp_path) as gw:
        up.script(Whole(message()))
        await gw.post(raw)
    sent = up.requests[0].body
    assert said in sent and b"1.0" in sent and b"1e3" in sent
    assert list(json.loads(sent)) == list(json.loads(raw)) and json.loads(sent)["temperature"] == 1


TRICKY = json.dumps({"text": 'if (x) { return "}]\\"{" } // ``` </tool_call> \n\t\\u007d é 😀'})


def spoken(event: dict[str, Any]) -> list[str]:
    """The pieces of arguments in one event of any dialect."""
    if event.get("type") == "content_block_delta":
        return [event["delta"].get("partial_json", "")]
    if event.get("type") == "response.function_call_arguments.delta":
        return [event["delta"]]
    return [t["function"]["arguments"] for c in event.get("choices", ()) for t in c["delta"].get("tool_calls", ())]


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("path", PATHS)
async def test_braces_and_quotes_inside_arguments_survive_any_cutting(tmp_path, path, step) -> None:
    pieces = [TRICKY[i : i + step] for i in range(0, len(TRICKY), step)]
    parts = [tool_call(0, "", "c1", "write"), *(tool_call(0, p) for p in pieces), finish("tool_calls")]
    tool = {"name": "write", "input_schema": SCHEMA} if path == PATHS[1] else TOOL
    tool = {"type": "function", **TOOL["function"]} if path == PATHS[2] else tool
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        up.script(Stream(parts))
        got = await gw.post(asked(path, stream=True) | {"tools": [tool]}, path)
    fragments = [f for e in got.events if isinstance(e, dict) for f in spoken(e)]
    assert json.loads("".join(fragments)) == json.loads(TRICKY)


@pytest.mark.parametrize("reason", ["stop", None])
async def test_a_call_without_its_finish_reason_gets_it(tmp_path, reason) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "write", "arguments": '{"text": "a"}'}}]
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        up.script(
            Whole(message(None, reason, tool_calls=calls)),
            Stream([tool_call(0, '{"text": "a"}', "c1", "write"), *([finish(reason)] if reason else [])]),
        )
        whole, streamed = await gw.post(ask(tools=[TOOL])), await gw.post(ask(tools=[TOOL], stream=True))
    assert whole.json["choices"][0]["finish_reason"] == "tool_calls"
    assert [c["finish_reason"] for e in streamed.events[:-1] for c in e["choices"] if c["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize("path", PATHS)
async def test_usage_is_kept_with_cached_tokens_also_when_they_are_none(tmp_path, path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai"), tmp_path) as gw:
        up.script(Stream([content("Hi"), finish(), usage(10, 2, 0)]), Whole(message()))
        streamed, whole = await gw.post(asked(path, stream=True), path), await gw.post(asked(path), path)
        records = await gw.records(2)
    assert up.requests[0].json["stream_options"] == {"include_usage": True} and "stream_options" not in up.requests[1].json
    assert [r["reuse"] for r in records] == [{"prompt": 10, "common": 0, "new": 10}] * 2
    counted = whole.json["usage"]
    if path == PATHS[0]:
        assert b"usage" not in streamed.body and counted["prompt_tokens_details"] == {"cached_tokens": 0}
    elif path == PATHS[1]:
        assert counted["cache_read_input_tokens"] == 0 and b'"cache_read_input_tokens":0' in streamed.body
    else:
        assert counted["input_tokens_details"]["cached_tokens"] == 0 and b'"cached_tokens":0' in streamed.body


def test_keepalives_are_on_by_default_and_every_wait_has_a_limit_of_its_own() -> None:
    default = Timeouts()
    assert 0 < default.keepalive <= 15 and 0 < default.connect < default.idle < default.prefill


async def test_an_answer_that_repeats_itself_is_not_cut(tmp_path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        up.script(Stream([content("0000 ")] * 3000 + [chunk({})] * 500 + [finish()]))
        got = await gw.post(ask(stream=True))
    assert got.text() == "0000 " * 3000 and got.events[-1] == "[DONE]"


def turn(*texts: str) -> Turn:
    body = json.dumps(ask() | {"messages": [{"role": "user", "content": t} for t in texts]}).encode()
    return Chat().read(Turn(id="t", received=Received(route="/", headers={}, body=body), dialect=Chat()))


def test_the_memory_of_affinity_is_bounded_and_the_newest_stay() -> None:
    affinity = Affinity(keep=10)
    for i in range(50):
        affinity.remember(turn(f"a {i}", f"b {i}"), f"d{i}")
    assert len(affinity._links) == 10 and affinity.best(turn("a 49"), ["d49"]) == "d49"
    assert affinity.best(turn("a 1"), ["d1"]) is None


async def test_affinity_ends_with_the_health_of_its_deployment() -> None:
    entry = {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": "http://a/v1"}}
    config = parse({"model_list": [entry, entry], "routing": {"allowed_fails": 1, "cooldown": 60}}, "test", {})
    router = Balanced(config)
    router._affinity.remember(turn("long", "conversation"), "m#1")

    async def first() -> str:
        attempts = router.attempts(turn("long", "conversation", "goes on"))
        chosen = await anext(attempts)
        await attempts.aclose()
        return chosen.name

    assert await first() == "m#1"
    assert router.drain("m#1", True)
    assert await first() == "m#0"
    router.drain("m#1", False)
    assert await first() == "m#1"
    attempt = Attempt(config.deployments[1], b"", 0.0, error=UpstreamError(503, "down", kind="connect", retryable=True))
    router.began(turn("x"), attempt)
    router.ended(turn("x"), attempt)
    assert await first() == "m#0"  # it is cooling down
    await router.close()


async def test_a_disk_that_hangs_delays_no_request(tmp_path, monkeypatch) -> None:
    stuck, write = threading.Event(), os.write

    def hang(file: int, data: bytes) -> int:
        stuck.wait(60)
        return write(file, data)

    monkeypatch.setattr(records_module.os, "write", hang)
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        up.script(Whole(message()))
        answers = [await gw.post(ask()) for _ in range(20)]
        assert [a.status for a in answers] == [200] * 20 and not stuck.is_set()
        assert not gw.path.exists() or gw.path.stat().st_size == 0
        stuck.set()
        assert len(await gw.records(20)) == 20
