"""Sentences of docs/gateway-claims.md that no other test holds, and the check that every test named there exists."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway import records as records_module
from gateway.config import Records
from gateway.config_file import parse
from gateway.records import RecordWriter
from gateway.routing import MAX_BACKOFF_S, Balanced
from gateway.sessions import HEADERS, identify
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Gateway, ask, settings

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "docs" / "gateway-claims.md"
READ = {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}
TOOL = {"type": "function", "function": READ}


def test_every_test_that_the_claims_name_exists() -> None:
    rows = [line for line in CLAIMS.read_text().splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 60
    for row in rows:
        named = re.findall(r"`([a-z0-9_/]+\.py)::(test_\w+)`", row)
        assert named or "ops/bench/gateway.py" in row, row
        for path, name in named:
            assert name in _tests_of(path), f"{path} has no {name}"


@cache
def _tests_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ask("hi"),
    "/v1/messages": ask("hi", max_tokens=99),
    "/v1/responses": {"model": "m", "input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("when", ["mid-stream", "during prefill"])
async def test_a_client_of_any_dialect_that_leaves_cancels_the_upstream(tmp_path, path, when) -> None:
    """And leaves a record `cancelled` with what had been said."""
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw, aiohttp.ClientSession() as http:
        up.script(Stream([content("half a word"), 300.0], head_delay=300.0 if when == "during prefill" else 0.0))
        asked = asyncio.create_task(_read_until(http, gw.url + path, BODIES[path] | {"stream": True}, b"half a word"))
        if when == "mid-stream":
            response = await asyncio.wait_for(asked, 30)
            response.close()
        else:
            while not up.requests:
                await asyncio.sleep(0.005)
            asked.cancel()
        (record,) = await gw.records()
        while not up.cancelled:  # the test's own limit ends a wait that is too long
            await asyncio.sleep(0.005)
    assert record["outcome"] == "cancelled"
    said = record["answer"]["channels"].get("content", {}).get("text")
    assert said == ("half a word" if when == "mid-stream" else None)


async def _read_until(http: aiohttp.ClientSession, url: str, body: dict[str, Any], words: bytes) -> aiohttp.ClientResponse:
    response, seen = await http.post(url, json=body), b""
    while words not in seen:
        seen += await response.content.readany()
    return response


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_change_is_in_the_header_and_in_the_record(tmp_path, path, stream) -> None:
    """By name in the header, also of a stream; with what stood there before and after in the record."""
    policies = [{"clamp": {"temperature": {"max": 1}, "seed": {"force": 7}}, "thinking": {"force": False}}]
    async with FakeUpstream() as up, Gateway(settings(up.base, policies=policies), tmp_path) as gw:
        up.script(Stream([content("Hi"), finish(), usage(3, 1)]) if stream else Whole(message()))
        got = await gw.post(BODIES[path] | {"stream": stream, "temperature": 1.5}, path)
        (record,) = await gw.records()
    assert got.status == 200
    named = [f"{d['stage']}.{d['rule']}" for d in record["decisions"]]
    assert got.headers["x-moorage-decisions"].split(",") == list(dict.fromkeys(named))
    assert {"clamp.temperature.max", "clamp.seed.force", "thinking.force", "thinking.spell"} <= set(named)
    edits = {e["path"]: e for d in record["decisions"] for e in d.get("edits", ())}
    assert edits["temperature"] == {"path": "temperature", "before": 1.5, "after": 1.0}
    assert edits["seed"] == {"path": "seed", "after": 7}
    sent = json.loads(record["sent"]["body"])
    assert (sent["temperature"], sent["seed"]) == (1.0, 7) and sent == up.requests[0].json


async def test_keepalives_go_out_while_a_call_is_held(tmp_path) -> None:
    """Content before it flows; the call itself waits until it is known to be good."""
    pieces = [tool_call(0, '{"path"', "c1", "read"), *[0.1, tool_call(0, "")] * 6, tool_call(0, ': "a"}'), finish("tool_calls")]
    async with FakeUpstream() as up, Gateway(settings(up.base, timeouts={"keepalive": 0.1}), tmp_path) as gw:
        up.script(Stream([content("I look."), *pieces]))
        got = await gw.post(ask(stream=True, tools=[TOOL]))
    before, _, after = got.body.partition(b": keep-alive")
    assert b"I look." in before and b"tool_calls" not in before and b'"path' in after and got.events[-1] == "[DONE]"


# What Claude Code, Codex (now and before), opencode and others send; written here once more, so that none is lost.
AGENTS_SEND = ["x-claude-code-session-id", "session-id", "session_id", "conversation_id", "x-opencode-session", "x-session-id"]


@pytest.mark.parametrize("header", sorted({*HEADERS, *AGENTS_SEND}))
def test_every_header_that_agents_send_names_the_session(header) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], "prompt_cache_key": "another"}
    session = identify({header: "mine"}, body)
    assert (session.id, session.source) == ("mine", f"header:{header}")


# One conversation as each dialect writes it.
ARGUMENTS = '{"path":"a"}'
TALK: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Read a."},
            {
                "role": "assistant",
                "content": "I read.",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "aaa"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [TOOL],
    },
    "/v1/messages": {
        "max_tokens": 99,
        "system": "Be kind.",
        "messages": [
            {"role": "user", "content": "Read a."},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I read."},
                    {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "aaa"},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        "tools": [{"name": "read", "input_schema": READ["parameters"]}],
    },
    "/v1/responses": {
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": "Read a."},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I read."}]},
            {"type": "function_call", "call_id": "c1", "name": "read", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c1", "output": "aaa"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", **READ}],
    },
}


async def test_the_same_conversation_has_the_same_anchors_in_every_dialect(tmp_path) -> None:
    found = []
    for number, (path, body) in enumerate(TALK.items()):
        # A gateway of its own: what one has learned of the agent would weigh in the next.
        async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path / str(number)) as gw:
            assert (await gw.post({"model": "m", "stream": True} | body, path)).status == 200
            found.append({(a["message"], a["edge"], a["kind"]) for a in up.requests[0].json["moorage"]["anchors"]})
    assert found[0] == found[1] == found[2]
    assert found[0] == {
        (-1, "end", "tools"),
        (0, "end", "system"),
        (1, "end", "turn"),
        (2, "end", "turn"),
        (3, "end", "tool_result"),
        (4, "start", "user"),
        (4, "end", "turn"),
    }


SYSTEM = "\n".join(
    [
        "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;",
        "Be kind.",
        "Today's date: 2026-11-29",
        "<env>\nbranch: main\n</env>",
        "<total_tokens>1000 left</total_tokens>",
    ]
)
SHUFFLED = [{"function": {"parameters": {"required": [], "type": "object"}, "name": name}, "type": "function"} for name in "ba"]
RULES = {  # rule -> (a value that makes it act, one with which it does not)
    "tool_order": (True, False),
    "tool_schemas": (True, False),
    "cache_marks": (True, False),
    "billing_header": ("drop", "keep"),
    "token_counters": ("drop", "keep"),
    "clock": ("move", "keep"),
    "environment": ("move", "keep"),
}


@pytest.mark.parametrize("rule", RULES)
async def test_each_rule_for_the_cache_is_switched_by_itself_and_reported(tmp_path, rule) -> None:
    others = {name: off for name, (_, off) in RULES.items() if name != rule}
    body = {"model": "m", "tools": SHUFFLED, "stream": True, "stream_options": {"include_usage": True}}
    marked = [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]
    body["messages"] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": marked}]
    sent = []
    for value in RULES[rule]:
        policies = [{"normalise": others | {rule: value}}]
        async with FakeUpstream() as up, Gateway(settings(up.base, "openai", policies=policies), tmp_path / str(value)) as gw:
            got = await gw.post(body)
            (record,) = await gw.records()
        sent.append(up.requests[0].json)
        said = [d["stage"] for d in record["decisions"] if d["stage"] == "normalise"]
        assert said == (["normalise"] if len(sent) == 1 else [])
        assert ("normalise." in got.headers["x-moorage-decisions"]) == (len(sent) == 1)
    assert sent[0] != body or list(sent[0]["tools"][0]) != list(SHUFFLED[0])
    assert sent[1] == body


async def test_metrics_tell_latency_by_channel_tokens_reuse_violations_repairs_and_the_queue(tmp_path) -> None:
    policies = [{"thinking": {"force": "off", "on_violation": "strip", "retry": False}}]
    call = [tool_call(0, '{"path": "a",}', "c1", "read"), finish("tool_calls"), usage(100, 7, 60)]
    async with FakeUpstream() as up, Gateway(settings(up.base, policies=policies), tmp_path) as gw:
        up.script(Stream([reasoning("hm"), content("I look."), *call]))
        await gw.post(ask(stream=True, tools=[TOOL]))
        await gw.records()
        text = (await gw.get("/metrics")).body.decode()
    for channel in ("reasoning_content", "content", "tool_calls"):
        assert f'moorage_first_token_seconds_count{{channel="{channel}",model="m"}} 1.0' in text
    for kind, count in {"prompt": 100, "common": 60, "completion": 7}.items():
        assert f'moorage_tokens_total{{kind="{kind}",model="m"}} {count}.0' in text
    for stage, rule in (("thinking", "violation.strip"), ("toolcheck", "repaired")):
        assert f'moorage_decisions_total{{rule="{rule}",stage="{stage}"}} 1.0' in text
    for name in ("moorage_waiting_requests 0.0", 'moorage_records{what="written"} 1.0', 'moorage_records{what="dropped"} 0.0'):
        assert name in text


@pytest.mark.parametrize(("policy", "syncs"), [("never", 0), ("second", 1), ("always", 3)])
def test_the_disk_is_asked_to_keep_records_as_often_as_configured(tmp_path, monkeypatch, policy, syncs) -> None:
    """`second`: at most once a second, and once more at the end."""
    asked, real = [], os.fsync
    monkeypatch.setattr(records_module.os, "fsync", lambda file: asked.append(file) or real(file))
    monkeypatch.setattr(records_module.time, "monotonic", lambda: 1000.0)
    writer = RecordWriter(Records(path=str(tmp_path / "r.jsonl"), fsync=policy))
    for n in range(3):
        writer.put({"n": n, "received": {"body": b"x"}, "sent": None})
        while writer.written <= n:
            pass
    writer.close()
    assert len(asked) == syncs


def test_retries_come_back_apart_and_soon() -> None:
    """Full jitter: of many that failed together no two come back together, and none later than the bound."""
    router = Balanced(parse({"routing": {"backoff": 0.25}}, "t", {}))
    for number in (1, 2, 3, 20):
        waits = [router._backoff(number) for _ in range(200)]
        bound = min(MAX_BACKOFF_S, 0.25 * 2**number)
        assert len(set(waits)) > 190 and 0 <= min(waits) < bound / 4 and bound * 0.75 < max(waits) <= bound
