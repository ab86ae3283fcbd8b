"""The plugin inside a real LiteLLM proxy: every dialect, streamed and whole, a scripted model behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from gateway.diagnostics.cli import logs
from tests.support.fake_upstream import Stream, Whole, chunk, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Got
from tests.support.litellm_proxy import MASTER_KEY, UPSTREAM_KEY, Proxy

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MODELS = {
    "m": {},
    "off": {},
    "strict": {},
    "error": {},
    "capped": {},
    "ours": {"params": {"model": "hosted_vllm/m"}, "info": {"moorage": True}},
    "native": {"params": {"use_chat_completions_api": False}},
}
POLICIES = [
    {"model": "off", "thinking": {"force": False}},
    {"model": "error", "thinking": {"force": False, "on_violation": "error"}},
    {"model": "strict", "tools": {"retries": 0, "repair": False}},
    {"model": "*", "clamp": {"temperature": {"max": 0.5}, "frequency_penalty": {"forbid": "refuse"}}},
    {"model": "capped", "clamp": {"output_tokens": {"max": 50}}},
    {"model": "capped", "route": "/v1/responses", "clamp": {"output_tokens": {"max": 40}}},
]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(tmp_path_factory) -> AsyncIterator[Proxy]:
    async with Proxy(MODELS, {"policies": POLICIES}, tmp_path_factory.mktemp("litellm")) as proxy:
        yield proxy


@dataclass(frozen=True)
class Dialect:
    """What a test must know of a client's dialect: how it asks, and how it reads."""

    path: str

    def ask(self, model: str, text: str = "hello", stream: bool = False, tools: bool = False, **more: Any) -> dict[str, Any]:
        name = {"name": "read", "description": "Reads a file"}
        if self.path == "/v1/responses":
            body: dict[str, Any] = {"input": text}
            offered = [{"type": "function", **name, "parameters": SCHEMA}]
        else:
            body = {"messages": [{"role": "user", "content": text}]}
            offered = [{"type": "function", "function": name | {"parameters": SCHEMA}}]
        if self.path == "/v1/messages":
            body |= {"max_tokens": 1000}
            offered = [name | {"input_schema": SCHEMA}]
        return {"model": model, "stream": stream} | body | ({"tools": offered} if tools else {}) | more

    async def said(self, got: Got) -> dict[str, Any]:
        """{text, thought, calls, reason} of a whole or streamed answer, read by the official SDK's own types."""
        assert got.status == 200, got.body
        streamed = got.headers["content-type"].startswith("text/event-stream")
        return {"/v1/chat/completions": _chat, "/v1/messages": _messages, "/v1/responses": _responses}[self.path](got, streamed)


def _events(got: Got) -> list[Any]:
    return [e for e in got.events if isinstance(e, dict)]


def _chat(got: Got, streamed: bool) -> dict[str, Any]:
    if not streamed:
        choice = openai.types.chat.ChatCompletion.model_validate(got.json).choices[0]
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        thought = got.json["choices"][0]["message"].get("reasoning_content") or ""
        return {"text": choice.message.content or "", "thought": thought, "calls": calls, "reason": choice.finish_reason}
    calls: dict[int, list[str]] = {}
    reason = ""
    for event in _events(got):
        for choice in openai.types.chat.ChatCompletionChunk.model_validate(event).choices:
            for call in choice.delta.tool_calls or ():
                known = calls.setdefault(call.index, ["", ""])
                known[0] += call.function.name or ""
                known[1] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    assert got.events[-1] == "[DONE]"
    made = [tuple(c) for c in calls.values()]
    return {"text": got.text(), "thought": got.text("reasoning_content"), "calls": made, "reason": reason}


