"""When memory is given back and taken again, and expert slots that follow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.elastic import CannotResize, Elastic
from engine.experts.devices import memory_info
from engine.experts.executor import Tier, TieredExperts
from engine.experts.pool import HostPool, Room
from engine.experts.pressure import CALM_S, PAUSE_S, PLENTY, SHORT_LEAST, STALLED, Governor, Memory, read_memory
from engine.kernels.reference import ReferenceOps
from engine.promises import Promise, promised
from engine.stores import ExpertStore
from tests.engine.experts.tiers import EXPERTS, LAYERS, banks, step

MB = 1 << 20
TOTAL = 16 << 30
SHORT = int(TOTAL * 0.04)
WANTED, FLOOR = 3200 * MB, 128 * MB


def target(g: Governor, now: float, have: int, memory: Memory, floor: int = FLOOR, wanted: int = WANTED) -> int:
    return g.target(now, have, floor, wanted, memory)


def test_shortage_gives_back_what_is_missing_and_more() -> None:
    g = Governor(TOTAL)
    low = target(g, 0.0, WANTED, Memory(SHORT - 100 * MB, 0.0))
    assert WANTED - low >= SHORT + 100 * MB, "ends at twice the threshold"
    assert target(g, PAUSE_S / 2, low, Memory(0, 0.0)) == low, "the figures need a moment"
    assert target(g, PAUSE_S, low, Memory(0, 0.0)) < low


def test_mapped_weights_are_not_there_for_others(tmp_path) -> None:
    """The system counts a file's pages as available although every step reads them."""
    promise = Promise(tmp_path)
    before = read_memory(available=lambda mapped=0: (10 << 30) - mapped)
    assert before.available - read_memory(available=lambda mapped=0: (10 << 30) - mapped, mapped=4 << 30).available == 4 << 30
    Elastic([], TOTAL, lambda: before, promise, mapped=4 << 30)
    assert promised(tmp_path) == 4 << 30
    promise.close()


def test_a_thrashing_machine_is_short_whatever_it_says_is_available() -> None:
    assert target(Governor(TOTAL), 0.0, WANTED, Memory(10 << 30, STALLED)) == WANTED * 7 // 8


