"""The control code of a fast memory on an emulated one: exact in every mode, format and batch, and never stuck."""

import os
import random
import threading
from pathlib import Path

import pytest
import torch

from engine.experts.arena import Arena
from engine.experts.executor import Tier, TieredExperts
from engine.experts.pool import HostPool
from engine.experts.split import Rates
from engine.kernels.reference import ReferenceOps
from engine.models.load import load_model
from engine.nn.decoder import Decoder
from engine.nn.experts import Bank, expert_banks
from tests.engine.experts.tiers import (
    ALL,
    EVEN,
    EXPERTS,
    LAYERS,
    PLACEMENTS,
    SLOW,
    TOP_K,
    WIDE_KINDS,
    banks,
    kernels,
    step,
    tiered,
)
from tests.support.steps import Driver
from tests.support.tiny import make_tiny

FORMATS = [("reference", "f32"), ("cpu", "bf16"), ("cpu", "f16"), ("cpu", "Q8_0"), ("cpu", "Q4_0"), ("cpu", "Q4_1")]
FORMATS += [pytest.param("cpu", kind, marks=() if kind == "Q4_K" else pytest.mark.slow) for kind in WIDE_KINDS]


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
@pytest.mark.parametrize(("name", "kind"), FORMATS)
def test_every_placement_gives_the_bits_of_the_pool(name: str, kind: str, placement: str, batch: int) -> None:
    ops, (mode, slots) = kernels(name), PLACEMENTS[placement]
    pool, generator = banks(ops, kind), torch.Generator().manual_seed(batch)
    with tiered(pool, ops, slots, mode, rates=SLOW if placement == "offload-late" else EVEN) as experts:
        for turn in range(4):
            for layer in range(LAYERS):
                x, ids, weights = step(generator, batch if turn != 2 else 25, kind)  # a prompt chunk in between
                want = ops.moe(x, ids, weights, pool[layer].gate_up, pool[layer].down, "silu")
                assert torch.equal(experts.run(layer, x, ids, weights), want)
                experts.slots.check()
        counts = experts.slots.counts
        if placement == "resident":
            assert counts.misses <= ALL and counts.evicted == 0
        if mode == "host" or slots == 0:
            assert counts.fetched == 0
        else:
            assert counts.fetched > 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("placement", ["resident", "offload", "offload-small", "hybrid", "host"])
def test_greedy_answers_are_those_of_the_pool(tmp_path_factory, models, name: str, kind: str, placement: str) -> None:
    ops, (mode, slots) = kernels(name), PLACEMENTS[placement]
    model = load_model(models(kind), ops)
    pool = expert_banks(model.spec, model.weights)

    def answers(decoder: Decoder) -> list[list[int]]:
        driver, texts = Driver(decoder, ops.kv_dtype), [[5, 6, 7, 8, 9], [11, 12], [90], [33, 34, 35]]
        best = [driver.chunks(i, text, [3])[-1].argmax().item() for i, text in enumerate(texts)]
        out = [[token] for token in best]
        for _ in range(6):
            logits = driver.step({i: [out[i][-1]] for i in range(len(texts))})
            for i in range(len(texts)):
                out[i].append(logits[i][-1].argmax().item())
        return out

    with tiered(pool, ops, slots if placement != "resident" else len(pool) * 8, mode) as experts:
        assert answers(Decoder(model.spec, model.weights, ops, experts)) == answers(Decoder(model.spec, model.weights, ops))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def get(kind: str):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make_tiny(kind, made[kind], torch.bfloat16)
        return made[kind]

    return get


class Failing(ReferenceOps):
    """Kernels that fail when told to."""

    fail = False

    def expert_rows(self, *arguments, **more):
        if Failing.fail:
            raise RuntimeError("kernel failed")
        return super().expert_rows(*arguments, **more)


@pytest.mark.parametrize("mode", ["offload", "hybrid"])
@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_steps_cancelled_resized_and_evicted_at_random_never_stick(mode: str, steps: int) -> None:
    """Failing kernels end a step half-way (what a cancelled or broken step is to the executor), copies fail, slots change."""
    ops, chance, generator = Failing(), random.Random(1), torch.Generator().manual_seed(1)
    pool = banks(ops, "f32")
    ended = 0
    with tiered(pool, ops, 14, mode) as experts:
        put = experts.arena.put
        experts.arena.put = lambda *piece: 1 / 0 if chance.random() < 0.05 else put(*piece)
        for _ in range(steps):
            layer = chance.randrange(LAYERS)
            x, ids, weights = step(generator, chance.choice([1, 1, 1, 2, 4, 16]))
            want = ops.moe(x, ids, weights, pool[layer].gate_up, pool[layer].down, "silu")
            Failing.fail = chance.random() < 0.15
            try:
                assert torch.equal(experts.run(layer, x, ids, weights), want)
            except RuntimeError:
                ended += 1
            Failing.fail = False
            match chance.randrange(12):
                case 0:
                    experts.resize(chance.randrange(ALL))
                case 1:
                    experts.evict(chance.sample(range(ALL), 6))
                case 2:
                    experts.settle()
            experts.slots.check()
        assert ended > steps // 50 and experts.counts["copy_failed"] > steps // 50
    assert not experts.link.alive


