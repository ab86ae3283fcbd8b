"""Upstreams: a real process killed mid-stream, sockets without Nagle, litellm loaded late and only when needed."""

import asyncio
import signal
import socket
import subprocess
import sys
import textwrap
import types

import orjson
import pytest
from uvicorn.protocols.http import httptools_impl

from tests.support.fake_upstream import FakeUpstream, Stream, Whole, chunk, content, finish, message
from tests.support.gateway import Gateway, Got, ask, settings

SERVER = """
    import asyncio, json
    from aiohttp import web
    async def answer(request):
        await request.read()
        r = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await r.prepare(request)
        for i in range(10_000):
            await r.write(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\\n\\n')
            await asyncio.sleep(0.02)
    async def main():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.sleep(3600)
    asyncio.run(main())
"""


async def test_kill_9_of_the_upstream_mid_stream(tmp_path) -> None:
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SERVER)], stdout=subprocess.PIPE, text=True)
    try:
        port = int(await asyncio.to_thread(child.stdout.readline))
        async with Gateway(settings(f"http://127.0.0.1:{port}"), tmp_path) as gw:
            async with gw.http.post(gw.url + "/v1/chat/completions", json=ask(stream=True)) as response:
                body = b""
                while body.count(b'"content":"x"') < 2:
                    body += (part := await response.content.readany())
                    assert part, body
                child.send_signal(signal.SIGKILL)
                body += await asyncio.wait_for(response.content.read(), 60)
                got = Got(response.status, {}, body)
            (record,) = await gw.records()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert got.text().startswith("xx") and got.events[-1]["error"]["code"] == "upstream_died"
    assert "[DONE]" not in got.events and record["outcome"] == "died"
    assert record["answer"]["channels"]["content"]["text"].startswith("xx")