def _messages(got: Got, streamed: bool) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    if streamed:
        partial: dict[int, str] = {}
        for event in _events(got):
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for name in ("text", "thinking"):
                    block[name] = block.get(name, "") + delta.get(name, "")
                partial[event["index"]] = partial.get(event["index"], "") + delta.get("partial_json", "")
            elif event["type"] == "message_delta":
                reason = event["delta"]["stop_reason"]
        assert _events(got)[-1]["type"] == "message_stop"
        for at, text in partial.items():
            if blocks[at]["type"] == "tool_use":
                blocks[at]["input"] = json.loads(text)
    else:
        whole = anthropic.types.Message.model_validate(got.json).model_dump()
        blocks, reason = whole["content"], whole["stop_reason"]
    calls = [(b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
    text = "".join(b.get("text") or "" for b in blocks if b["type"] == "text")
    thought = "".join(b.get("thinking") or "" for b in blocks if b["type"] == "thinking")
    return {"text": text, "thought": thought, "calls": calls, "reason": {"end_turn": "stop", "tool_use": "tool_calls"}[reason]}


def _responses(got: Got, streamed: bool) -> dict[str, Any]:
    if streamed:
        last = _events(got)[-1]
        assert last["type"] == "response.completed"
    response = openai.types.responses.Response.construct(**(last["response"] if streamed else got.json))
    calls = [(i.name, i.arguments) for i in response.output if i.type == "function_call"]
    parts = [p for i in response.output if i.type == "reasoning" for p in (i.content or i.summary)]
    return {
        "text": response.output_text,
        "thought": "".join(p.text for p in parts),
        "calls": calls,
        "reason": "tool_calls" if calls else "stop",
    }


CHAT, MESSAGES, RESPONSES = Dialect("/v1/chat/completions"), Dialect("/v1/messages"), Dialect("/v1/responses")
each_dialect = pytest.mark.parametrize("dialect", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
each_form = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


def answer(stream: bool, text: str = "", thought: str = "", calls: list[tuple[str, str]] = ()) -> Stream | Whole:
    """One answer of the model, in the form that was asked for."""
    reason = "tool_calls" if calls else "stop"
    if not stream:
        made = [{"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
        more = ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": made} if made else {})
        return Whole(message(text or None, reason, **more))
    items = [chunk({"role": "assistant", "content": ""})]
    items += [reasoning(thought)] if thought else []
    items += [content(part) for part in (text[:3], text[3:]) if part]
    for i, (name, arguments) in enumerate(calls):
        items += [tool_call(i, arguments[:4], f"c{i}", name), tool_call(i, arguments[4:])]
    return Stream([*items, finish(reason), usage(12, 2, 8)])


def rules(record: dict[str, Any]) -> list[str]:
    return [f"{d['stage']}.{d['rule']}" for d in record["decisions"]]


OFF = {
    CHAT: {"reasoning_effort": "none"},
    MESSAGES: {"thinking": {"type": "disabled"}},
    RESPONSES: {"reasoning": {"effort": "none"}},
}
ON = {
    CHAT: {"chat_template_kwargs": {"enable_thinking": True}},
    MESSAGES: {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 4000},
    RESPONSES: {"reasoning": {"effort": "high"}},
}


@each_dialect
@each_form
async def test_a_plain_answer_comes_through_and_is_recorded(proxy, dialect, stream) -> None:
    proxy.up.script(answer(stream, "Hello there", "I thought"))
    got = await proxy.post(dialect.path, dialect.ask("m", stream=stream), session_id="s-1", user_agent="opencode/1")
    said = await dialect.said(got)
    record = await proxy.record(got.headers["x-moorage-request-id"])
    assert said == {"text": "Hello there", "thought": "I thought", "calls": [], "reason": "stop"}
    assert (record["outcome"], record["status"], record["stream"], record["model"]) == ("ok", 200, stream, "m")
    assert record["route"] == dialect.path and json.loads(record["received"]["body"])["model"] == "m"
    assert record["session"]["id"].endswith("s-1") and record["session"]["agent"] == "opencode"
    assert {c: v["text"] for c, v in record["answer"]["channels"].items()} == {
        "reasoning_content": "I thought",
        "content": "Hello there",
    }
    assert record["usage"]["prompt_tokens"] == (12 if stream else 10) and record["reuse"]["common"] == (8 if stream else 0)
    assert record["sent"]["deployment"] and len(record["attempts"]) == 1


@each_dialect
@each_form
async def test_off_stays_off_through_every_translation(proxy, dialect, stream) -> None:
    proxy.up.requests.clear()
    proxy.up.script(answer(stream, "Hi"))
    await proxy.post(dialect.path, dialect.ask("m", stream=stream, **OFF[dialect]))
    sent = proxy.up.requests[-1].json
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert "reasoning_effort" not in sent and "thinking" not in sent


@each_dialect
@each_form
async def test_a_forced_off_overrules_the_client_and_is_verified_on_the_answer(proxy, dialect, stream) -> None:
    proxy.up.script(answer(stream, "Hi there", "but I think"))
    got = await proxy.post(dialect.path, dialect.ask("off", stream=stream, **ON[dialect]))
    said, sent = await dialect.said(got), proxy.up.requests[-1].json
    record = await proxy.record(got.headers["x-moorage-request-id"])
    assert (said["text"], said["thought"]) == ("Hi there", "")
    assert sent["chat_template_kwargs"]["enable_thinking"] is False and "thinking" not in sent
    assert {"thinking.force", "thinking.violation.strip"} <= set(rules(record))


@each_dialect
@each_form
async def test_a_violation_may_be_an_error(proxy, dialect, stream) -> None:
    proxy.up.script(answer(stream, "Hi there", "but I think"))
    got = await proxy.post(dialect.path, dialect.ask("error", stream=stream))
    record = await proxy.record(got.headers["x-moorage-request-id"]) if stream else None
    assert b"thinking is off" in got.body and b"Hi there" not in got.body
    assert b"message_stop" not in got.body and b"response.completed" not in got.body
    assert stream or got.status == 502
    if record:
        assert (record["outcome"], record["error"]["code"]) == ("error", "thinking_violation")


@each_dialect
@each_form
async def test_parameters_are_clamped_and_said(proxy, dialect, stream) -> None:
    proxy.up.script(answer(stream, "Hi"))
    got = await proxy.post(dialect.path, dialect.ask("capped", stream=stream, temperature=1))
    record = await proxy.record(got.headers["x-moorage-request-id"])
    sent = proxy.up.requests[-1].json
    assert sent["temperature"] == 0.5
    assert (sent.get("max_tokens") or sent.get("max_completion_tokens")) == (40 if dialect is RESPONSES else 50)
    assert {"clamp.temperature.max", "clamp.output_tokens.max"} <= set(rules(record))
    assert rules(record).count("clamp.temperature.max") == 1


@each_form
async def test_a_forbidden_parameter_is_refused_before_anything_is_sent(proxy, stream) -> None:
    proxy.up.requests.clear()
    got = await proxy.post(CHAT.path, CHAT.ask("m", "forbidden one", stream, frequency_penalty=1))
    record = await proxy.record_where(lambda r: "forbidden one" in r["received"]["body"] and r["stream"] == stream)
    assert got.status == 400 and "`frequency_penalty` is not allowed here" in got.json["error"]["message"]
    assert proxy.up.requests == [] and (record["outcome"], record["error"]["code"]) == ("refused", "parameter_forbidden")


@each_dialect
@each_form
async def test_good_calls_pass_whole_and_parallel(proxy, dialect, stream) -> None:
    calls = [("read", '{"path": "a"}'), ("read", '{"path": "b"}')]
    proxy.up.script(answer(stream, "Reading", "", calls))
    said = await dialect.said(await proxy.post(dialect.path, dialect.ask("m", stream=stream, tools=True)))
    assert said["calls"] == calls and said["text"] == "Reading" and said["reason"] == "tool_calls"


@each_dialect
@each_form
async def test_a_broken_call_is_repaired_when_that_validates(proxy, dialect, stream) -> None:
    # LiteLLM itself reads whole Messages and Responses answers before the plugin sees them.
    broken = '{"path": "a"' if stream or dialect is CHAT else '{"path": "a"}'
    name = "Read" if broken.endswith("}") else "read"
    proxy.up.script(answer(stream, "", "", [(name, broken)]))
    got = await proxy.post(dialect.path, dialect.ask("m", stream=stream, tools=True))
    said = await dialect.said(got)
    record = await proxy.record(got.headers["x-moorage-request-id"])
    assert [(n, json.loads(a)) for n, a in said["calls"]] == [("read", {"path": "a"})]
    assert "toolcheck.repaired" in rules(record)


@each_dialect
@each_form
async def test_a_bad_call_is_asked_for_again_with_its_error_shown(proxy, dialect, stream) -> None:
    proxy.up.requests.clear()
    proxy.up.script(answer(stream, "", "", [("read", '{"file": 3}')]), answer(stream, "", "", [("read", '{"path": "ok"}')]))
    got = await proxy.post(dialect.path, dialect.ask("m", stream=stream, tools=True))
    said = await dialect.said(got)
    record = await proxy.record(got.headers["x-moorage-request-id"])
    assert [(n, json.loads(a)) for n, a in said["calls"]] == [("read", {"path": "ok"})]
    shown = proxy.up.requests[-1].json["messages"][-1]
    assert len(proxy.up.requests) == 2 and shown["role"] == "tool" and "was not run" in shown["content"]
    assert "toolcheck.retry.invalid" in rules(record) and len(record["attempts"]) == 2 and record["outcome"] == "ok"


@each_dialect
@each_form
async def test_a_call_that_stays_bad_is_an_error_and_never_looks_finished(proxy, dialect, stream) -> None:
    proxy.up.script(answer(stream, "", "", [("read", '{"file": 3}')]))
    got = await proxy.post(dialect.path, dialect.ask("strict", "stays bad", stream, tools=True))
    record = await proxy.record_where(
        lambda r: "stays bad" in r["received"]["body"] and (r["route"], r["stream"]) == (dialect.path, stream)
    )
    assert b"tool call cannot be used" in got.body and (stream or got.status == 502)
    assert b"message_stop" not in got.body and b"response.completed" not in got.body and b'"file' not in got.body
    assert (record["outcome"], record["error"]["code"]) == ("error", "invalid_tool_call")


@each_dialect
async def test_our_engine_gets_hints_and_nobody_else_does(proxy, dialect) -> None:
    proxy.up.script(answer(False, "Hi"))
    got = await proxy.post(dialect.path, dialect.ask("ours", tools=True, **OFF[dialect]), session_id="s-7")
    ours = proxy.up.requests[-1].json
    await proxy.post(dialect.path, dialect.ask("m", tools=True), session_id="s-7")
    kinds = {a["kind"] for a in ours["moorage"]["anchors"]}
    record = await proxy.record(got.headers["x-moorage-request-id"])
    assert {"tools", "user"} <= kinds and ours["moorage"]["session"].endswith("s-7")
    assert record["hints"]["anchors"] == ours["moorage"]["anchors"] and "moorage" not in proxy.up.requests[-1].json


@each_dialect
async def test_why_and_report_read_the_plugins_records(proxy, dialect) -> None:
    """Two turns of a session, the second with another beginning: the cause is found as in the gateway's own records."""
    session = f"why {dialect.path}"
    for text in ("The date is 2026-03-01. Fix it", "The date is 2026-03-02. Fix it"):
        proxy.up.script(answer(False, "Done"))
        got = await proxy.post(dialect.path, dialect.ask("m", text + " please" * 50), session_id=session, user_agent="codex/1")
        record = await proxy.record(got.headers["x-moorage-request-id"])
    path = str(proxy.path)
    run = CliRunner().invoke(logs, ["why", record["id"], "-r", path])
    assert run.exit_code == 0 and "2026-03-01" in run.output and "2026-03-02" in run.output, run.output
    rows = json.loads(CliRunner().invoke(logs, ["report", path, "--json"]).output)
    assert any(row["agent"] == "codex" and row["requests"] >= 2 for row in rows)


@each_dialect
async def test_a_stream_whose_client_leaves_is_cancelled_and_no_success(proxy, dialect) -> None:
    proxy.up.script(Stream([content("par"), content("tial"), 60.0, finish()]))
    text = f"leave {dialect.path}"
    async with aiohttp.ClientSession() as http:
        headers = {"authorization": f"Bearer {MASTER_KEY}"}
        async with http.post(proxy.url + dialect.path, json=dialect.ask("m", text, stream=True), headers=headers) as response:
            seen = b""
            while b"tial" not in seen:
                seen += await response.content.readany()
            response.close()
    record = await proxy.record_where(lambda r: text in r["received"]["body"])
    assert record["outcome"] == "cancelled" and record["answer"]["channels"]["content"]["text"] == "partial"


@each_dialect
async def test_an_upstream_that_dies_mid_stream_ends_in_an_error(proxy, dialect) -> None:
    proxy.up.script(Stream([content("par"), content("tial"), 0.2], die_after=3))
    text = f"die {dialect.path}"
    got = await proxy.post(dialect.path, dialect.ask("m", text, stream=True))
    record = await proxy.record_where(lambda r: text in r["received"]["body"])
    assert b"error" in got.body and b"message_stop" not in got.body and b"response.completed" not in got.body
    assert record["outcome"] in ("died", "error") and record["error"]


@each_dialect
@each_form
async def test_an_error_of_the_upstream_is_recorded_as_one(proxy, dialect, stream) -> None:
    proxy.up.script(Whole({"error": {"message": "context too long", "code": "context_length"}}, 400))
    text = f"too long {stream}"
    got = await proxy.post(dialect.path, dialect.ask("m", text, stream))
    record = await proxy.record_where(lambda r: text in r["received"]["body"] and r["route"] == dialect.path)
    assert got.status == 400 and b"context too long" in got.body
    assert record["outcome"] == "error" and "context too long" in record["error"]["message"]
    assert record["attempts"][-1]["status"] == 400


async def test_what_our_readers_do_not_take_passes_unchecked_and_says_so(proxy) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    body = MESSAGES.ask("off", stream=True, temperature=1)
    body["messages"] = [{"role": "user", "content": [picture, {"type": "text", "text": "what is it?"}]}]
    proxy.up.script(answer(True, "A dot"))
    got = await proxy.post(MESSAGES.path, body)
    record = await proxy.record(got.headers["x-moorage-request-id"])
    sent = proxy.up.requests[-1].json
    assert (await MESSAGES.said(got))["text"] == "A dot" and sent["temperature"] == 0.5
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert "litellm.unread" in rules(record) and record["answer"]["channels"]["content"]["text"] == "A dot"


async def test_a_request_that_litellm_does_not_translate_is_bounded_and_recorded(proxy) -> None:
    item = {"type": "message", "id": "m1", "status": "completed", "role": "assistant", "content": []}
    item["content"] = [{"type": "output_text", "text": "native", "annotations": []}]
    counts = {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4, "input_tokens_details": {"cached_tokens": 2}}
    counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
    body = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": [item]}
    proxy.up.script(Whole(body | {"usage": counts, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}))
    got = await proxy.post(RESPONSES.path, RESPONSES.ask("native", temperature=1))
    record = await proxy.record(got.headers["x-moorage-request-id"])
    assert proxy.up.requests[-1].path == "/v1/responses" and proxy.up.requests[-1].json["temperature"] == 0.5
    assert (await RESPONSES.said(got))["text"] == "native" and record["reuse"]["common"] == 2
    assert "clamp.temperature.max" in rules(record) and record["answer"]["channels"]["content"]["text"] == "native"


async def test_other_routes_are_left_alone(proxy) -> None:
    data = {"object": "list", "model": "m", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}]}
    proxy.up.script(Whole(data | {"usage": {"prompt_tokens": 1, "total_tokens": 1}}))
    got = await proxy.post("/v1/embeddings", {"model": "m", "input": "x"})
    assert got.status == 200 and "x-moorage-request-id" not in got.headers


async def test_many_at_once_keep_their_answers_and_records_apart(proxy) -> None:
    proxy.up.script(answer(True, "Hello there"))

    async def one(i: int) -> tuple[str, str]:
        dialect = (CHAT, MESSAGES, RESPONSES)[i % 3]
        got = await proxy.post(dialect.path, dialect.ask("m", f"number {i} of many", stream=True))
        assert (await dialect.said(got))["text"] == "Hello there"
        return got.headers["x-moorage-request-id"], f"number {i} of many"

    for id, text in await asyncio.gather(*map(one, range(12))):
        assert text in (await proxy.record(id))["received"]["body"]


async def test_no_key_is_in_any_record_or_log_line(proxy) -> None:
    written = proxy.path.read_text()
    assert written.count("\n") > 20 and MASTER_KEY not in written and UPSTREAM_KEY not in written
