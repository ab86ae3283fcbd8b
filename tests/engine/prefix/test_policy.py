"""Who goes first: recency, except that newcomers beyond a small share push each other out and shared tools stay longest."""

from __future__ import annotations

import pytest

from engine.ipc import Anchor
from engine.prefix.cache import RadixCache
from engine.prefix.policy import PROBATION_SHARE, Segment, SegmentedLru
from engine.prefix.records import SHARED, DiskIndex, Record
from tests.engine.prefix.fakes import Sequence_, make

BUDGET = 100
SHARE = int(BUDGET * PROBATION_SHARE)


def filled(*entries: tuple[str, int, Segment]) -> SegmentedLru[str]:
    order: SegmentedLru[str] = SegmentedLru(BUDGET)
    for key, size, segment in entries:
        order.add(key, size, segment)
    return order


def test_newcomers_within_their_share_go_by_age_like_everybody() -> None:
    order = filled(("idle", 60, Segment.PROTECTED), ("new", SHARE, Segment.PROBATION), ("busy", 30, Segment.PROTECTED))
    assert list(order.order()) == ["idle", "new", "busy"]


def test_newcomers_beyond_their_share_push_each_other_out() -> None:
    order = filled(("talk", 60, Segment.PROTECTED), *((f"n{i}", SHARE // 2, Segment.PROBATION) for i in range(4)))
    assert list(order.order()) == ["n0", "n1", "talk", "n2", "n3"]


def test_a_newcomer_that_runs_counts_for_half_of_the_share_at_most() -> None:
    order = filled(("talk", 60, Segment.PROTECTED), *((f"n{i}", SHARE // 2, Segment.PROBATION) for i in range(2)))
    assert order.victim() == "talk"
    assert list(order.order(newcomers=1)) == list(order.order(newcomers=BUDGET)) == ["n0", "talk", "n1"]


def test_newcomers_that_come_back_get_a_larger_share_and_give_it_back() -> None:
    order = filled(("talk", 60, Segment.PROTECTED), *((f"n{i}", SHARE // 2, Segment.PROBATION) for i in range(4)))
    order.missed(SHARE, newcomer=True)
    assert list(order.order()) == ["talk", "n0", "n1", "n2", "n3"]  # recency
    order.missed(10 * BUDGET, newcomer=False)
    assert list(order.order()) == ["n0", "n1", "talk", "n2", "n3"]  # never less than the share
    order.missed(10 * BUDGET, newcomer=True)
    order.missed(BUDGET - SHARE, newcomer=False)
    assert order.victim() == "n0"  # never more than the budget


def test_one_shots_that_nobody_sends_again_move_no_share_and_those_that_come_back_do() -> None:
    cache = make(pages=20)
    share = cache.ram.page_order._newcomers
    prompts = [list(range(100 * n, 100 * n + 30)) for n in range(6)]
    for n, prompt in enumerate(prompts):
        Sequence_(cache, prompt, session=f"s{n}").run().close()
    assert cache.ram.page_order._newcomers == share
    for n, prompt in enumerate(prompts[:3]):
        assert Sequence_(cache, [*prompt, 1], session=f"s{n}").run().close().lease.match.reason == "ram-full"
    assert share < cache.ram.page_order._newcomers <= 20


def test_superseded_states_go_first_and_anchored_text_last() -> None:
    order = filled(("tools", 20, Segment.ANCHORED), ("old", 20, Segment.PROTECTED), ("talk", 20, Segment.PROTECTED))
    order.demote("talk")
    assert list(order.order()) == ["talk", "old", "tools"]


def test_anchored_text_is_a_bounded_share() -> None:
    order = filled(*((f"tools{i}", 20, Segment.ANCHORED) for i in range(3)), ("talk", 20, Segment.PROTECTED))
    assert list(order.order()) == ["tools0", "tools1", "talk", "tools2"]


def test_the_next_victim_of_a_segment_and_a_changed_size_keep_the_order() -> None:
    order = filled(("a", 10, Segment.PROTECTED), ("b", 10, Segment.PROTECTED))
    order.add("c", 10, Segment.PROTECTED, oldest=True)
    order.resize_key("a", 30)
    assert list(order.order()) == ["c", "a", "b"] and order.size == 50
    order.touch("c")
    assert order.victim() == "a"


def talk(cache: RadixCache, name: str, base: int, size: int, turns: int = 2, anchors: tuple = (), start: tuple = ()) -> list[int]:
    """A conversation of `size` tokens, read again at every turn but the first."""
    tokens = [*start, *range(base, base + size)]
    for n in range(turns):
        tokens = Sequence_(cache, [*tokens, base + size + n], session=name, anchors=anchors).run().close().tokens
    return tokens


def reused(cache: RadixCache, tokens: list[int], name: str) -> int:
    return Sequence_(cache, [*tokens, 7], session=name).close().lease.match.common


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
def test_an_idle_conversation_makes_room_for_the_first_turn_of_a_new_one(hybrid: bool) -> None:
    cache = make(pages=100, hybrid=hybrid, states=40)
    talk(cache, "idle", 1000, 160)
    new = talk(cache, "new", 2000, 30, turns=1)
    talk(cache, "busy", 3000, 240)  # does not fit beside both
    assert reused(cache, new, "new") == len(new)


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
def test_a_one_shot_that_runs_pushes_out_others_and_not_a_conversation(hybrid: bool) -> None:
    cache = make(pages=52, hybrid=hybrid, states=20)
    tokens = talk(cache, "talk", 1000, 120)
    for n, size in enumerate((18, 18, 50)):  # a third more than the conversation and the share of newcomers leave
        talk(cache, f"s{n}", 2000 + 100 * n, size, turns=1)
    assert reused(cache, tokens, "talk") == len(tokens)


@pytest.mark.parametrize("readers", [1, 2])
def test_tools_are_anchored_once_another_conversation_read_them(readers: int) -> None:
    cache = make(pages=100)
    tools = tuple(range(1, 41))
    anchors = (Anchor(offset=len(tools), kind="tools", weight=1.0),)
    for n in range(readers):
        talk(cache, f"s{n}", 1000 * n + 1000, 40, anchors=anchors, start=tools)
    talk(cache, "later", 8000, 200)
    talk(cache, "last", 9000, 180)  # does not fit beside all
    assert (reused(cache, list(tools), "fresh") == len(tools)) == (readers == 2)


def test_on_disk_as_well() -> None:
    index = DiskIndex(budget=1000)

    def add(kind: str, owner: str, used: float) -> Record:
        record = Record(index.next_id, 0, 0, 10, born=used, used=used)
        record.kv_bytes, record.kind, record.owner = 100, kind, owner
        index.add(record, Segment.PROTECTED)
        return record

    shared, own, later = add("tools", SHARED, 1.0), add("tools", "a", 2.0), add("turn-end", "a", 3.0)
    gone = []
    for record, _ in index.victims(850):
        gone.append(record)
        index.drop(record)
    assert gone == [own, later] and shared.alive
    read = add("system", "b", 4.0)
    add("turn-end", "b", 5.0)
    index.use(read, 6.0, "c")
    assert read.owner == SHARED and list(index.order.order())[1:] == [shared, read]
