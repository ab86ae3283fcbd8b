"""Health while loading, models, tokens, metrics and control."""

import asyncio
import json

import pytest

from engine.supervisor import EngineState
from tests.support.fake_engine import answer, api
from tests.support.text import write_tokenizer


async def test_health_tells_how_far_loading_is(dirs):
    async with api(dirs["plain"], answer("x")) as server:
        assert (await server.http.get("/health")).json()["status"] == "ready"
        server.engine.state = EngineState(phase="loading", fraction=0.4, stage="loading weights")
        health = await server.http.get("/health")
        assert health.status_code == 503
        assert {k: health.json()[k] for k in ("status", "fraction", "stage")} == {
            "status": "loading", "fraction": 0.4, "stage": "loading weights",
        }  # fmt: skip
        early = await server.chat()
        assert early.status_code == 503 and early.headers["retry-after"] and "40%" in early.json()["error"]["message"]
        assert early.json()["error"]["code"] == "model_loading"
        server.engine.state = EngineState(phase="failed", message="the file is truncated: copy it again")
        assert (await server.http.get("/health")).json()["status"] == "failed"
        assert (await server.chat()).json()["error"]["code"] == "engine_failed"
        server.engine.state = EngineState(phase="restarting", restarts=1)
        assert (await server.http.get("/health")).json()["status"] == "restarting"
        assert (await server.http.get("/v1/models")).status_code == 200


async def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path):
    async with api(tmp_path, answer("x")) as server:
        health = await server.http.get("/health")
        chat = await server.chat()
    assert health.status_code == 503 and health.json()["status"] == "failed" and "tokenizer.json" in health.json()["message"]
    assert chat.status_code == 503 and "tokenizer.json" in chat.json()["error"]["message"]


@pytest.mark.parametrize(
    "damage",
    [
        {"model": {"type": "Foo"}},
        {"model": 7},
        {"added_tokens": [{"id": 1}]},
        {"added_tokens": ["x"]},
        {"pre_tokenizer": {"type": "Foo"}},
        {"decoder": 7},
    ],
)
async def test_a_tokenizer_of_an_unknown_kind_is_told(tmp_path, damage):
    path = write_tokenizer(tmp_path, "plain") / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    async with api(tmp_path, answer("x")) as server:
        health = await server.http.get("/health")
    told = health.json()["message"]
    assert health.status_code == 503 and health.json()["status"] == "failed"
    assert "tokenizer" in told and "\n" not in told and len(told) < 500


async def test_a_template_that_is_no_text_is_told(tmp_path):
    (write_tokenizer(tmp_path, "plain") / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    async with api(tmp_path, answer("x")) as server:
        health = await server.http.get("/health")
    assert health.json()["status"] == "failed" and "chat_template.jinja" in health.json()["message"]


async def test_a_bug_while_the_tokenizer_is_read_ends_the_loading(dirs, monkeypatch):
    """Unsaid, the server would report `loading` for ever."""

    def broken(path):
        raise KeyError("a bug")

    monkeypatch.setattr("engine.api.service.load_text_model", broken)
    async with api(dirs["plain"], answer("x")) as server:
        health = await server.http.get("/health")
    assert health.json()["status"] == "failed" and "KeyError" in health.json()["message"]


async def test_models(dirs):
    async with api(dirs["plain"], answer("x")) as server:
        listed = await server.openai.models.list()
        one = (await server.http.get("/v1/models/tiny")).json()
    assert [m.id for m in listed.data] == ["tiny"]
    assert one["max_model_len"] == 4096 and one["ready"] is True


async def test_tokenize_and_detokenize(dirs):
    async with api(dirs["plain"], answer("x")) as server:
        plain = (await server.post("/v1/tokenize", prompt="The quick<|im_end|>")).json()
        assert (await server.post("/v1/detokenize", tokens=plain["tokens"])).json() == {"prompt": "The quick<|im_end|>"}
        messages = [{"role": "user", "content": "hi"}]
        made = (await server.post("/v1/tokenize", messages=messages)).json()
        await server.chat("hi")
    assert plain["count"] == len(plain["tokens"]) and plain["max_model_len"] == 4096
    assert made["tokens"] == list(server.engine.requests[0].tokens)


async def test_control_reaches_the_engine(dirs):
    async with api(dirs["plain"], answer("x")) as server:
        assert (await server.http.get("/v1/cache/status")).json() == {"verb": "cache.status"}
        await server.post("/v1/cache/rebuild", ram_bytes=5)
        await server.http.delete("/v1/cache/sessions/a%2Fb")
        assert (await server.http.get("/v1/requests")).status_code == 200
        assert (await server.http.get("/v1/memory/status")).json() == {"verb": "memory.status"}
    assert server.engine.controls == [
        ("cache.status", {}),
        ("cache.rebuild", {"options": {"ram_bytes": 5}}),
        ("cache.forget", {"session": "a/b"}),
        ("requests", {}),
        ("memory.status", {}),
    ]


async def test_metrics_count_tokens_and_statuses(dirs):
    async with api(dirs["json_calls"], answer("<think>\nx\n</think>\n\n<tool_call>nope</tool_call>y")) as server:
        from tests.support.text import tool

        await server.chat(tools=[tool()])
        await server.chat(temperature="x")
        text = (await server.http.get("/metrics")).text
    prompt = len(server.engine.requests[0].tokens)
    for line in (
        'moorage_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0',
        'moorage_requests_total{endpoint="/v1/chat/completions",status="400"} 1.0',
        f"moorage_prompt_tokens_total {float(prompt)}",
        f"moorage_cached_tokens_total {float(prompt // 2)}",
        'moorage_tool_calls_total{outcome="malformed"} 1.0',
        'moorage_choices_finished_total{reason="stop"} 1.0',
        "moorage_ready 1.0",
    ):
        assert line in text, line


async def test_a_stream_is_in_flight_until_it_ends(dirs):
    async def in_flight(server) -> float:
        text = (await server.http.get("/metrics")).text
        return float(next(x.split()[1] for x in text.splitlines() if x.startswith("moorage_requests_in_flight "))) - 1  # this one

    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with api(dirs["plain"], answer("Hello", 600.0)) as server:
        assert await in_flight(server) == 0
        async with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if '"content":"H' in line:
                    break
            assert await in_flight(server) == 1
        while await in_flight(server):  # the client has left
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("status", [404, 409, 503])
async def test_control_errors_keep_their_status(dirs, status, monkeypatch):
    from engine.ipc import ControlReply

    async with api(dirs["plain"], answer("x")) as server:

        async def refuse(verb, timeout=30.0, **args):
            return ControlReply(id="c", body={}, error="no", status=status)

        monkeypatch.setattr(server.engine, "control", refuse)
        reply = await server.http.get("/v1/cache/status")
    assert reply.status_code == status and reply.json()["error"]["message"] == "no"
