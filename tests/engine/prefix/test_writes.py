"""What is written for the second time is a share of what is written for the first, and a day has its cap."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.prefix.writes import AGAIN_SHARE, HOUR, HOURS, WriteBudget
from tests.engine.prefix.fakes import Sequence_, make, written

BUDGET = 600  # bytes of disk: one conversation of the six below


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
def test_a_disk_that_is_much_too_small_is_not_written_again_and_again(tmp_path: Path, hybrid: bool) -> None:
    """Six conversations in memory take turns, twenty minutes apart; on disk each would push out the one before it."""
    now = [1e6]
    cache = make(pages=600, hybrid=hybrid, states=200, root=tmp_path, budget=BUDGET, clock=lambda: now[0])
    talks = {f"s{n}": list(range(1000 * n + 1, 1000 * n + 31)) for n in range(6)}
    sent = 0
    for turn in range(8):
        for name, tokens in talks.items():
            now[0] += 1200
            talks[name] = Sequence_(cache, [*tokens, *range(turn * 50 + 1, turn * 50 + 6)], session=name).run().close().tokens
            written(cache)
            sent += 1
    new = sum(len(t) for t in talks.values()) * cache.storage.row_bytes + sent * cache.storage.state_bytes
    days = now[0] / (HOURS * HOUR) + 1
    assert cache.disk.counters["stored_bytes"] <= new * (1 + AGAIN_SHARE) + BUDGET * (days - 1e6 // (HOURS * HOUR))
    assert cache.disk.counters["refused_written-before"] > 0
    assert cache.disk.index.bytes > BUDGET // 2, "what is there stays of use"


def test_a_disk_with_room_is_never_refused(tmp_path: Path) -> None:
    """A conversation that comes back after its lifetime is written a second time."""
    now = [1e6]
    cache = make(root=tmp_path, budget=BUDGET * 10, ttl_s=3600, clock=lambda: now[0])
    tokens = Sequence_(cache, list(range(1, 40))).run().close().tokens
    written(cache)
    now[0] += 7200
    Sequence_(cache, [*tokens, 7]).run().close()
    written(cache)
    assert cache.disk.index.bytes == (len(tokens) + 1) * cache.storage.row_bytes


def test_the_share_and_the_cap_are_of_the_last_day() -> None:
    budget = WriteBudget(daily=1000, least=50)
    assert budget.refusal(0.0, 50, 50) == "" and budget.refusal(0.0, 51, 51) == "written-before"
    budget.spend(0.0, 800, 0)
    assert budget.refusal(0.0, 200, 200) == "" and budget.refusal(0.0, 201, 201) == "daily-cap"
    budget.spend(HOUR, 100, 100)
    assert budget.refusal(HOUR, 101, 101) == "daily-cap" and budget.refusal(HOUR, 100, 100) == ""
    late = HOURS * HOUR
    assert budget.refusal(late, 100, 0) == "" and budget.refusal(late, 51, 51) == "written-before"
    assert budget.refusal(late + HOUR, 1000, 0) == "" and budget.refusal(-9e9, 1000, 0) == "", "also when the clock is set back"
