"""Slots and policies: what is resident, who leaves, what comes in first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.policies import POLICIES, Lru, S3Fifo, make_policy
from engine.experts.slots import Slots

LAYERS, EXPERTS = 5, 8
KEYS = LAYERS * EXPERTS
policies = st.sampled_from(sorted(POLICIES))


def use(slots: Slots, keys: list[int], count: int | None = None) -> list[int]:
    """A layer's turn: request, fetch (all misses, or `count`), read, done. Returns the keys fetched."""
    found = slots.request(keys)
    slots.pin(found.hits)
    fetches = slots.fetch(found.misses[:count])
    for fetch in fetches:
        slots.landed(fetch.key)
    slots.unpin(found.hits)
    return [f.key for f in fetches]


in_layer = st.sets(st.integers(0, EXPERTS - 1), min_size=1)
batches = st.lists(
    st.builds(lambda layer, own: {layer * EXPERTS + e for e in own}, st.integers(0, LAYERS - 1), in_layer), max_size=30
)


@given(policy=policies, capacity=st.integers(0, 20), asked=batches, chance=st.randoms(use_true_random=False))
def test_every_slot_has_one_holder_whatever_happens(policy: str, capacity: int, asked: list[set[int]], chance) -> None:
    slots = Slots(capacity, LAYERS, EXPERTS, policy)
    for keys in asked:
        found = slots.request(sorted(keys))
        assert set(found.hits) | set(found.misses) == keys and not set(found.hits) & set(found.misses)
        slots.pin(found.hits)
        before = set(slots.resident)
        room = slots.room()
        fetches = slots.fetch(found.misses)
        assert len(fetches) == min(len(found.misses), room), "as many as there is room for"
        assert set(found.hits) <= set(slots.resident), "what is being read stays"
        assert {f.evicted for f in fetches} - {None} <= before - keys
        slots.check()
        for fetch in fetches:
            slots.lost(fetch.key) if chance.random() < 0.3 else slots.landed(fetch.key)
        slots.unpin(found.hits)
        if chance.random() < 0.1:
            slots.drop(chance.sample(range(KEYS), 5))
        if chance.random() < 0.1:
            held = {k: int(slots.where[k]) for k in slots.resident}
            moves = slots.resize(chance.randrange(21))
            moved = {m.key: m.slot for m in moves}
            for key in slots.resident:
                assert int(slots.where[key]) == moved.get(key, held[key]) < slots.capacity
        slots.check()
        assert slots.room() == slots.capacity


@given(asked=batches, capacity=st.integers(1, 20))
def test_lru_is_the_textbook_list(asked: list[set[int]], capacity: int) -> None:
    slots, list_ = Slots(capacity, LAYERS, EXPERTS, "lru"), []
    for keys in (sorted(k)[:capacity] for k in asked):
        found = slots.request(keys)
        hits = [k for k in keys if k in list_]
        assert list(found.hits) == hits
        list_ = [k for k in list_ if k not in hits] + hits
        slots.pin(found.hits)
        for fetch in slots.fetch(found.misses):
            slots.landed(fetch.key)
        slots.unpin(found.hits)
        for _ in range(len(list_) + len(found.misses) - capacity):
            list_.remove(next(k for k in list_ if k not in keys))
        list_ += found.misses
        assert sorted(list_) == slots.resident


def test_the_most_recently_used_misses_come_first() -> None:
    slots = Slots(1, LAYERS, EXPERTS)
    for key in (5, 3, 4, 7):
        use(slots, [key])
    assert slots.request([3, 4, 5, 6, 7]).misses == (4, 3, 5, 6), "7 is the hit; 6 was never used"


def test_an_arriving_expert_is_not_fetched_twice_and_is_no_hit_yet() -> None:
    slots = Slots(4, LAYERS, EXPERTS)
    (fetch,) = slots.fetch([1])
    assert slots.fetch([1]) == []
    assert slots.request([1]).misses == (1,)
    slots.landed(fetch.key)
    assert slots.request([1]).hits == (1,)


def test_a_lost_fetch_gives_its_slot_back() -> None:
    slots = Slots(1, LAYERS, EXPERTS)
    slots.fetch([1])
    assert slots.room() == 0 and slots.fetch([2]) == []
    slots.lost(1)
    assert [f.key for f in slots.fetch([2])] == [2]


def test_shrinking_keeps_the_best_and_moves_them_into_what_remains() -> None:
    slots = Slots(6, LAYERS, EXPERTS)
    for key in range(6):
        use(slots, [key])
    use(slots, [0])
    moves = slots.resize(2)
    assert slots.resident == [0, 5] and {int(slots.where[k]) for k in (0, 5)} == {0, 1}
    assert all(m.slot < 2 for m in moves)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_skewed_loop_larger_than_the_cache_is_where_lru_fails(name: str) -> None:
    """Layers in a loop, each with one favourite and a changing other: LRU forgets the favourites before they come back."""
    slots = Slots(8, LAYERS, EXPERTS, name)
    for turn in range(60):
        for layer in range(5):
            use(slots, [layer * 8, layer * 8 + 1 + turn % 7], None)
    share = slots.counts.hits / (slots.counts.hits + slots.counts.misses)
    assert share == 0 if name == "lru" else share > 0.3


def test_s3fifo_lets_what_was_used_once_go_before_what_was_used_often() -> None:
    policy = S3Fifo(10, 1, 10)
    for key in range(10):
        policy.admit(key)
    policy.use([0, 1, 2], [])
    assert set(policy.victims(6, ())) == {3, 4, 5, 6, 7, 8}


@given(policy=policies, keep=st.sets(st.integers(0, 9)), count=st.integers(0, 12))
def test_victims_are_distinct_and_never_kept(policy: str, keep: set[int], count: int) -> None:
    order = make_policy(policy, 10, 1, 10)
    for key in range(10):
        order.admit(key)
    chosen = order.victims(count, keep)
    assert len(set(chosen)) == len(chosen) == min(count, 10 - len(keep)) and not set(chosen) & keep


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no eviction policy 'fifo'; there are lru"):
        make_policy("fifo", 4, 1, 4)


def test_lru_is_the_default() -> None:
    assert Slots(2, 1, 4).policy == Lru.name