@pytest.mark.parametrize("rates", [SLOW, None])
def test_what_is_there_is_computed_while_the_rest_is_on_its_way(rates: Rates | None) -> None:
    """Each copy waits until what came before it was computed."""
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(3)
    pool, seen, order = banks(ops, "f32"), threading.Semaphore(0), []
    x, _, weights = step(generator, 1)
    with tiered(pool, ops, ALL, rates=rates) as experts:
        experts.run(0, x, torch.tensor([[0, 1, 2]], dtype=torch.int32), weights)
        put, rows = experts.arena.put, ops.expert_rows

        def late(key: int, slot: int, part: int) -> int:
            assert seen.acquire(timeout=10), "nothing was computed meanwhile"
            return put(key, slot, part)

        def noted(x: torch.Tensor, ids: torch.Tensor, *more) -> torch.Tensor:
            order.append(ids.tolist())
            seen.release()
            return rows(x, ids, *more)

        experts.arena.put, ops.expert_rows = late, noted
        ids = torch.tensor([[8, 1, 5]], dtype=torch.int32)
        want = ops.moe(x, ids, weights, pool[0].gate_up, pool[0].down, "silu")
        order.clear(), seen.acquire(blocking=False)  # of `want`
        assert torch.equal(experts.run(0, x, ids, weights), want)
        assert order[0] == [1] and sorted(order[1:]) == [[5], [8]] and experts.counts["copy_failed"] == 0


def test_a_failed_copy_is_computed_from_the_pool_and_counted(caplog) -> None:
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(3)
    pool = banks(ops, "f32")
    with tiered(pool, ops, ALL) as experts:
        experts.arena.put = lambda *piece: 1 / 0
        x, ids, weights = step(generator, 2)
        out = experts.run(0, x, ids, weights)
        assert torch.equal(out, ops.moe(x, ids, weights, pool[0].gate_up, pool[0].down, "silu"))
        assert experts.counts["copy_failed"] == len(ids.unique()) and "expert copy failed" in caplog.text
        assert experts.slots.resident == []


def test_a_resize_that_cannot_be_allocated_changes_nothing(monkeypatch) -> None:
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(3)
    pool = banks(ops, "f32")
    with tiered(pool, ops, 10) as experts:
        x, ids, weights = step(generator, 2)
        want = experts.run(0, x, ids, weights)
        held = experts.slots.resident

        def refuse(self, slots: int, moves=()) -> None:
            raise MemoryError("no")

        for slots in (20, 4):
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(Arena, "resize", refuse)
                experts.resize(slots)
            experts.slots.check()
            assert experts.slots.capacity == 10 and (slots < 10 or experts.slots.resident == held)
            assert torch.equal(experts.run(0, x, ids, weights), want)


def test_what_stays_after_a_resize_is_still_a_hit() -> None:
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(3)
    pool = banks(ops, "f32")
    with tiered(pool, ops, 30) as experts:
        calls = [(layer, *step(generator, 1)) for layer in range(LAYERS)]
        want = [experts.run(*call) for call in calls]
        for slots in (LAYERS * TOP_K, 33, LAYERS * TOP_K):
            experts.resize(slots)
            before = experts.slots.counts.misses
            assert all(torch.equal(experts.run(*call), w) for call, w in zip(calls, want, strict=True))
            assert experts.slots.counts.misses == before, "nothing was lost on the way"


def test_layers_of_different_experts_have_no_common_slots() -> None:
    ops = ReferenceOps()
    one, other = banks(ops, "f32", 1)[0], banks(ops, "f32", 1)[0]
    odd = Bank(other.gate_up[:, :, :32].contiguous(), other.down[:, :32].contiguous(), "silu")
    with pytest.raises(ValueError, match="layer 1 differ"):
        HostPool([one, odd])


def test_hybrid_without_rates_says_what_to_run() -> None:
    ops = ReferenceOps()
    with pytest.raises(ValueError, match="bench bw"):
        TieredExperts(HostPool(banks(ops, "f32")), ops, Tier(4, mode="hybrid"))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_slots_that_go_away_returns_to_the_system_and_comes_back() -> None:
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(0)
    up, down = torch.randn(EXPERTS, 512, 1024, generator=generator), torch.randn(EXPERTS, 1024, 256, generator=generator)
    wide = Bank(up, down, "silu")
    with tiered([wide, wide], ops, 2 * EXPERTS) as experts:  # 3 MiB an expert
        x = torch.randn(4, 1024, generator=generator)
        _, ids, weights = step(generator, 4)
        want = experts.run(0, x, ids, weights)
        full = resident_bytes()
        experts.resize(4)
        assert full - resident_bytes() > 15 * 3 << 20, "twenty slots gave their memory back"
        assert torch.equal(experts.run(0, x, ids, weights), want)
        experts.resize(2 * EXPERTS)
        assert torch.equal(experts.run(0, x, ids, weights), want) and experts.slots.counts.evicted > 0
