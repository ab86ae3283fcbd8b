"""How much may be written: a cap a day, and of what was on disk before only a share of what was not. Pure bookkeeping.

A disk that is much too small for what is asked would give up the same tokens every few turns and be given them again at the next
one: writing that wears it out and is read by nobody.
"""

from __future__ import annotations

from collections import Counter

HOUR = 3600.0
HOURS = 24
AGAIN_SHARE = 0.25  # of what is written for the first time: together at most 1.25 of the least that must be written


class WriteBudget:
    """Bytes by hour over the last day. `daily`: the cap; `least`: bytes that may be written again whatever else was."""

    def __init__(self, daily: int, least: int) -> None:
        self.daily, self.least = daily, least
        self.spent: Counter[int] = Counter()  # hour -> bytes
        self._again: Counter[int] = Counter()  # of them, what had been on disk before

    def refusal(self, now: float, size: int, again: int) -> str:
        """Why `size` bytes, `again` of them written before, may not be written now; "" when they may."""
        self._forget(now)
        spent, repeated = self.spent.total(), self._again.total()
        if spent + size > self.daily:
            return "daily-cap"
        if again and repeated + again > max(self.least, (spent - repeated) * AGAIN_SHARE):
            return "written-before"
        return ""

    def spend(self, now: float, size: int, again: int) -> None:
        self.spent[int(now // HOUR)] += size
        self._again[int(now // HOUR)] += again

    def _forget(self, now: float) -> None:
        hour = int(now // HOUR)
        for by_hour in (self.spent, self._again):
            for old in [h for h in by_hour if not hour - HOURS < h <= hour]:
                del by_hour[old]
