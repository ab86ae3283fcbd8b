"""Bytes that move between expert slots, KV pages, states and places while requests run: a whole engine on a tiny hybrid model."""

import os
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine.build import Parts, build
from engine.cache_control import MOVES, BadCommand, rebuild
from engine.cli import cli
from engine.config import EngineConfig
from engine.elastic import Elastic
from engine.experts.arena import Arena
from engine.experts.executor import TieredExperts
from engine.experts.pool import Room, data_of, read_whole
from engine.experts.pressure import CALM_S, SHORT_LEAST, Memory
from engine.experts.slots import Slots
from engine.hostmem import available_bytes
from engine.memory import MAX_PAGES, MIN_CONTEXT, pages_of
from engine.nn.batch import PAGE
from engine.nn.experts import Bank
from engine.prefix.pages import PagePool
from engine.prefix.ram import RamTier
from engine.prefix.states import TensorStorage
from engine.scheduler import Scheduler
from engine.stores import stores_of
from tests.engine.serve.harness import Engine, generate
from tests.support.tiny import make_tiny

PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 160)), [11, 12], [90]]
NEW = 20
PLENTY = Memory(64 << 30, 0.0)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Path, Path]:
    model, pack = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("pack") / "experts"
    make_tiny("qwen3_5_moe_text", model, torch.float32, max_position_embeddings=2048)
    done = CliRunner().invoke(cli, ["pack", str(model), str(pack), "--kernels", "reference"])
    assert done.exit_code == 0, done.output
    return model, pack


class World:
    """An engine, its memory, a machine whose memory tests set, and the sizes it began with."""

    def __init__(self, packed: tuple[Path, Path], **more: object) -> None:
        sizes = {"max_running": 4, "expert_bytes": 1 << 18, "kv_bytes": 1 << 23, **more}
        config = EngineConfig(model=str(packed[0]), kernels="reference", threads=1, experts_pack=str(packed[1]), **sizes)
        self.parts: Parts = build(config, lambda fraction, stage: None)
        self.engine, self.memory = Engine(self.parts), PLENTY
        self.stores = stores_of(self.parts, self.engine.scheduler)
        self.elastic = Elastic(self.stores, 1 << 30, lambda: self.memory)
        self.now = 0.0

    def have(self) -> dict[str, int]:
        return {store.field: store.have for store in self.stores}

    def bytes(self) -> dict[str, int]:
        return {store.field: store.have * max(1, store.each if store.field != "max_running" else 1) for store in self.stores}

    def rebuild(self, **sizes: int) -> dict:
        return rebuild(self.parts.prefix, sizes, self.elastic)

    def look(self, memory: Memory, seconds: float = 3.0) -> None:
        self.memory, self.now = memory, self.now + seconds
        self.elastic.tick(self.now)

    def start(self, name: str = "r") -> None:
        self.engine.submit(*(generate(f"{name}{i}", prompt, NEW) for i, prompt in enumerate(PROMPTS)))

    def answers(self, name: str = "r") -> list[list[int]]:
        self.engine.drain()
        return [self.engine.tokens(f"{name}{i}") for i in range(len(PROMPTS))]


@pytest.fixture
def world(packed):
    made = World(packed)
    yield made
    made.parts.experts.slots.close()


@pytest.fixture(scope="module")
def undisturbed(packed) -> list[list[int]]:
    made = World(packed)
    made.start()
    out = made.answers()
    made.parts.experts.slots.close()
    assert all(len(tokens) == NEW for tokens in out)
    return out


SIZES = {"expert_bytes": (1 << 17, 1 << 18), "kv_bytes": (1 << 21, 1 << 23), "state_bytes": (1 << 17, 1 << 20)}


def test_every_store_moves_between_steps_while_answers_stay(world, undisturbed) -> None:
    world.start()
    chance = random.Random(0)
    seen = {field: set() for field in MOVES}
    for _ in range(40):
        world.engine.step()
        sizes = {field: chance.randrange(*span) for field, span in SIZES.items() if chance.random() < 0.7}
        world.rebuild(**sizes, max_running=chance.randint(1, 4))
        for field, count in world.have().items():
            seen[field].add(count)
    assert world.answers() == undisturbed
    assert all(len(counts) > 2 for counts in seen.values()), seen


def test_who_runs_gives_way_to_a_small_cache_and_is_answered_later(world, undisturbed) -> None:
    world.start()
    for _ in range(6):
        world.engine.step()
    assert len(world.engine.scheduler.running) == 4
    each = {store.field: store.each for store in world.stores}
    least = pages_of(MIN_CONTEXT)
    world.rebuild(kv_bytes=least * each["kv_bytes"], max_running=1)
    assert world.have()["kv_bytes"] == least and len(world.engine.scheduler.running) <= 1
    assert world.answers() == undisturbed
    assert world.engine.scheduler.counters["preempted"] >= 3


