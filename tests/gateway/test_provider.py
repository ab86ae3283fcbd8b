"""upstream/provider.py with the real litellm: a gateway process, scripted OpenAI and Anthropic servers behind its providers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from tests.support.fake_upstream import FakeUpstream, Stream, Whole, chunk, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Got, ask

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-provider-secret-77"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="litellm is not installed (moorage[provider])"),
]
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {"a": {}}}}}]


class Served:
    """A gateway in a process of its own, as users run it; litellm is imported there and nowhere else."""

    def __init__(self, up: FakeUpstream, tmp: Path) -> None:
        self.up, self.tmp = up, tmp
        self.records = tmp / "records.jsonl"

    async def __aenter__(self) -> Served:
        common = {"api_base": f"{self.up.base}/v1", "api_key": KEY}
        models = {"deep": "deepseek/deepseek-chat", "claude": "anthropic/claude-sonnet-4-5"}
        entries = [{"model_name": n, "litellm_params": {"model": m} | common} for n, m in models.items()]
        entries[1]["litellm_params"]["api_base"] = self.up.base
        config = {"model_list": entries, "records": {"path": str(self.records), "fsync": "never"}, "routing": {"retries": 0}}
        (self.tmp / "gateway.yaml").write_text(yaml.safe_dump(config))
        environ = os.environ | {"PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(self.tmp / "gateway.yaml"), "--port", "0"]
        self.log = self.tmp / "gateway.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=self.tmp, env=environ, stdout=log, stderr=log)
        self.http = aiohttp.ClientSession()
        for _ in range(1200):
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", self.log.read_text()):
                self.url = found[0]
                return self
            assert self._process.poll() is None, self.log.read_text()
            await asyncio.sleep(0.05)
        raise AssertionError(self.log.read_text())

    async def __aexit__(self, *exc: object) -> None:
        await self.http.close()
        self._process.terminate()
        await asyncio.to_thread(self._process.wait, 30)

    async def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Got:
        async with self.http.post(self.url + path, json=body) as r:
            return Got(r.status, {k.lower(): v for k, v in r.headers.items()}, await r.read())

    async def record(self, text: str) -> dict[str, Any]:
        for _ in range(1500):
            for line in self.records.read_text().split("\n")[:-1] if self.records.exists() else []:
                if text in line:
                    return json.loads(line)
            await asyncio.sleep(0.02)
        raise AssertionError(f"no record with {text!r} after 30 s\n{self.log.read_text()[-3000:]}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gw(tmp_path_factory) -> AsyncIterator[Served]:
    async with FakeUpstream() as up, Served(up, tmp_path_factory.mktemp("provider")) as served:
        yield served


def deep(text: str = "hello", **more: Any) -> dict[str, Any]:
    return ask(text, **more) | {"model": "deep"}


@pytest.mark.parametrize("stream", [True, False])
async def test_text_thoughts_and_usage_come_through(gw, stream) -> None:
    streamed = Stream([reasoning("I think"), content("Hel"), content("lo"), finish(), usage(12, 2, 8)])
    gw.up.script(streamed if stream else Whole(message("Hello", reasoning_content="I think")))
    got = await gw.post(deep(f"plain {stream}", stream=stream, stream_options={"include_usage": True} if stream else None))
    record = await gw.record(f"plain {stream}")
    if stream:
        assert (got.text(), got.text("reasoning_content"), got.events[-1]) == ("Hello", "I think", "[DONE]")
        assert [e["usage"]["prompt_tokens"] for e in got.events[:-1] if e.get("usage")] == [12]
    else:
        said = got.json["choices"][0]["message"]
        assert (said["content"], said["reasoning_content"]) == ("Hello", "I think")
    assert record["outcome"] == "ok" and record["reuse"]["common"] == (8 if stream else 0)
    assert gw.up.requests[-1].headers["authorization"] == f"Bearer {KEY}"
    assert gw.up.requests[-1].json["model"] == "deepseek-chat"


@pytest.mark.parametrize("stream", [True, False])
async def test_tools_go_and_calls_come_back(gw, stream) -> None:
    function = {"name": "read", "arguments": '{"a": 1}'}
    whole = Whole(message(None, "tool_calls", tool_calls=[{"id": "c1", "type": "function", "function": function}]))
    parts = [tool_call(0, '{"a":', "c1", "read"), tool_call(0, " 1}"), finish("tool_calls")]
    gw.up.script(Stream(parts) if stream else whole)
    got = await gw.post(deep(stream=stream, tools=TOOLS))
    assert gw.up.requests[-1].json["tools"][0]["function"]["name"] == "read"
    choice = [c for e in got.events if isinstance(e, dict) for c in e["choices"]] if stream else [got.json["choices"][0]]
    calls = [call for c in choice for call in c.get("delta", c.get("message")).get("tool_calls") or ()]
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [("read", {"a": 1})]
    assert choice[-1]["finish_reason"] == "tool_calls"


ERRORS = [
    (400, 400, "the context is too long", {}),
    (404, 404, "no such model", {}),
    (429, 429, "slow down", {"retry-after": "7"}),
    (401, 502, "wrong key", {}),  # the client's own key was fine
    (403, 502, "not yours", {}),
    (500, 500, "out of memory", {}),
    (503, 503, "loading", {"retry-after": "9"}),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "told", "words", "headers"), ERRORS, ids=[str(e[0]) for e in ERRORS])
async def test_errors_keep_their_status_words_and_retry_after(gw, status, told, words, headers, stream) -> None:
    gw.up.script(Whole({"error": {"message": f"{words} {KEY}", "code": "x"}}, status, headers))
    got = await gw.post(deep(f"error {status} {stream}", stream=stream))
    record = await gw.record(f"error {status} {stream}")
    assert got.status == told and words in got.json["error"]["message"], got.body
    assert got.headers.get("retry-after") == headers.get("retry-after")
    assert KEY.encode() not in got.body and KEY not in json.dumps(record)
    assert record["outcome"] == "error" and len(record["attempts"]) == 1


@pytest.mark.parametrize(
    "answer",
    [Stream([content("par"), content("tial"), 0.3], die_after=3), Stream([content("par"), content("tial")], done=False)],
    ids=["broken", "ended early"],
)
async def test_a_stream_that_breaks_off_never_looks_finished(gw, answer) -> None:
    text = f"break {answer.die_after}"
    gw.up.script(answer)
    got = await gw.post(deep(text, stream=True))
    record = await gw.record(text)
    assert got.text() == "partial" and got.events[-1]["error"]["code"] == "upstream_died", got.body
    assert "[DONE]" not in got.events and not any(c["finish_reason"] for e in got.events for c in e.get("choices", ()))
    assert record["outcome"] == "died"


LEAVE = {
    "mid-stream": (Stream([content("par"), content("tial"), 60.0]), True, "tial"),
    "prefill": (Stream([content("x")], head_delay=60.0), True, ""),
    "whole": (Whole(message(), head_delay=60.0), False, ""),
}


@pytest.mark.parametrize("case", LEAVE)
async def test_a_client_that_leaves_cancels_the_provider(gw, case) -> None:
    answer, stream, until = LEAVE[case]
    gw.up.script(answer)
    asked, cancelled, text = len(gw.up.requests), gw.up.cancelled, f"leave {case}"
    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(http.post(gw.url + "/v1/chat/completions", json=deep(text, stream=stream)))
        while len(gw.up.requests) == asked:
            await asyncio.sleep(0.01)
        if until:
            response, seen = await task, b""
            while until.encode() not in seen:
                seen += await response.content.readany()
            response.close()
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    left = time.monotonic()
    while gw.up.cancelled == cancelled and time.monotonic() - left < 30:
        await asyncio.sleep(0.01)
    record = await gw.record(text)
    assert gw.up.cancelled == cancelled + 1 and record["outcome"] == "cancelled"


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n".encode()


async def test_claude_through_litellm_keeps_cache_marks_thoughts_and_calls(gw) -> None:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "c", "content": [], "stop_reason": None}
    counts = {"input_tokens": 4, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 0, "output_tokens": 1}
    blocks = [
        ({"type": "thinking", "thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": "hm"}),
        ({"type": "text", "text": ""}, {"type": "text_delta", "text": "Hello"}),
        ({"type": "tool_use", "id": "t1", "name": "read", "input": {}}, {"type": "input_json_delta", "partial_json": '{"a": 1}'}),
    ]
    parts = [event("message_start", message=head | {"usage": counts})]
    for i, (start, delta) in enumerate(blocks):
        parts += [event("content_block_start", index=i, content_block=start), event("content_block_delta", index=i, delta=delta)]
        if i == 0:
            parts.append(event("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "sig=="}))
        parts.append(event("content_block_stop", index=i))
    end = event("message_delta", delta={"stop_reason": "tool_use", "stop_sequence": None}, usage={"output_tokens": 9})
    gw.up.script(Stream([*parts, end, event("message_stop")], done=False))
    system = [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}]
    tools = [{"name": "read", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
    body = {"model": "claude", "max_tokens": 4000, "stream": True, "system": system, "tools": tools}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 2000}, "messages": [{"role": "user", "content": "hi"}]}
    got = await gw.post(body, "/v1/messages")
    sent = gw.up.requests[-1]
    assert sent.path == "/v1/messages" and sent.headers["x-api-key"] == KEY
    assert sent.json["system"][0]["cache_control"] == {"type": "ephemeral"}
    assert sent.json["thinking"]["budget_tokens"] == 2000 and "moorage" not in sent.json
    events = [e for e in got.events if isinstance(e, dict)]
    kinds = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert kinds == ["thinking", "text", "tool_use"] and events[-1]["type"] == "message_stop"
    assert [d.get("signature") for d in deltas if d["type"] == "signature_delta"] == ["sig=="]
    assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == {"a": 1}
    final = next(e for e in events if e["type"] == "message_delta")
    assert final["delta"]["stop_reason"] == "tool_use" and final["usage"]["cache_read_input_tokens"] == 8
    assert (await gw.record('"model":"claude"'))["reuse"]["common"] == 8


async def test_an_empty_chunk_and_a_role_alone_are_no_end(gw) -> None:
    gw.up.script(Stream([chunk({"role": "assistant"}), chunk({}), content("x"), finish("length"), usage(1, 1)]))
    got = await gw.post(deep(stream=True))
    reasons = [c["finish_reason"] for e in got.events if isinstance(e, dict) for c in e["choices"] if c.get("finish_reason")]
    assert got.text() == "x" and reasons == ["length"]
