"""Keys, rates, budgets and the fair line; the store in memory and in a real Redis."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gateway.fairness import BATCH_EVERY, FairLine, Full
from gateway.limits import price
from gateway.redis_store import RedisStore
from gateway.store import MemoryStore, Store
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, finish, message, usage
from tests.support.gateway import Gateway, ask, settings
from tests.support.processes import Redis


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as up:
        yield up


# --- the line


async def test_interactive_goes_before_batch_and_batch_never_starves() -> None:
    line, served = FairLine(1, 100), []

    async def one(kind: str) -> None:
        await line.enter("k", kind)
        served.append(kind)
        line.leave("k")

    await line.enter("k")
    tasks = [asyncio.create_task(one(kind)) for kind in ["batch"] * 3 + ["interactive"] * 20]
    await asyncio.sleep(0)
    line.leave("k")
    await asyncio.gather(*tasks)
    assert served.index("batch") < BATCH_EVERY and served[:3].count("interactive") >= 2 and len(served) == 23


async def test_keys_take_turns() -> None:
    line, served = FairLine(1, 100), []

    async def one(key: str) -> None:
        await line.enter(key)
        served.append(key)
        line.leave(key)

    await line.enter("x")
    tasks = [asyncio.create_task(one(key)) for key in ["loud"] * 6 + ["quiet"] * 2]
    await asyncio.sleep(0)
    line.leave("x")
    await asyncio.gather(*tasks)
    assert served[:4].count("quiet") == 2


async def test_a_key_at_its_own_limit_does_not_block_the_others() -> None:
    line = FairLine(4, 10, {"a": 1})
    await line.enter("a")
    second = asyncio.create_task(line.enter("a"))
    await asyncio.sleep(0)
    await asyncio.wait_for(line.enter("b"), 1)
    assert not second.done() and line.length == 1
    line.leave("a")
    await asyncio.wait_for(second, 1)


@hypothesis_settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["interactive", "batch"]), st.sampled_from(["stay", "cancel", "quick"])
        ),
        max_size=25,
    ),
    st.integers(0, 3),
)
def test_no_place_is_ever_lost(visits: list[tuple[str, str, str]], capacity: int) -> None:
    async def run() -> None:
        line = FairLine(capacity, 8, {"a": 2})
        most = 0

        async def visit(key: str, kind: str, how: str) -> None:
            nonlocal most
            try:
                await line.enter(key, kind)
            except Full:
                return
            most = max(most, line.running.total())
            try:
                await asyncio.sleep(0.001 if how == "stay" else 0)
            finally:
                line.leave(key)

        tasks = [asyncio.create_task(visit(*v)) for v in visits]
        await asyncio.sleep(0)
        for task, v in zip(tasks, visits, strict=True):
            if v[2] == "cancel":
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert line.running.total() == 0 and line.length == 0
        assert not capacity or most <= capacity

    asyncio.run(run())


# --- keys, rates, budgets through the gateway


def with_keys(up: FakeUpstream, *keys: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return settings(up.base, keys=list(keys), **sections)


async def test_keys_may_be_given_as_hashes_and_never_show(
    up: FakeUpstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "sk-very-secret"
    hashed = "sha256:" + hashlib.sha256(secret.encode()).hexdigest()
    async with Gateway(with_keys(up, {"name": "desk", "key": hashed}), tmp_path) as gw:
        assert (await gw.post(ask(stream=True), authorization=f"Bearer {secret}")).status == 200
        for wrong in ({}, {"authorization": f"Bearer {hashed}"}, {"x_api_key": "sk-other"}):
            assert (await gw.post(ask(), **wrong)).status == 401
        records = await gw.records(4)
    assert records[0]["caller"] == "desk"
    assert secret not in gw.path.read_text() + caplog.text


async def test_models_of_a_key(up: FakeUpstream, tmp_path: Path) -> None:
    async with Gateway(
        with_keys(up, {"name": "a", "key": "1", "models": ["x*"]}, {"name": "b", "key": "2", "models": ["m"]}), tmp_path
    ) as gw:
        refused = await gw.post(ask(), x_api_key="1")
        assert refused.status == 403 and refused.json["error"]["code"] == "model_not_allowed"
        assert (await gw.post(ask(stream=True), x_api_key="2")).status == 200


@pytest.mark.parametrize(("rule", "bodies"), [({"rpm": 2}, ["a"] * 3), ({"tpm": 300}, ["x" * 600, "x" * 200, "x" * 200])])
async def test_rates_end_in_429_with_retry_after(
    up: FakeUpstream, tmp_path: Path, rule: dict[str, int], bodies: list[str]
) -> None:
    up.script(Stream([content("Hi"), finish(), usage(150, 10)]))
    async with Gateway(with_keys(up, {"name": "a", "key": "1", **rule}, {"name": "b", "key": "2"}), tmp_path) as gw:
        got = [await gw.post(ask(text, stream=True), x_api_key="1") for text in bodies]
        assert [g.status for g in got] == [200, 200, 429]
        assert 0 < int(got[-1].headers["retry-after"]) <= 60 and got[-1].json["error"]["code"] == "rate_limit_exceeded"
        assert (await gw.post(ask(stream=True), x_api_key="2")).status == 200  # another key is not touched


async def test_tokens_are_corrected_by_what_the_upstream_counted(up: FakeUpstream, tmp_path: Path) -> None:
    up.script(Stream([content("Hi"), finish(), usage(3, 1)]))  # the estimate for 600 characters is 150
    async with Gateway(with_keys(up, {"name": "a", "key": "1", "tpm": 200}), tmp_path) as gw:
        assert [(await gw.post(ask("x" * 600, stream=True), x_api_key="1")).status for _ in range(5)] == [200] * 5


async def test_a_budget_is_spent_and_then_refused(up: FakeUpstream, tmp_path: Path) -> None:
    data = with_keys(up, {"name": "a", "key": "1", "budget": 1.0})
    data["model_list"][0]["litellm_params"] |= {
        "input_cost_per_token": 0.01,
        "output_cost_per_token": 0.02,
        "cache_read_input_token_cost": 0,
    }
    up.script(Stream([content("Hi"), finish(), usage(100, 20, cached=60)]))  # 40 * 0.01 + 20 * 0.02 = 0.8
    async with Gateway(data, tmp_path) as gw:
        assert [(await gw.post(ask(stream=True), x_api_key="1")).status for _ in range(3)] == [200, 200, 429]


def test_prices_with_and_without_a_price_for_reused_tokens() -> None:
    counts = usage(100, 20, cached=60)["usage"]
    assert price(counts, {"input_cost_per_token": 0.01}) == pytest.approx(1.0)
    assert price(counts, {"input_cost_per_token": 0.01, "cache_read_input_token_cost": 0.001}) == pytest.approx(0.46)
    assert price({}, {"input_cost_per_token": 0.01}) == 0


async def test_concurrency_waits_a_full_line_refuses_and_places_come_back(up: FakeUpstream, tmp_path: Path) -> None:
    up.script(Whole(message(), head_delay=0.2))
    limits = {"concurrency": 1, "waiting": 2}
    async with Gateway(settings(up.base, limits=limits), tmp_path) as gw:
        got = await asyncio.gather(*(gw.post(ask(str(i))) for i in range(5)))
        assert sorted(g.status for g in got) == [200, 200, 200, 429, 429]
        assert gw.app.pipeline.limits.status() == {"running": {}, "waiting": 0}
        leaving = asyncio.create_task(gw.post(ask("gone")))
        waiting = asyncio.create_task(gw.post(ask("gone too")))
        await asyncio.sleep(0.05)
        leaving.cancel(), waiting.cancel()
        assert (await asyncio.wait_for(gw.post(ask("next")), 5)).status == 200


async def test_waiting_has_an_end(up: FakeUpstream, tmp_path: Path) -> None:
    up.script(Whole(message(), head_delay=0.6))
    async with Gateway(settings(up.base, limits={"concurrency": 1, "wait": 0.1}), tmp_path) as gw:
        got = await asyncio.gather(*(gw.post(ask(str(i))) for i in range(2)))
    assert sorted(g.status for g in got) == [200, 429]


# --- the store


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    with Redis(tmp_path) as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    made = MemoryStore() if request.param == "memory" else RedisStore(request.getfixturevalue("redis").url, timeout=30)
    yield made
    await made.close()


async def test_both_stores_keep_the_same_books(store: Store) -> None:
    assert await store.take("k", 2, 3, 60) == type(await store.take("other", 0, 1, 60))(True, 1.0)
    refused = await store.take("k", 2, 3, 60)
    assert not refused.ok and refused.remaining == 1.0 and 0 < refused.wait <= 60
    assert (await store.take("k", -1, 3, 60)).remaining == 2.0
    assert (await store.take("k", 2, 3, 60)).ok
    assert (await store.take("k", 5, float("inf"), 60)).ok
    assert (await store.take("short", 1, 1, 0.05)).ok
    async with asyncio.timeout(30):
        while not (await store.take("short", 1, 1, 0.05)).ok:  # until a new window
            await asyncio.sleep(0.01)
    await store.put("v", b"\x00x", 60)
    assert await store.get("v") == b"\x00x" and await store.get("none") is None
    await store.put("v", b"\x00x", 0.05)
    async with asyncio.timeout(30):
        while await store.get("v") is not None:
            await asyncio.sleep(0.01)


async def test_many_at_once_never_book_more_than_the_limit(store: Store) -> None:
    grants = await asyncio.gather(*(store.take("hot", 1, 50, 60) for _ in range(200)))
    assert sum(g.ok for g in grants) == 50


async def test_two_gateways_share_one_limit(up: FakeUpstream, redis: Redis, tmp_path: Path) -> None:
    data = with_keys(up, {"name": "a", "key": "1", "rpm": 4}, store={"redis": redis.url})
    async with Gateway(data, tmp_path / "1") as one, Gateway(data, tmp_path / "2") as two:
        got = [(await gw.post(ask(stream=True), x_api_key="1")).status for gw in (one, two) * 3]
    assert got == [200] * 4 + [429] * 2


async def test_redis_gone_is_degraded_not_down(
    up: FakeUpstream, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.redis_store.RETRY_S", 0.05)
    data = with_keys(up, {"name": "a", "key": "1", "rpm": 3}, store={"redis": redis.url})
    async with Gateway(data, tmp_path) as gw:
        assert (await gw.post(ask(stream=True), x_api_key="1")).status == 200
        redis.kill()
        got = [(await gw.post(ask(stream=True), x_api_key="1")).status for _ in range(4)]
        assert got == [200, 200, 200, 429] and gw.app.pipeline.store.degraded  # limits hold per process meanwhile
        redis.start()
        async with asyncio.timeout(30):
            while gw.app.pipeline.store.degraded:
                await asyncio.sleep(0.05)
                await gw.post(ask(stream=True), x_api_key="1")
        assert (await gw.post(ask(stream=True), x_api_key="1")).status == 200


async def test_while_redis_hangs_one_request_at_a_time_waits_for_it() -> None:
    store, asked = RedisStore("redis://127.0.0.1:1"), 0

    async def hang(*_: object) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        raise TimeoutError

    store._client.get = hang
    assert await store.get("a") is None and (store.degraded, asked) == (True, 1)
    store._retry_at = 0.0  # it is time to look whether Redis is back
    await asyncio.gather(*(store.get("a") for _ in range(50)))
    assert asked == 2
    await store.close()
