"""Slots in the memory of a device, on one that is made up: late, in any order its marks allow, and on the watch for races."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.experts.arena import DeviceArena
from engine.experts.budget import Mode
from engine.experts.call import Unreadable
from engine.experts.executor import Tier, TieredExperts
from engine.experts.filepool import Pack
from engine.experts.layers import Group
from engine.experts.locking import lock_banks
from engine.experts.pack import write_pack
from engine.experts.pool import HostPool, Pool
from engine.kernels.ops import Ops
from engine.kernels.reference import ReferenceOps
from engine.nn.experts import Bank
from engine.tiers import Kernels, Source, Ways, run_groups
from tests.engine.experts.tiers import ALL, EVEN, EXPERTS, LAYERS, PLACEMENTS, SLOW, banks, kernels, step
from tests.support.late import Late, LateOps

ON_DEVICE = PLACEMENTS | {"offload-tiny": ("offload", 1)}


@contextlib.contextmanager
def on_device(
    pool: Pool, ops: Ops, late: Late, slots: int, mode: str = "offload", host: Ops | None = None, **more
) -> Iterator[TieredExperts]:
    """Experts of `pool` with slots on `late`, whose kernels have the bits of `ops`; checked for races when it ends."""
    host = host or (ops if mode != "offload" else None)
    experts = TieredExperts(pool, LateOps(ops, late), Tier(slots, mode, **{"rates": EVEN, **more}), device=late, host=host)
    try:
        yield experts
    finally:
        experts.close()
    late.check()
    assert not experts.link.alive


def locked(pool: list[Bank], late: Late) -> HostPool:
    lock_banks(pool, 1 << 40, ("made up", late.register))
    return HostPool(pool)


def run(experts: TieredExperts, late: Late, layer: int, x, ids, weights) -> torch.Tensor:
    return late.to_host(experts.run(layer, *late.to_device(x, ids, weights)))[0]


def truth(ops: Ops, bank: Bank, x, ids, weights) -> torch.Tensor:
    return ops.moe(x, ids, weights, bank.gate_up, bank.down, "silu")


FORMATS = [("reference", "f32"), ("cpu", "bf16"), ("cpu", "Q4_K")]


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", sorted(ON_DEVICE))
@pytest.mark.parametrize(("name", "kind"), FORMATS)
def test_every_placement_gives_the_bits_of_the_pool_and_no_race(name: str, kind: str, placement: str, batch: int) -> None:
    ops, (mode, slots), late = kernels(name), ON_DEVICE[placement], Late(batch)
    pool, generator = banks(ops, kind), torch.Generator().manual_seed(batch)
    with on_device(locked(pool, late), ops, late, slots, mode, rates=SLOW if placement == "offload-late" else EVEN) as experts:
        for turn in range(3):
            for layer in range(LAYERS):
                call = step(generator, batch if turn != 1 else 25, kind)  # a prompt chunk in between
                assert torch.equal(run(experts, late, layer, *call), truth(ops, pool[layer], *call))
                experts.slots.check()
        assert experts.on_device and experts.counts["copy_failed"] == 0
        assert (experts.slots.counts.fetched > 0) == (mode != "host" and slots > 0)


def packed(tmp_path: Path, ops: Ops, kind: str) -> tuple[list[Bank], Pack]:
    pool = banks(ops, kind)
    write_pack(tmp_path / "pack", "test", LAYERS, lambda n: pool[n], lambda done, total: None)
    return pool, Pack(tmp_path / "pack")


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "kind"), FORMATS)
def test_experts_of_a_pack_come_through_page_locked_memory(tmp_path, name: str, kind: str, batch: int) -> None:
    ops, late = kernels(name), Late(batch)
    (pool, pack), generator = packed(tmp_path, ops, kind), torch.Generator().manual_seed(batch)
    with on_device(pack.pools[0], ops, late, EXPERTS, workers=4) as experts:
        for _ in range(2):
            for layer in range(LAYERS):
                call = step(generator, batch, kind)
                assert torch.equal(run(experts, late, layer, *call), truth(ops, pool[layer], *call))
        assert experts.placed == "stream" and experts.counts["copy_failed"] == 0
    pack.close()


def test_a_damaged_record_is_found_on_the_device_and_never_computed_with(tmp_path) -> None:
    ops, late = ReferenceOps(), Late()
    _, pack = packed(tmp_path, ops, "f32")
    with open(pack.path, "r+b") as file:
        file.seek(pack.offsets[0] + 100)
        file.write(b"\1\2\3")
    x, _, weights = step(torch.Generator().manual_seed(0), 1)
    with on_device(pack.pools[0], ops, late, EXPERTS, workers=4) as experts:
        with pytest.raises(Unreadable, match="could not be read"):
            run(experts, late, 0, x, torch.tensor([[0, 1, 2]], dtype=torch.int32), weights)
        assert experts.slots.where[0] == -1
    pack.close()


def test_groups_of_layers_run_on_a_device_and_only_one_arithmetic_computes(tmp_path) -> None:
    """Resident, fetched and streamed layers; the processor computes none where its kernels have other bits."""
    ops, late = ReferenceOps(), Late()
    (pool, pack), generator = packed(tmp_path, ops, "f32"), torch.Generator().manual_seed(0)
    lock_banks(pool, 1 << 40, ("made up", late.register))
    other, calls = ReferenceOps(), [(layer, *step(generator, 4)) for layer in range(LAYERS)]
    other.numerics = "other bits"
    modes: list[tuple[Mode, int]] = [("resident", EXPERTS), ("offload", 6), ("stream", EXPERTS)]
    groups = [Group(mode, (layer,), slots, "") for layer, (mode, slots) in enumerate(modes)]
    source = Source({0: pool[0], 1: pool[1]}, pack)
    experts = run_groups(groups, source, Kernels(LateOps(ops, late), late, other), Ways(EVEN))
    for call in calls:
        assert torch.equal(run(experts, late, *call), truth(ops, pool[call[0]], *call[1:]))
    assert experts.on_device and all(part.host is None for part in experts.parts)
    experts.close(), late.check(), pack.close()
    with pytest.raises(ValueError, match="computes in host memory"):
        run_groups([Group("hybrid", (0, 1), 4, "")], source, Kernels(LateOps(ops, late), late, other), Ways(EVEN))
    same = run_groups([Group("hybrid", (0, 1), 4, "")], source, Kernels(LateOps(ops, late), late, ops), Ways(EVEN))
    assert torch.equal(run(same, late, *calls[0]), truth(ops, pool[0], *calls[0][1:]))
    same.close(), late.check()


# --- what fails


def test_a_copy_that_fails_is_made_again_where_nothing_is_computed_in_host_memory(caplog) -> None:
    ops, chance = ReferenceOps(), random.Random(0)
    late, pool, generator = Late(fails=lambda: chance.random() < 0.2), banks(ops, "f32"), torch.Generator().manual_seed(3)
    ended, same = 0, 0
    with on_device(locked(pool, late), ops, late, EXPERTS) as experts:
        for turn in range(60):
            call = step(generator, 2)
            try:
                assert torch.equal(run(experts, late, turn % LAYERS, *call), truth(ops, pool[turn % LAYERS], *call))
                same += 1
            except Unreadable as problem:
                assert "could not be copied to the device" in str(problem)
                ended += 1
        assert ended and same > 2 * ended and experts.counts["copy_failed"] > ended
    assert "the made-up link is broken" in caplog.text


def test_a_copy_that_fails_is_computed_in_host_memory_where_kernels_for_it_are() -> None:
    ops, late, generator = ReferenceOps(), Late(fails=lambda: True), torch.Generator().manual_seed(3)
    pool = banks(ops, "f32")
    with on_device(locked(pool, late), ops, late, ALL, "hybrid") as experts:
        call = step(generator, 2)
        assert torch.equal(run(experts, late, 0, *call), truth(ops, pool[0], *call))
        assert experts.counts["copy_failed"] and not experts.slots.resident


@pytest.mark.parametrize(("mode", "slots"), [("hybrid", 4), ("host", 4), ("offload", 0)])
def test_nothing_is_computed_in_host_memory_without_kernels_of_the_devices_arithmetic(mode: str, slots: int) -> None:
    ops, late = ReferenceOps(), Late()
    with pytest.raises(ValueError, match="computes in host memory"):
        TieredExperts(locked(banks(ops, "f32"), late), LateOps(ops, late), Tier(slots, mode, EVEN), device=late)


# --- memory of the device


def test_what_stays_after_a_resize_is_still_a_hit() -> None:
    ops, late, generator = ReferenceOps(), Late(), torch.Generator().manual_seed(3)
    pool = banks(ops, "f32")
    with on_device(locked(pool, late), ops, late, 30) as experts:
        calls = [(layer, *step(generator, 1)) for layer in range(LAYERS)]
        want = [run(experts, late, *call) for call in calls]
        for slots in (3 * LAYERS, 33, 3 * LAYERS):
            experts.resize(slots)
            before = experts.slots.counts.misses
            assert all(torch.equal(run(experts, late, *call), w) for call, w in zip(calls, want, strict=True))
            assert experts.slots.counts.misses == before and not experts.counts["emptied"]


def test_slots_made_during_a_step_can_be_filled_by_the_links_threads() -> None:
    """torch lets nobody write to tensors of its inference mode from outside of it."""
    ops, late, generator = ReferenceOps(), Late(), torch.Generator().manual_seed(3)
    pool = banks(ops, "f32")
    with on_device(locked(pool, late), ops, late, 10) as experts, torch.inference_mode():
        experts.resize(20)
        call = step(generator, 2)
        assert torch.equal(run(experts, late, 0, *call), truth(ops, pool[0], *call))
        assert experts.counts["copy_failed"] == 0


@pytest.mark.parametrize("slots", [20, 4])
def test_where_old_and_new_slots_do_not_fit_at_once_what_lay_there_is_lost_and_comes_again(monkeypatch, slots: int) -> None:
    ops, late, generator = ReferenceOps(), Late(), torch.Generator().manual_seed(3)
    pool, lay = banks(ops, "f32"), DeviceArena._lay
    with on_device(locked(pool, late), ops, late, 10) as experts:
        call = step(generator, 1)
        want = run(experts, late, 0, *call)

        def beside(self, slots: int) -> None:
            if hasattr(self, "bank"):
                raise MemoryError("both at once")
            lay(self, slots)

        monkeypatch.setattr(DeviceArena, "_lay", beside)
        experts.resize(slots)
        experts.slots.check()
        assert experts.slots.capacity == slots and not experts.slots.resident and experts.counts["emptied"] == 1
        assert torch.equal(run(experts, late, 0, *call), want)


def test_a_resize_that_the_device_has_no_room_for_leaves_the_slots_there_were() -> None:
    ops, late, generator = ReferenceOps(), Late(), torch.Generator().manual_seed(3)
    pool = banks(ops, "f32")
    with on_device(locked(pool, late), ops, late, 10) as experts:
        call = step(generator, 1)
        want = run(experts, late, 0, *call)
        late.room = pool[0].gate_up[0].nbytes * 10
        with pytest.raises(MemoryError):
            experts.resize(20)
        experts.slots.check()
        assert experts.slots.capacity == 10 and torch.equal(run(experts, late, 0, *call), want)


# --- random events


class Failing(ReferenceOps):
    """Kernels of the processor that fail when told to: what a cancelled step is to the executor."""

    fail = False

    def expert_rows(self, *arguments, **more):
        if Failing.fail:
            raise RuntimeError("kernel failed")
        return super().expert_rows(*arguments, **more)


@pytest.mark.parametrize(("mode", "seed"), [("offload", 1), ("hybrid", 2)])
@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_cancels_resizes_and_evictions_on_a_device_never_stick_or_race(mode: str, seed: int, steps: int) -> None:
    ops, chance, generator = ReferenceOps(), random.Random(seed), torch.Generator().manual_seed(seed)
    late, pool, ended, same = Late(seed, fails=lambda: chance.random() < 0.05), banks(ops, "f32"), 0, 0
    host = Failing() if mode == "hybrid" else None
    with on_device(locked(pool, late), ops, late, 14, mode, host) as experts:
        broken = LaunchFailing(experts.ops)
        experts.ops = broken
        for _ in range(steps):
            layer, call = chance.randrange(LAYERS), step(generator, chance.choice([1, 1, 1, 2, 4, 16]))
            Failing.fail, broken.fail = mode == "hybrid" and chance.random() < 0.1, chance.random() < 0.1
            try:
                out = run(experts, late, layer, *call)
            except (RuntimeError, Unreadable):
                ended += 1
            else:
                assert torch.equal(out, truth(ops, pool[layer], *call))
                same += 1
            Failing.fail = broken.fail = False
            match chance.randrange(12):
                case 0:
                    experts.resize(chance.randrange(1, ALL))
                case 1:
                    experts.evict(chance.sample(range(ALL), 6))
                case 2:
                    experts.settle()
            experts.slots.check()
        counts = experts.counts
        assert ended > steps // 50 and same > steps // 2 and min(counts["copy_failed"], counts["resized"]) > steps // 50


class LaunchFailing:
    """Kernels of the device that cannot be begun when told so."""

    fail = False

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Callable:
        def call(*arguments):
            if self.fail and name != "linear":
                raise RuntimeError("kernel failed")
            return getattr(self._inner, name)(*arguments)

        return call


# --- wrong synchronisation is found


def careless(monkeypatch, what: str) -> None:
    """Leave out one thing that keeps order."""
    if what == "slots are overwritten while kernels read them":
        monkeypatch.setattr(DeviceArena, "reading", lambda self, slots: None)
    elif what == "experts count as there before their copies are":
        put = DeviceArena.put

        def at_once(self, key: int, slot: int, part: int) -> int:
            copy = self._device.copy
            with monkeypatch.context() as patch:
                patch.setattr(self._device, "copy", lambda *a: _Unwaited(copy(*a)))
                return put(self, key, slot, part)

        monkeypatch.setattr(DeviceArena, "put", at_once)


class _Unwaited:
    def __init__(self, mark) -> None:
        self._mark = mark

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(
    "what", ["slots are overwritten while kernels read them", "experts count as there before their copies are"]
)
def test_wrong_order_is_found(monkeypatch, what: str) -> None:
    ops, late, generator = ReferenceOps(), Late(), torch.Generator().manual_seed(0)
    pool = banks(ops, "f32")
    careless(monkeypatch, what)
    with pytest.raises(AssertionError, match="touch the same bytes"), on_device(locked(pool, late), ops, late, 5) as experts:
        for _ in range(4):
            for layer in range(LAYERS):
                run(experts, late, layer, *step(generator, 8))


def test_a_copy_from_memory_that_is_not_page_locked_is_found() -> None:
    ops, late, generator = ReferenceOps(), Late(), torch.Generator().manual_seed(0)
    with (
        pytest.raises(AssertionError, match="not page-locked"),
        on_device(HostPool(banks(ops, "f32")), ops, late, 5) as experts,
    ):
        run(experts, late, 0, *step(generator, 1))


def test_host_memory_that_changes_under_a_copy_is_found() -> None:
    late = Late()
    source, to = late.pinned(64), late.empty((64,), torch.uint8)
    late.copy([(to, source)])
    source.fill_(1)
    with pytest.raises(AssertionError, match="host memory changed"):
        late.check()


def test_the_processor_cannot_look_at_what_the_device_has_not_written() -> None:
    late = Late()
    (far,) = late.to_device(torch.ones(3))
    with pytest.raises(RuntimeError, match="looks at what a kernel has not written"):
        far[0].item()
    with pytest.raises(RuntimeError, match="same device"):
        far + torch.ones(3)
    assert torch.isnan(far.plain).all() and torch.equal(late.to_host(far + 1)[0], torch.full((3,), 2.0))


# --- the device's own kernels