def test_a_cache_smaller_than_a_live_request_is_refused(world) -> None:
    world.engine.submit(generate("long", list(range(2, 90)), 1500))
    world.engine.step()
    before, each = world.have(), {store.field: store.each for store in world.stores}
    with pytest.raises(BadCommand, match="kv_bytes: a request of 1588 tokens needs 26"):
        world.rebuild(kv_bytes=20 * each["kv_bytes"], expert_bytes=1 << 17)
    assert world.have() == before
    world.engine.scheduler.cancel("long", "done")
    world.rebuild(kv_bytes=20 * each["kv_bytes"])


def test_the_longest_context_follows_the_pages(world) -> None:
    limits = lambda: world.engine.scheduler.limits  # noqa: E731
    each = {store.field: store.each for store in world.stores}["kv_bytes"]
    assert limits().max_context == 2048
    world.rebuild(kv_bytes=17 * each)
    assert limits().max_context == 16 * PAGE
    world.engine.run(generate("long", [1] * 1100, 4))
    assert world.engine.end("long").code == "context_length_exceeded"
    world.rebuild(kv_bytes=200 * each)
    assert limits().max_context == 2048


def test_more_is_refused_by_what_is_promised_not_by_what_is_written(world) -> None:
    """Pages nobody wrote take no memory yet; what they were promised is not there for others."""
    kv = world.bytes()["kv_bytes"]
    world.memory = Memory(kv, 0.0)
    before = world.have()
    with pytest.raises(BadCommand, match="are available: ask for less"):
        world.rebuild(kv_bytes=2 * kv)
    assert world.have() == before


def test_pages_can_grow_into_all_that_experts_give_back(packed) -> None:
    """Room to grow is that of the whole machine, not of what was left when the cache was planned."""
    world = World(packed, kv_bytes=1 << 22)
    page, free = world.stores[1], available_bytes()
    assert page.most == MAX_PAGES or page.most * page.each > 0.9 * free
    world.parts.experts.slots.close()


# --- failures


def once(monkeypatch, owner: type, name: str, after: bool) -> list[str]:
    """The first call fails, before it did anything or after; later ones work."""
    real, calls = getattr(owner, name), []

    def broken(self, *args, **more):
        calls.append(name)
        if len(calls) > 1:
            return real(self, *args, **more)
        if after:
            real(self, *args, **more)
        raise MemoryError("injected")

    monkeypatch.setattr(owner, name, broken)
    return calls


STEPS = [
    (Arena, "resize"),
    (Room, "resize"),
    (Slots, "resize"),
    (TieredExperts, "settle"),
    (PagePool, "resize"),
    (TensorStorage, "give_back"),
    (TensorStorage, "give_back_slots"),
    (RamTier, "resize_states"),
    (Scheduler, "resized"),
    (Scheduler, "give_way"),
]
UP = {"expert_bytes": 3 << 17, "kv_bytes": 1 << 24, "state_bytes": 1 << 21, "max_running": 4}
DOWN = {"expert_bytes": 1 << 17, "kv_bytes": 1 << 21, "state_bytes": 1 << 14, "max_running": 2}
MIXED = {"expert_bytes": 3 << 17, "kv_bytes": 1 << 21, "state_bytes": 1 << 21, "max_running": 2}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[f"{owner.__name__}.{name}" for owner, name in STEPS])
def test_a_failure_at_any_step_undoes_the_whole(world, undisturbed, monkeypatch, owner: type, name: str, after: bool) -> None:
    world.start()
    for _ in range(8):
        world.engine.step()
    failed = 0
    for sizes in (DOWN, MIXED, UP):
        before, limits = world.have(), world.engine.scheduler.limits
        with monkeypatch.context() as patch:
            calls = once(patch, owner, name, after)
            try:
                world.rebuild(**sizes)
            except BadCommand as problem:
                failed += 1
                assert "injected" in str(problem) and "nothing was changed" in str(problem)
                assert world.have() == before and world.engine.scheduler.limits == limits
            else:
                assert not calls, "a failure went by unnoticed"
        world.parts.experts.slots.slots.check()
        world.engine.step()
    assert failed, f"{name} plays no part in these moves"
    world.rebuild(**DOWN)
    assert world.answers() == undisturbed


def tensors(bank: Bank) -> tuple[torch.Tensor, ...]:
    return data_of(bank.gate_up), data_of(bank.down)


@pytest.mark.parametrize(("owner", "name"), STEPS[:3], ids=[f"{owner.__name__}.{name}" for owner, name in STEPS[:3]])
def test_experts_fetched_after_a_failure_survive_the_next(world, monkeypatch, owner: type, name: str) -> None:
    """A slot that was given back and filled again holds an expert: taking more memory must not touch it."""
    tiered, least = world.parts.experts.slots, world.stores[0].each * world.stores[0].least
    truth = Room(tiered.pool.like, 1).bank
    for size in (least, 4 * least, least, 4 * least):
        with monkeypatch.context() as patch:
            once(patch, owner, name, after=True)
            with pytest.raises(BadCommand, match="nothing was changed"):
                world.rebuild(expert_bytes=size)
        for key in tiered.slots.resident:
            read_whole(tiered.pool, key, truth, 0)
            for held, want in zip(tensors(tiered.arena.bank), tensors(truth), strict=True):
                assert torch.equal(held[tiered.slots.where[key]], want[0]), f"expert {key} is not what the pool holds"
        for key in tiered.fetch(key for key in range(tiered.most) if key not in tiered.slots.resident):
            assert tiered.receive(key)