async def test_nagle_is_off_on_both_sides(tmp_path, monkeypatch) -> None:
    seen = []

    original = httptools_impl.RequestResponseCycle.send

    async def send(self, message):
        seen.append(self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return await original(self, message)

    monkeypatch.setattr(httptools_impl.RequestResponseCycle, "send", send)
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        await gw.post(ask(stream=True))
        idle = [c for conns in gw.app.pipeline.upstreams["engine"]._pool._idle.values() for c in conns]
        flags = [c.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for c in idle]
    assert seen and all(seen) and flags and all(flags)


async def test_a_pooled_connection_that_was_closed_is_no_error(tmp_path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        await gw.post(ask(stream=True))
        for conns in gw.app.pipeline.upstreams["engine"]._pool._idle.values():
            for connection in conns:
                connection.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        got = await gw.post(ask(stream=True))
    assert got.text() == "Hello world"


async def test_a_gateways_own_key_that_is_refused_is_not_the_clients_fault(tmp_path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai"), tmp_path) as gw:
        up.script(Whole({"error": {"message": "bad key"}}, 401))
        got = await gw.post(ask())
    assert got.status == 502 and "refused the gateway's key" in got.json["error"]["message"]


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_deployment_that_refuses_for_itself_alone_leads_to_another_one(tmp_path, status) -> None:
    """Each has its own credentials and models. Nobody is asked twice with a key that was refused."""
    async with FakeUpstream() as bad, FakeUpstream() as good:
        bad.script(Whole({"error": {"message": "no"}}, status))
        good.script(Whole(message("from the other")))
        data = settings(bad.base, "openai", routing={"retries": 3, "allowed_fails": 100, "backoff": 0})
        async with Gateway(data, tmp_path / "alone") as gw:
            alone = await gw.post(ask())
        data["model_list"] += settings(good.base, "openai")["model_list"]
        data["model_list"] += [settings(good.base, "openai")["model_list"][0] | {"model_name": "spare"}]
        async with Gateway(data, tmp_path / "two") as gw:
            got = [await gw.post(ask(str(i))) for i in range(4)]
            assert gw.app.pipeline.router.drain("m#1", True)
            drained = await gw.post(ask())
            gw.app.config.routing.fallbacks["m"] = ("spare",)
            fallen = await gw.post(ask())
    assert alone.status == (404 if status == 404 else 502) and drained.status == alone.status
    assert [g.json["choices"][0]["message"]["content"] for g in (*got, fallen)] == ["from the other"] * 5
    assert len(bad.requests) == len({r.headers["x-request-id"] for r in bad.requests}) >= 3


async def test_what_an_upstream_quotes_of_its_key_goes_no_further(tmp_path, caplog) -> None:
    data = settings("x", "openai")
    key, header = "sk-the-gateways-own", "Basic dXNlcjpwYXNz"
    async with FakeUpstream() as up:
        own = {"model": "openai/m", "api_base": up.base + "/v1", "api_key": key, "extra_headers": {"x-proxy-auth": header}}
        data["model_list"][0]["litellm_params"] = own
        said = {"message": f"bad key {key}, {header}", "code": key, "type": header, "param": key, "remedy": key}
        async with Gateway(data, tmp_path) as gw:
            up.script(Whole({"error": said}, 401), Whole({"error": said}, 400), Whole({"error": said}), Stream([{"error": said}]))
            got = [await gw.post(ask()), await gw.post(ask()), await gw.post(ask()), await gw.post(ask(stream=True))]
            await gw.records(4)
            written = gw.path.read_text()
    assert up.requests[0].headers["authorization"] == f"Bearer {key}" and up.requests[0].headers["x-proxy-auth"] == header
    for text in (*(g.body.decode() for g in got), written, caplog.text):
        assert key not in text and header not in text and "***" in text


async def test_model_names_and_defaults_of_a_deployment_are_sent_and_recorded(tmp_path) -> None:
    async with FakeUpstream() as up:
        up.script(Whole(message()))
        params = {"model": "openai/inner", "api_base": up.base + "/v1", "api_key": "k", "top_k": 20, "rpm": 3}
        data = {"model_list": [{"model_name": "outer", "litellm_params": params}]}
        async with Gateway(data, tmp_path) as gw:
            got = await gw.post(ask() | {"model": "outer"})
    sent = up.requests[0]
    assert (sent.json["model"], sent.json["top_k"]) == ("inner", 20) and "rpm" not in sent.json
    assert sent.headers["authorization"] == "Bearer k"
    assert "route.model" in got.headers["x-moorage-decisions"] and "route.default" in got.headers["x-moorage-decisions"]


async def test_a_clients_own_hints_are_replaced_and_never_leave_for_another_upstream(tmp_path) -> None:
    async with FakeUpstream() as up:
        up.script(Whole(message()))
        body = ask(moorage={"session": "mine", "priority": 99})
        async with Gateway(settings(up.base), tmp_path) as gw:
            await gw.post(body)
        async with Gateway(settings(up.base, "openai"), tmp_path) as gw:
            await gw.post(body)
    ours, other = up.requests
    assert ours.json["moorage"]["session"] == "mine" and "priority" not in ours.json["moorage"]
    assert ours.body.count(b'"moorage"') == 1 and "moorage" not in other.json


# --- litellm


class Item:
    def __init__(self, data: dict) -> None:
        self.data = data

    def model_dump(self, **_: object) -> dict:
        return self.data


class ProviderError(Exception):
    status_code = 429
    message = "slow down, sk-p"
    response = types.SimpleNamespace(headers={"retry-after": "3"})


@pytest.fixture
def litellm(monkeypatch):
    fake = types.ModuleType("litellm")
    fake.calls, fake.closed = [], 0

    async def stream():
        try:
            for data in (content("a"), content("b"), finish()):
                yield Item(data)
                await asyncio.sleep(0.01)
        except GeneratorExit:
            fake.closed += 1
            raise

    async def acompletion(**call):
        fake.calls.append(call)
        if call.get("messages", ask()["messages"])[0]["content"] == "fail":
            raise ProviderError
        return stream() if call.get("stream") else Item(message("whole"))

    fake.acompletion = acompletion
    monkeypatch.setitem(sys.modules, "litellm", fake)
    return fake


PROVIDER = {"model_list": [{"model_name": "m", "litellm_params": {"model": "anthropic/c", "api_key": "sk-p"}}]}


async def test_a_provider_answers_through_litellm(tmp_path, litellm) -> None:
    async with Gateway(PROVIDER, tmp_path) as gw:
        got, whole = await gw.post(ask(stream=True, think=False)), await gw.post(ask())
        failed = await gw.post(ask("fail"))
    assert got.text() == "ab" and got.events[-1] == "[DONE]" and whole.json["choices"][0]["message"]["content"] == "whole"
    call = litellm.calls[0]
    assert (call["model"], call["api_key"], call["reasoning_effort"]) == ("anthropic/c", "sk-p", "none")
    assert "moorage" not in call and "think" not in call and call["num_retries"] == 0
    assert failed.status == 429 and failed.headers["retry-after"] == "3" and "slow down" in failed.json["error"]["message"]
    assert "sk-p" not in gw.path.read_text() and b"sk-p" not in failed.body


# What steers litellm itself, by what it would do with it: go elsewhere, with another key, as another provider, not at all.
STEERING = {
    "api_base": "http://169.254.169.254",
    "base_url": "http://evil.test",
    "api_key": "sk-mine",
    "api_version": "2020-01-01",
    "organization": "theirs",
    "custom_llm_provider": "openai",
    "extra_headers": {"x-admin": "1"},
    "headers": {"x-admin": "1"},
    "proxy": "http://evil.test",
    "aws_bedrock_runtime_endpoint": "http://evil.test",
    "vertex_credentials": "{}",
    "mock_response": "nothing was asked",
    "fallbacks": [{"model": "openai/x", "api_base": "http://evil.test"}],
    "model_list": [],
    "num_retries": 50,
    "timeout": 0.001,
    "litellm_params": {},
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/embeddings"])
async def test_a_client_cannot_steer_where_litellm_goes_or_with_which_key(tmp_path, litellm, path) -> None:
    litellm.aembedding = litellm.atext_completion = litellm.acompletion
    asked = {"input": "x"} if path.endswith(("responses", "embeddings")) else {"prompt": "x", "messages": ask()["messages"]}
    own = {"model": "anthropic/c", "api_key": "sk-p", "api_version": "2030-01-01", "region": "eu"}
    data = {"model_list": [{"model_name": "m", "litellm_params": own}]}
    async with Gateway(data, tmp_path) as gw:
        got = await gw.post({"model": "m", "max_tokens": 9, "top_k": 3} | asked | STEERING, path)
    call = litellm.calls[0] if litellm.calls else pytest.fail(str(got))
    steered = {k: v for k, v in call.items() if k in STEERING}
    assert steered == {"api_key": "sk-p", "api_version": "2030-01-01", "timeout": 1800.0, "num_retries": 0}
    assert (call["region"], call["top_k"]) == ("eu", 3)
    assert "route.provider_fields" in got.headers["x-moorage-decisions"]
    (record,) = await gw.records()
    said = next(d for d in record["decisions"] if d["rule"] == "provider_fields")
    assert {e["path"] for e in said["edits"]} >= {"api_base", "base_url", "api_key", "proxy", "extra_headers"}


async def test_without_litellm_the_error_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)
    async with Gateway(PROVIDER, tmp_path) as gw:
        got = await gw.post(ask())
    assert got.status == 501 and "pip install" in got.json["error"]["message"]


async def test_litellm_and_torch_are_not_imported_before_a_provider_is_asked(tmp_path) -> None:
    """A gateway with a provider among its models, started and at work for its own engine; nothing slow is on its path either."""
    code = """
import asyncio, json, sys
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import Gateway, ask, settings
from pathlib import Path

async def main():
    async with FakeUpstream() as up:
        data = settings(up.base)
        data["model_list"].append({"model_name": "claude", "litellm_params": {"model": "anthropic/c", "api_key": "k"}})
        async with Gateway(data, Path(sys.argv[1])) as gw:
            answers = [await gw.post(ask(stream=True)), await gw.get("/v1/models"), await gw.get("/health")]
    heavy = ("litellm", "torch", "engine.app", "transformers", "pydantic", "httpx", "fastapi", "starlette", "redis")
    print(json.dumps([[a.status for a in answers], [name for name in heavy if name in sys.modules]]))

asyncio.run(main())
"""
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert orjson.loads(out.stdout) == [[200, 200, 200], []]


async def test_upstream_bytes_are_parsed_only_as_json_objects(tmp_path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        up.script(Whole(b"<html>"), Whole(b"[1]"), Stream([b"data: junk\n\n", chunk({"content": "x"}, "stop")]))
        first, second, third = await gw.post(ask()), await gw.post(ask()), await gw.post(ask(stream=True))
        records = await gw.records(3)
    assert first.status == second.status == 502 and b"data: junk\n\n" in third.body
    assert records[2]["answer"]["malformed"] == 1 and orjson.loads(first.body)["error"]["code"] == "upstream_protocol"