def test_growth_waits_for_calm_and_for_plenty() -> None:
    g = Governor(TOTAL)
    low = target(g, 0.0, WANTED, Memory(SHORT - 1, 0.0))
    plenty = Memory(int(PLENTY * SHORT) + WANTED // 8, 0.0)
    assert CALM_S >= 60, "docs/experts.md promises a minute"
    assert target(g, CALM_S - 1, low, plenty) == low
    assert target(g, CALM_S, low, plenty) == low + WANTED // 8
    assert target(g, CALM_S, low, Memory(plenty.available - 1, 0.0)) == low


def test_a_small_container_is_short_at_an_absolute_amount() -> None:
    small = Governor(2 << 30)
    assert target(small, 0.0, 100 * MB, Memory(SHORT_LEAST, 0.0), 1, 100 * MB) == 100 * MB
    assert target(small, 0.0, 100 * MB, Memory(SHORT_LEAST - 1, 0.0), 1, 100 * MB) < 100 * MB


@given(levels=st.lists(st.tuples(st.integers(0, 4 * SHORT), st.floats(0, 30)), max_size=60), floor=st.integers(1, 50))
def test_memory_stays_between_the_floor_and_what_was_wanted(levels: list[tuple[int, float]], floor: int) -> None:
    g, have = Governor(TOTAL), 200 * MB
    for second, (available, stalled) in enumerate(levels):
        have = target(g, second * 7.0, have, Memory(available, stalled), floor * MB, 200 * MB)
        assert floor * MB <= have <= 200 * MB


@given(used_by_others=st.integers(0, TOTAL))
def test_it_comes_to_rest_and_does_not_swing(used_by_others: int) -> None:
    """What moves is part of the memory: whatever others take, it ends at one size."""
    wanted, seen = 8 << 30, []
    g, have = Governor(TOTAL), wanted
    for second in range(900):
        available = max(0, TOTAL - used_by_others - have)
        have = target(g, float(second), have, Memory(available, 0.0), FLOOR, wanted)
        seen.append(have)
    assert len(set(seen[-300:])) == 1
    directions = [b > a for a, b in zip(seen, seen[1:], strict=False) if a != b]
    assert sum(a != b for a, b in zip(directions, directions[1:], strict=False)) <= 1, "down and up again at most once"


def test_memory_pressure_is_read_from_the_kernels_file(tmp_path) -> None:
    file = tmp_path / "memory"
    file.write_text("some avg10=9.00 avg60=1.00 avg300=0.00 total=5\nfull avg10=3.25 avg60=0.00 avg300=0.00 total=2\n")
    assert read_memory(file, lambda: 77) == Memory(77, 3.25)
    for text in ("", "full", "full avg10=x"):
        file.write_text(text)
        assert read_memory(file, lambda: 77).stalled == 0.0
    assert read_memory(tmp_path / "none", lambda: None).available > TOTAL


# --- over a running executor


class World:
    """An executor with its slots, a memory that tests can fill, and proof that answers do not change."""

    def __init__(self, slots: int = 2 * EXPERTS) -> None:
        self.ops, self.generator = ReferenceOps(), torch.Generator().manual_seed(0)
        self.pool = banks(self.ops, "f32")
        self.executor = TieredExperts(HostPool(self.pool), self.ops, Tier(slots))
        self.memory = Memory(8 << 30, 0.0)
        self.elastic = Elastic([ExpertStore(self.executor)], 1 << 30, lambda: self.memory)

    def set(self, size: int) -> None:
        self.elastic.set({"expert_bytes": size})

    def check(self) -> None:
        for layer in range(LAYERS):
            x, ids, weights = step(self.generator, 2)
            want = self.ops.moe(x, ids, weights, self.pool[layer].gate_up, self.pool[layer].down, "silu")
            assert torch.equal(self.executor.run(layer, x, ids, weights), want)
            self.executor.slots.check()


@pytest.fixture
def world():
    made = World()
    yield made
    made.executor.close()


def test_slots_follow_memory_down_and_up_while_answers_stay(world, caplog) -> None:
    caplog.set_level("INFO")
    world.check()
    world.memory = Memory(SHORT_LEAST - 10 * MB, 0.0)
    for second in range(20):
        world.elastic.tick(float(second))
        world.check()
    assert world.executor.slots.capacity == EXPERTS, "down to one layer, not further"
    assert "memory moved" in caplog.text and "memory is short" in caplog.text
    world.memory = Memory(8 << 30, 0.0)
    for second in range(20, 200):
        world.elastic.tick(float(second))
    world.check()
    assert world.executor.slots.capacity == 2 * EXPERTS and "memory is free again" in caplog.text


SLOT = 32 * MB  # what slots are said to take: as large as those of large models


class Device:
    """A device whose memory slots and other programs share; tells as torch.cuda.mem_get_info does."""

    def __init__(self, executor: TieredExperts, total: int) -> None:
        self.executor, self.total, self.others, self.broken = executor, total, 0, False

    def mem_get_info(self) -> tuple[int, int]:
        if self.broken:
            raise RuntimeError("CUDA error: unknown error")
        return max(0, self.total - self.executor.capacity * SLOT - self.others), self.total


def test_slots_on_a_device_follow_its_free_memory_with_hysteresis(world) -> None:
    """36 slots of 32 MiB wanted, on 8 GiB: short below 328 MiB, plenty from 983."""
    world.executor.resize(LAYERS * EXPERTS)
    device = Device(world.executor, 8 << 30)
    store, seen = ExpertStore(world.executor), []
    store.each, store.on_device = SLOT, True
    host = Memory(0, 50.0)  # as short as can be: it is not what these slots lie in
    elastic = Elastic([store], 16 << 30, lambda: host, device=device.mem_get_info)

    def pass_time(seconds: int) -> None:
        for _ in range(seconds):
            elastic.tick(float(len(seen)))
            seen.append(world.executor.capacity)
        world.check()

    pass_time(30)
    assert set(seen) == {LAYERS * EXPERTS}, "nothing moves while there is enough"
    device.others = (8 << 30) - LAYERS * EXPERTS * SLOT - 200 * MB
    pass_time(30)
    low = seen[-1]
    assert EXPERTS < low < LAYERS * EXPERTS and device.mem_get_info()[0] >= 328 * MB
    assert len(set(seen[-20:])) == 1, "and it comes to rest"
    device.others -= 200 * MB  # more than short, less than plenty
    pass_time(120)
    assert seen[-1] == low
    device.others = 0
    at = len(seen)
    pass_time(200)
    assert seen[-1] == LAYERS * EXPERTS and seen[at:] == sorted(seen[at:])
    assert elastic.status()["device_available"] == device.mem_get_info()[0]
    device.broken = True
    pass_time(20)
    assert seen[-1] == LAYERS * EXPERTS, "what cannot be read is no shortage"


def test_a_command_counts_with_the_memory_that_its_slots_lie_in(world) -> None:
    device, store = Device(world.executor, 40 * SLOT), ExpertStore(world.executor)
    store.each, store.on_device = SLOT, True
    elastic = Elastic([store], 16 << 30, lambda: Memory(0, 0.0), device=device.mem_get_info)
    elastic.set({"expert_bytes": 30 * SLOT})
    assert world.executor.capacity == 30
    device.others = 9 * SLOT
    with pytest.raises(CannotResize, match="are available: ask for less"):
        elastic.set({"expert_bytes": 32 * SLOT})
    world.check()


def test_the_device_is_asked_only_where_there_is_one_and_something_lies_in_it(world) -> None:
    class Cuda:
        here, asked = True, 0

        def is_available(self) -> bool:
            return self.here

        def mem_get_info(self) -> tuple[int, int]:
            self.asked += 1
            return 0, 8 << 30

    cuda = Cuda()
    elastic = Elastic([ExpertStore(world.executor)], 16 << 30, lambda: world.memory, device=memory_info(cuda))
    elastic.tick(0.0)
    assert cuda.asked == 0 and world.executor.capacity == 2 * EXPERTS, "these slots are host memory"
    cuda.here = False
    assert memory_info(cuda) is None and memory_info() is None or torch.cuda.is_available()


def test_memory_is_looked_at_once_a_second(world) -> None:
    looks = []
    world.elastic._host.read = lambda: looks.append(1) or world.memory
    for tenth in range(31):
        world.elastic.tick(tenth / 10)
    assert len(looks) == 4


def test_a_command_changes_slots_and_the_number_that_is_kept(world) -> None:
    slot = world.executor.slot_bytes
    world.set(20 * slot + 5)
    assert world.executor.slots.capacity == 20
    world.check()
    world.elastic.tick(1000.0)
    assert world.executor.slots.capacity == 20
    world.set(1000 * slot)
    assert world.executor.slots.capacity == LAYERS * EXPERTS, "never more than there are experts"
    world.check()


@pytest.mark.parametrize(
    ("size", "available", "says"),
    [(1000, 8 << 30, "one layer of 12 experts needs"), (1 << 30, 1000, "are available: ask for less")],
)
def test_what_cannot_be_is_refused_before_anything_changes(world, size: int, available: int, says: str) -> None:
    world.check()
    world.memory, held = Memory(available, 0.0), world.executor.slots.resident
    with pytest.raises(CannotResize, match=says):
        world.set(size)
    assert world.executor.slots.resident == held and world.executor.slots.capacity == 2 * EXPERTS


def test_a_failed_allocation_leaves_everything_as_it_was(world, monkeypatch, caplog) -> None:
    world.check()
    held = world.executor.slots.resident

    def refuse(self, slots: int):
        raise MemoryError("36 expert slots cannot be had")

    monkeypatch.setattr(Room, "resize", refuse)
    with pytest.raises(CannotResize, match="cannot be had; nothing was changed"):
        world.set(1000 * world.executor.slot_bytes)
    assert world.executor.slots.resident == held
    world.memory = Memory(0, 0.0)
    world.elastic.tick(0.0)
    assert "memory not moved" in caplog.text and world.executor.slots.capacity == 2 * EXPERTS
    monkeypatch.undo()
    world.check()


def test_a_move_needs_memory_for_what_moves_only(world) -> None:
    """Not for a second set of slots beside the first."""
    slot = world.executor.slot_bytes
    world.memory = Memory(5 * slot, 0.0)
    world.set(29 * slot)
    assert world.executor.slots.capacity == 29
    with pytest.raises(CannotResize, match="are available"):
        world.set(36 * slot)
