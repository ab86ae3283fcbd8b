"""Routing over several deployments: affinity, balance, retries, cooldown, fallbacks, drain. The router, then the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.answer import Attempt
from gateway.config_file import ConfigError, parse
from gateway.dialects.chat import Chat
from gateway.errors import Refusal, UpstreamError
from gateway.routing import Balanced
from gateway.turn import Received, Turn
from gateway.upstream.base import Health
from tests.support.fake_upstream import HELLO, FakeUpstream, Stream, Whole, content, message
from tests.support.gateway import Gateway, ask


def config(count: int = 3, **sections: Any):
    entries = [
        {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": f"http://h{i}/v1"}, "model_info": {"id": f"d{i}"}}
        for i in range(count)
    ]
    return parse({"model_list": entries, "routing": {"backoff": 0, **sections.pop("routing", {})}, **sections}, "t", {})


def turn(*texts: str, model: str = "m") -> Turn:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]
    fresh = Turn(id="r", received=Received(route="/", headers={}, body=b""), dialect=Chat())
    return fresh.start(b"", {"model": model, "messages": messages}, model, True)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def order(router: Balanced, t: Turn) -> list[str]:
    return [d.name async for d in router.attempts(t)]


async def serve(router: Balanced, t: Turn, error: Refusal | None = None, keep: bool = False) -> str:
    """One request to the first choice; `keep` leaves it running."""
    async for d in router.attempts(t):
        attempt = Attempt(d, b"", 0.0, error=error)
        router.began(t, attempt)
        if not keep:
            router.ended(t, attempt)
        return d.name
    raise AssertionError("no deployment")


DOWN = UpstreamError(503, "down", kind="connect", retryable=True)


async def test_the_deployment_that_knows_the_longest_prefix_gets_the_turn() -> None:
    router = Balanced(config())
    busy = [await serve(router, turn(f"other {i}"), keep=True) for i in range(2)]
    home = await serve(router, turn("a"))
    assert home not in busy  # least busy first
    await serve(router, turn("x", "y", "z"), keep=True)
    assert await serve(router, turn("a", "b", "c")) == home
    assert await serve(router, turn("a", "b", "other branch")) == home  # a fork knows the common part


async def test_affinity_yields_when_its_deployment_is_overloaded() -> None:
    router = Balanced(config(routing={"overload": 2}))
    home = await serve(router, turn("a"))
    got = [await serve(router, turn("a", "b", str(i)), keep=True) for i in range(4)]
    assert got[:3] == [home] * 3 and got[3] != home


async def test_weights_share_the_load() -> None:
    settings = config(2)
    heavy = settings.deployments[0].control
    heavy["weight"] = 3
    router = Balanced(settings)
    got = [await serve(router, turn(f"q{i}"), keep=True) for i in range(8)]
    assert got.count("d0") == 6


async def test_retries_take_other_deployments_first_and_are_bounded() -> None:
    assert sorted(await order(Balanced(config(3)), turn("a"))) == ["d0", "d1", "d2"]
    assert await order(Balanced(config(1)), turn("a")) == ["d0"] * 3  # the only one is tried again
    assert len(await order(Balanced(config(5, routing={"retries": 1})), turn("a"))) == 2


async def test_cooldown_skips_a_failing_deployment_but_never_the_only_one() -> None:
    clock = Clock()
    router = Balanced(config(2, routing={"allowed_fails": 2, "cooldown": 30}), clock=clock)
    failing = await serve(router, turn("a"), DOWN)
    while router.status()[failing]["cooling_s"] == 0:
        await serve(router, turn("a"), DOWN)
    others = [await serve(router, turn(f"b{i}"), keep=True) for i in range(5)]
    cooling = {n for n, s in router.status().items() if s["cooling_s"]}
    assert len(cooling) == 1 and not cooling & set(others)
    clock.now += 31
    assert await serve(router, turn("c")) in cooling  # idle and warm again
    only = Balanced(config(1, routing={"allowed_fails": 1}))
    for _ in range(5):
        assert await serve(only, turn("a"), DOWN) == "d0"


@pytest.mark.parametrize(
    ("status", "kind", "cools"), [(400, "status", False), (429, "status", True), (500, "status", True), (502, "died", True)]
)
async def test_only_its_own_failures_cool_a_deployment(status: int, kind: str, cools: bool) -> None:
    router = Balanced(config(2, routing={"allowed_fails": 1}))
    name = await serve(router, turn("a"), UpstreamError(status, "x", kind=kind, retryable=True))
    assert bool(router.status()[name]["cooling_s"]) == cools


async def test_retry_after_of_an_upstream_is_kept() -> None:
    router = Balanced(config(2))
    error = UpstreamError(429, "x", kind="status", retryable=True, headers={"retry-after": "120"})
    name = await serve(router, turn("a"), error)
    assert router.status()[name]["cooling_s"] == 120


@pytest.mark.parametrize(
    ("said", "low", "high"),
    [("a date", 100, 301), ("99999999", 600, 600)]
    + [(odd, 30, 30) for odd in ("soon", "nan", "-5", "1e9", "", "Thu, 01 Jan 1970 00:00:00 GMT")],
)
async def test_retry_after_may_be_a_date_and_may_be_nonsense(said: str, low: float, high: float) -> None:
    router = Balanced(config(2, routing={"allowed_fails": 1, "cooldown": 30}))
    if said == "a date":
        said = format_datetime(datetime.now(UTC) + timedelta(seconds=300), usegmt=True)
    error = UpstreamError(429, "x", kind="status", retryable=True, headers={"retry-after": said})
    name = await serve(router, turn("a"), error)
    assert low - 1 <= router.status()[name]["cooling_s"] <= high


async def test_a_fallback_behind_a_wildcard_is_asked_for_by_its_own_name(tmp_path: Path) -> None:
    async with FakeUpstream() as one, FakeUpstream() as other:
        one.script(Whole({"error": "x"}, 500))
        other.script(Whole(message()))
        entries = [("m", "openai/m", one), ("*", "openai/*", other)]
        data = {
            "model_list": [
                {"model_name": n, "litellm_params": {"model": m, "api_base": up.base + "/v1"}} for n, m, up in entries
            ],
            "routing": {"fallbacks": {"m": ["big"]}, "backoff": 0, "retries": 0},
        }
        async with Gateway(data, tmp_path) as gw:
            got = await gw.post(ask())
    assert got.status == 200 and [r.json["model"] for r in other.requests] == ["big"]


async def test_a_probe_brings_a_recovered_deployment_back_early() -> None:
    async def well(_: object) -> Health:
        return Health("ready", None)

    router = Balanced(config(2, routing={"allowed_fails": 1, "cooldown": 600, "probe": 0.01}), probe=well)
    name = await serve(router, turn("a"), DOWN)
    assert router.status()[name]["cooling_s"] > 0
    for _ in range(100):
        await asyncio.sleep(0.01)
        if not router.status()[name]["cooling_s"]:
            break
    assert router.status()[name] == {"running": 0, "draining": False, "failures": 0, "cooling_s": 0}
    await router.close()


async def test_drain_and_rpm_take_a_deployment_out_and_all_out_is_said() -> None:
    clock, settings = Clock(), config(2)
    settings.deployments[1].control["rpm"] = 2
    router = Balanced(settings, clock=clock)
    assert router.drain("d0", True) and not router.drain("nope", True)
    assert [await serve(router, turn(str(i))) for i in range(2)] == ["d1", "d1"]
    with pytest.raises(Refusal) as refused:
        await order(router, turn("c"))
    assert refused.value.status == 503 and refused.value.headers["retry-after"]
    clock.now += 60
    assert await serve(router, turn("d")) == "d1"
    router.drain("d0", False)
    assert "d0" in await order(router, turn("e"))


async def test_fallbacks_come_after_all_deployments_of_the_model() -> None:
    entries = [
        {"model_name": n, "litellm_params": {"model": f"openai/{n}", "api_base": "http://h/v1"}, "model_info": {"id": n}}
        for n in ("m", "big")
    ]
    router_settings = {"num_retries": 1, "fallbacks": [{"m": ["big"]}], "routing_strategy": "x"}
    settings = parse({"model_list": entries, "router_settings": router_settings, "routing": {"backoff": 0}}, "t", {})
    assert settings.routing.retries == 1 and [w for w in settings.warnings if "routing_strategy" in w]
    assert await order(Balanced(settings), turn("a")) == ["m", "m", "big", "big"]
    with pytest.raises(Refusal) as unknown:
        await order(Balanced(settings), turn("a", model="other"))
    assert unknown.value.status == 404


def test_bad_routing_settings_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"routing"):
        config(1, routing={"retrys": 2})


# --- through the gateway


@pytest.fixture
async def two() -> AsyncIterator[tuple[FakeUpstream, FakeUpstream]]:
    async with AsyncExitStack() as stack:
        yield tuple([await stack.enter_async_context(FakeUpstream()) for _ in range(2)])


def over(two: tuple[FakeUpstream, FakeUpstream], **sections: Any) -> dict[str, Any]:
    entries = [
        {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": up.base + "/v1"}, "model_info": {"id": f"d{i}"}}
        for i, up in enumerate(two)
    ]
    return {"model_list": entries, "routing": {"backoff": 0.01}} | sections


async def test_a_conversation_stays_where_its_prefix_is(two: tuple, tmp_path: Path) -> None:
    async with Gateway(over(two), tmp_path) as gw:
        for talk in range(4):
            messages = [{"role": "user", "content": f"talk {talk}"}]
            for _ in range(3):
                assert (await gw.post({"model": "m", "stream": True, "messages": messages})).status == 200
                messages += [{"role": "assistant", "content": "Hello world"}, {"role": "user", "content": "more"}]
    seen = [{r.json["messages"][0]["content"] for r in up.requests} for up in two]
    assert not seen[0] & seen[1] and sum(len(up.requests) for up in two) == 12


async def test_a_failing_upstream_costs_no_request(two: tuple, tmp_path: Path) -> None:
    two[0].script(Whole({"error": {"message": "overloaded"}}, status=503))
    async with Gateway(over(two), tmp_path) as gw:
        for i in range(6):
            got = await gw.post(ask(str(i), stream=True))
            assert got.status == 200 and got.text() == "Hello world"
        records = await gw.records(6)
    assert any(len(r["attempts"]) == 2 for r in records) and len(two[0].requests) == 3  # then it was left alone


async def test_nothing_is_retried_after_the_first_byte(two: tuple, tmp_path: Path) -> None:
    for up in two:
        up.script(Stream([content("Hal"), 0.05, content("lo")], die_after=2))
    async with Gateway(over(two), tmp_path) as gw:
        got = await gw.post(ask(stream=True))
    assert got.text() == "Hal" and b"[DONE]" not in got.body and "error" in got.events[-1]
    assert sum(len(up.requests) for up in two) == 1


async def test_drain_over_the_admin_route_needs_an_admin_key(two: tuple, tmp_path: Path) -> None:
    keys = [{"name": "boss", "key": "k1", "admin": True}, {"name": "desk", "key": "k2"}]
    async with Gateway(over(two, keys=keys, server={"admin": True}), tmp_path / "on") as gw:
        assert (await gw.post({"deployment": "d0"}, "/admin/drain")).status == 401
        assert (await gw.post({"deployment": "d0"}, "/admin/drain", x_api_key="k2")).status == 403
        assert (await gw.post({"deployment": "no"}, "/admin/drain", x_api_key="k1")).status == 404
        assert (await gw.post([1], "/admin/drain", x_api_key="k1")).status == 400
        assert (await gw.post({"deployment": "d0"}, "/admin/drain", x_api_key="k1")).status == 200
        for i in range(4):
            await gw.post(ask(str(i), stream=True), x_api_key="k2")
        assert not two[0].requests and len(two[1].requests) == 4
    async with Gateway(over(two, keys=keys), tmp_path / "off") as gw:
        assert (await gw.post({"deployment": "d0"}, "/admin/drain", x_api_key="k1")).status == 404  # off by default


async def test_streams_and_whole_answers_mix(two: tuple, tmp_path: Path) -> None:
    two[0].script(HELLO)
    two[1].script(Whole(message("Hi")))
    async with Gateway(over(two[1:]), tmp_path) as gw:
        assert (await gw.post(ask())).json["choices"][0]["message"]["content"] == "Hi"