def test_what_cannot_be_undone_is_said(world, monkeypatch) -> None:
    def refuse(self, count: int) -> None:
        raise MemoryError("gone")

    expert, page = world.stores[0], world.stores[1]
    real = type(page).resize
    monkeypatch.setattr(type(expert), "resize", refuse)
    monkeypatch.setattr(type(page), "resize", lambda self, count: real(self, count) if count < self.have else refuse(self, count))
    with pytest.raises(BadCommand, match=r"expert_bytes: gone; kv_bytes stays at 2\.0 MiB"):
        world.rebuild(expert_bytes=3 << 17, kv_bytes=1 << 21)


# --- by itself


def test_pressure_shrinks_all_that_can_go_and_calm_brings_it_back(world, undisturbed, caplog) -> None:
    caplog.set_level("INFO")
    first = world.have()
    world.start()
    for _ in range(10):
        world.engine.step()
        world.look(Memory(SHORT_LEAST // 2, 0.0))
    low = world.have()
    assert low["expert_bytes"] == world.stores[0].least and low["kv_bytes"] < first["kv_bytes"]
    assert low["state_bytes"] == 0 and low["max_running"] == first["max_running"]
    assert low["kv_bytes"] == pages_of(2048), "what clients may ask for stays"
    assert world.engine.scheduler.limits.max_context == 2048
    assert world.engine.scheduler.counters["preempted"] == 0, "nobody is interrupted for it"
    assert world.answers() == undisturbed
    for _ in range(30):
        world.look(PLENTY, CALM_S)
    assert world.have() == first
    assert caplog.text.count("memory is short") and caplog.text.count("memory is free again")
    world.start("again")
    assert world.answers("again") == undisturbed


def test_at_its_least_an_engine_returns_what_it_kept_for_later(world, undisturbed, caplog) -> None:
    caplog.set_level("INFO")
    world.start()
    assert world.answers() == undisturbed
    pool = world.parts.prefix.pool
    assert pool.touched > 0 and pool.free < pool.total
    for _ in range(12):
        world.look(Memory(0, 0.0))
    assert pool.touched == 0 and pool.free == pool.total
    assert "memory returned" in caplog.text
    world.start("again")
    assert world.answers("again") == undisturbed


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pages_take_memory_when_written_and_return_it(packed) -> None:
    before = resident_bytes()
    world = World(packed, kv_bytes=1 << 28, max_context=2048)
    assert resident_bytes() - before < 1 << 27, "a cache nobody wrote takes no memory"
    storage, pool = world.parts.prefix.storage, world.parts.prefix.pool
    pages = pool.take(pool.total // 2)
    for tensor in storage._pages:
        tensor[pages] = 1.0
    full = resident_bytes()
    pool.drop(pages)
    world.rebuild(kv_bytes=pages_of(MIN_CONTEXT) * storage.page_bytes)
    assert full - resident_bytes() > 0.8 * len(pages) * storage.page_bytes
    world.parts.experts.slots.close()


@pytest.mark.parametrize("events", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_cancels_moves_and_shortages_never_stick(world, undisturbed, events: int) -> None:
    """Requests come, go and are cancelled, memory moves by command and by itself: all end, and nobody reads another answer."""
    chance, engine, sent = random.Random(2), world.engine, []
    for _ in range(events):
        match chance.randrange(6):
            case 0 | 1:
                which = chance.randrange(len(PROMPTS))
                sent.append(which)
                engine.submit(generate(f"r{len(sent) - 1}", PROMPTS[which], NEW))
            case 2:
                if live := engine.scheduler.requests():
                    engine.scheduler.cancel(chance.choice(live)["id"], "client gone")
            case 3:
                world.memory = PLENTY
                sizes = {field: chance.randrange(*span) for field, span in SIZES.items() if chance.random() < 0.5}
                world.rebuild(**sizes, max_running=chance.randint(1, 4))
            case 4:
                world.look(Memory(chance.choice([0, SHORT_LEAST, 1 << 30, 64 << 30]), chance.choice([0.0, 0.0, 20.0])), 20.0)
            case 5:
                world.parts.experts.slots.evict(chance.sample(range(world.parts.experts.slots.most), 8))
        for _ in range(chance.randrange(3)):
            engine.step()
    engine.drain()
    ends = Counter(engine.end(f"r{number}").reason for number in range(len(sent)))
    assert set(ends) == {"length", "cancelled"} and ends["length"] > events // 20, ends
    for number, which in enumerate(sent):
        tokens = engine.tokens(f"r{number}")
        assert tokens == undisturbed[which][: len(tokens)]
    assert not engine.scheduler.running and world.parts.prefix.slots.free == world.parts.prefix.slots.total
