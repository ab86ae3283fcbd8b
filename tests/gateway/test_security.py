"""What a client must not be able to do: reach other servers, keys or people's logs, or hold the gateway by doing nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import types
from typing import Any

import pytest

from gateway import app as app_module
from gateway import limits as limits_module
from gateway.config import Config
from gateway.config_file import load, parse
from gateway.limits import Limits
from gateway.store import MemoryStore
from gateway.upstream.base import Health
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, finish, message
from tests.support.gateway import Gateway, ask, settings

KEYS = [{"name": f"k{i}", "key": f"sk-key-{i}"} for i in range(3)]


@pytest.mark.parametrize("given", ["sk-key-0", "sk-key-2", "sk-wrong", ""])
def test_every_key_is_compared_whole_and_in_constant_time(given, monkeypatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(limits_module, "hmac", types.SimpleNamespace(compare_digest=compare))
    config = parse({"keys": KEYS}, "test", {})
    limits = Limits(config.keys, config.limits, MemoryStore())
    try:
        limits.caller({"authorization": f"Bearer {given}"})
    except limits_module.Refusal as refusal:
        assert refusal.status == 401 and given not in ("sk-key-0", "sk-key-2")
    assert compared == [(32, 32)] * 3  # hashes of one length, all of them, also behind a match


def test_the_defaults_are_closed() -> None:
    config = load(None)
    assert config.listen.host == "127.0.0.1" and not config.server.admin and not config.tracing.enabled
    assert 0 < config.server.max_body_mb <= 64 and config.server.body_timeout > 0 and config.limits.waiting > 0
    assert all(value > 0 for value in (config.timeouts.connect, config.timeouts.prefill, config.timeouts.idle))
    assert isinstance(config, Config)


async def test_admin_routes_are_not_there_unless_configured(tmp_path) -> None:
    keys = [{"name": "root", "key": "sk-root", "admin": True}]
    async with FakeUpstream() as up, Gateway(settings(up.base, keys=keys), tmp_path) as gw:
        drained = await gw.post({"deployment": "m#0"}, "/admin/drain", authorization="Bearer sk-root")
        async with gw.http.get(gw.url + "/admin/deployments", headers={"authorization": "Bearer sk-root"}) as listed:
            assert listed.status == drained.status == 404


SENT = {"host", "accept", "accept-encoding", "user-agent", "content-type", "content-length", "x-request-id", "connection"}


@pytest.mark.parametrize("kind", ["moorage", "openai"])
async def test_only_our_own_headers_reach_an_upstream(tmp_path, kind) -> None:
    hostile = {"cookie": "s=1", "authorization": "Bearer sk-mine", "x-api-key": "sk-mine", "x-forwarded-for": "10.0.0.1"}
    hostile |= {
        "x-evil": "1",
        "transfer-encoding-x": "chunked",
        "anthropic-beta": "b",
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
    }
    async with FakeUpstream() as up:
        up.script(Whole(message()))
        async with Gateway(settings(up.base, kind), tmp_path) as gw:
            await gw.post(ask(), **hostile)
    assert set(up.requests[0].headers) <= SENT and "sk-mine" not in str(up.requests[0].headers)


async def test_a_body_cannot_choose_where_it_goes(tmp_path) -> None:
    async with FakeUpstream() as up, FakeUpstream() as other:
        up.script(Whole(message()))
        bait = {"api_base": other.base, "base_url": other.base, "custom_llm_provider": "openai", "api_key": "sk-x"}
        async with Gateway(settings(up.base, "openai"), tmp_path) as gw:
            assert (await gw.post(ask() | bait)).status == 200
            for model in (f"openai/{other.base}", other.base, "m@" + other.base):
                assert (await gw.post(ask() | {"model": model})).status == 404
    assert len(up.requests) == 1 and other.requests == [] and "authorization" not in up.requests[0].headers


@pytest.fixture
def litellm(monkeypatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    async def acompletion(**call: Any) -> dict[str, Any]:
        calls.append(call)
        return message("Hi")

    monkeypatch.setitem(__import__("sys").modules, "litellm", types.SimpleNamespace(acompletion=acompletion))
    return calls


STEERING = [
    "api_base",
    "base_url",
    "api_key",
    "custom_llm_provider",
    "extra_headers",
    "fallbacks",
    "mock_response",
    "proxy",
    "callbacks",
]


async def test_a_body_cannot_steer_litellm_and_what_is_left_out_is_said(tmp_path, litellm) -> None:
    params = {"model": "bedrock/x", "api_key": "sk-own", "aws_role_name": "agents", "safe_mode": True}
    bait = {name: "http://169.254.169.254/" for name in (*STEERING, "aws_role_name", "some_new_litellm_switch")}
    async with Gateway({"model_list": [{"model_name": "m", "litellm_params": params}]}, tmp_path) as gw:
        got = await gw.post(ask() | bait | {"top_k": 5, "extra_body": {"a": 1}})
        (record,) = await gw.records()
    (call,) = litellm
    assert got.status == 200 and "route.provider_fields" in got.headers["x-moorage-decisions"]
    assert (call["api_key"], call["aws_role_name"], call["safe_mode"], call["top_k"]) == ("sk-own", "agents", True, 5)
    assert not {*STEERING, "some_new_litellm_switch"} - {"api_key"} & call.keys() and "169.254" not in str(call)
    dropped = {e["path"] for d in record["decisions"] if d["rule"] == "provider_fields" for e in d["edits"]}
    assert {*STEERING, "some_new_litellm_switch"} <= dropped


FORGED = 'm\r\nx-evil: 1\n2026-01-01 INFO moorage request outcome=ok req=forged "\x1b[31m\u2028\x00'


async def test_a_client_cannot_write_log_lines_or_headers(tmp_path, caplog) -> None:
    caplog.set_level(logging.DEBUG, "moorage")
    policies = [{"unknown": "drop"}]
    async with FakeUpstream() as up, Gateway(settings(up.base, policies=policies), tmp_path) as gw:
        forged = {"model": FORGED, FORGED: 1, "metadata": {"session_id": "s \x1b[0m req=forged"}}
        got = await gw.post(ask() | forged, user_agent='codex" a=b')
        (record,) = await gw.records()
    assert got.status == 404 and "x-evil" not in got.headers and record["model"] == FORGED
    lines = [r.getMessage() for r in caplog.records]
    assert lines and all(line.isprintable() for line in lines), lines
    assert not any(" req=forged" in line.replace('\\"', "").split('"')[0] for line in lines)
    assert len(gw.path.read_text().split("\n")) == 2


async def test_keys_are_in_no_log_line_no_record_and_no_answer(tmp_path, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = ["sk-client-1", "sk-upstream-1"]
    data = settings("http://127.0.0.1:9", "openai", keys=[{"name": "desk", "key": secrets[0]}])
    data["model_list"][0]["litellm_params"]["api_key"] = secrets[1]
    async with FakeUpstream() as up:
        data["model_list"].append(json.loads(json.dumps(data["model_list"][0])))
        data["model_list"][1]["litellm_params"]["api_base"] = up.base + "/v1"
        up.script(Whole({"error": {"message": "no"}}, 401), Stream([content("a")], done=False), Stream([content("a"), finish()]))
        async with Gateway(data, tmp_path) as gw:
            answers = [await gw.post(ask(stream=True), authorization=f"Bearer {secrets[0]}") for _ in range(3)]
            answers.append(await gw.post(ask(), authorization="Bearer sk-client-1x"))
            await gw.records(4)
    everything = (
        gw.path.read_text() + caplog.text + repr(gw.app.config) + "".join(a.body.decode() + str(a.headers) for a in answers)
    )
    assert not any(secret in everything for secret in secrets)


async def test_a_client_that_never_sends_its_body_is_let_go(tmp_path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base, server={"body_timeout": 0.2}), tmp_path) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        body = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
        writer.close()
    assert head.startswith(b"HTTP/1.1 408") and b"within 0.2 s" in body and json.loads(body)["type"] == "error"


ANSWERED = b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n"
HALVES = {
    "nothing": b"",
    "half a line": b"POST /v1/chat/comp",
    "half a head": b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx: y",
    "half a second head": ANSWERED + b"GET / HTTP/1.1\r\nho",
    "a blank line": ANSWERED + b"\r\n",
}


@pytest.mark.parametrize("half", HALVES)
async def test_a_client_that_never_ends_its_head_is_let_go(half, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gateway.cork.HEAD_S", 0.2)
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for line in HALVES[half].splitlines(keepends=True):
            writer.write(line)
            await writer.drain()
            await asyncio.sleep(0.01)  # packets of their own
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200") if ANSWERED in HALVES[half] else answer == b""


async def test_a_head_without_an_end_is_refused_and_takes_no_memory(tmp_path) -> None:
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        host, port = gw.url.removeprefix("http://").split(":")
        for line in (b"a: b\r\n" * 2000, b"x" * 16000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(1000):
                    writer.write(line)
                    await writer.drain()
                    await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):  # what was sent behind its end may reset the connection before it is read
                assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 431 ")
            writer.close()
        assert (await gw.get("/")).status == 200


async def test_a_long_answer_is_not_cut_by_the_time_for_heads(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gateway.cork.HEAD_S", 0.05)
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        for _ in range(2):
            up.script(Stream([content("a"), 0.3, content("b"), finish()]))
            assert (await gw.post(ask(stream=True))).text() == "ab"


DETAILS = ["/health", "/health/readiness", "/metrics", "/v1/models", "/v1/models/m"]


async def test_strangers_learn_that_we_live_and_no_more(tmp_path) -> None:
    """Names, addresses and counts need a key, or a place on this machine with no proxy between."""
    keys = [{"name": "desk", "key": "sk-desk"}, {"name": "lab", "key": "sk-lab", "models": ["other*"]}]
    elsewhere = {"x_forwarded_for": "203.0.113.9"}
    async with FakeUpstream() as up, Gateway(settings(up.base, keys=keys), tmp_path) as gw:
        strange = {path: await gw.get(path, **elsewhere) for path in (*DETAILS, "/", "/health/liveliness")}
        known = {path: await gw.get(path, **elsewhere, x_api_key="sk-desk") for path in DETAILS}
        local = {path: await gw.get(path) for path in DETAILS}
        limited = [await gw.get(path, x_api_key="sk-lab") for path in ("/v1/models", "/v1/models/m")]
    place = up.base.rpartition(":")[2].encode()
    assert [strange[path].status for path in DETAILS] == [200, 200, 401, 401, 401]
    assert all(strange[path].json == {"status": "ok"} for path in ("/", "/health", "/health/readiness", "/health/liveliness"))
    assert not any(place in got.body or b"m#0" in got.body for got in strange.values())
    assert [got.status for got in known.values()] == [200] * 5 and "m#0" in known["/health"].json["upstreams"]
    assert [local[path].status for path in DETAILS] == [200, 200, 200, 401, 401] and "m#0" in local["/health"].json["upstreams"]
    assert limited[0].json["data"] == [] and limited[1].status == 404


async def test_many_looks_do_not_make_us_ask_the_upstreams_each_time(tmp_path) -> None:
    asked = 0
    async with FakeUpstream() as up, Gateway(settings(up.base, keys=KEYS), tmp_path) as gw:
        health = gw.app.pipeline.upstreams["engine"].health

        async def count(deployment):
            nonlocal asked
            asked += 1
            return await health(deployment)

        gw.app.pipeline.upstreams["engine"].health = count
        got = await asyncio.gather(*(gw.get("/health", via="1.1 proxy") for _ in range(20)))
        ours = await asyncio.gather(*(gw.get("/health/readiness") for _ in range(20)))
    assert all(g.json == {"status": "ok"} for g in got) and all("m#0" in g.json["upstreams"] for g in ours)
    assert asked <= 2


async def test_whoever_looks_often_never_waits_for_an_upstream(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(app_module, "HEALTH_S", 3600.0)
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        app, engine = gw.app, gw.app.pipeline.upstreams["engine"]
        answer, asked = asyncio.Event(), asyncio.Event()

        async def slow(deployment) -> Health:
            asked.set()
            await answer.wait()
            return Health("loading")

        assert (await gw.get("/health")).json["status"] == "ok"
        engine.health = slow
        app._seen_at -= 2000  # more than half as old as it may be
        old = [(await gw.get("/health")).json["status"] for _ in range(3)]
        await asyncio.wait_for(asked.wait(), 30)
        assert old == ["ok"] * 3 and not app._looking.done()
        app._seen_at -= 2000  # too old to be told
        waiting = [asyncio.create_task(gw.get("/health")) for _ in range(3)]
        done, _ = await asyncio.wait(waiting, timeout=0.1)
        assert not done
        answer.set()
        assert [(await w).json["status"] for w in waiting] == ["loading"] * 3


@pytest.mark.parametrize(
    ("peer", "local"),
    [(("127.0.0.1", 5), True), (("127.9.9.9", 5), True), (("::1", 5), True), (("::ffff:127.0.0.1", 5), True)]
    + [(("10.0.0.1", 5), False), (("::ffff:10.0.0.1", 5), False), (("", 0), False), (("unix:", 0), False), (None, False)],
)
def test_who_is_on_this_machine(peer, local) -> None:
    assert app_module._is_local({"client": peer}, {}) is local
    assert not app_module._is_local({"client": peer}, {"forwarded": "for=127.0.0.1"})
