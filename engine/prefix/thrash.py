"""The thrash alarm: says when the budget is too small for what is being asked, instead of being slow in silence.

The window is measured in work, not in seconds, so that one rule fits a cache of a few thousand tokens on a small machine and
one of millions on a large one: it holds the last prefills that together are twice what the cache holds (more, where few
requests are that much). Thrashing is when half of that work, at least one whole cache full, repeats what was evicted: about one
turn of everybody who does not fit. A short squeeze by one oversized prompt, or an edit, stays below it: on recorded sessions
configurations that prefill at most a tenth too much reach 0.62 of it, those that prefill a quarter too much pass it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.protocol import log_line

TURNOVERS = 2  # cache fulls of prefill in the window; one in two repeated
WINDOW_S = 3600.0  # older work says nothing about now
SILENCE_S = 600.0  # between two alarms: a storm is said, not shouted
REQUESTS = 8  # that lost something: fewer can be a user who resumes an idle conversation, turn by turn
EVICTED = frozenset(("ram-full", "disk-cache-full", "state-budget"))  # reasons that a larger budget cures


@dataclass(frozen=True)
class Thrash:
    """What the alarm saw: entries evicted unread, and what would have kept what was asked for again."""

    evicted_unread: int
    window_s: int
    sessions: int  # that lost something
    missing_tokens: int  # the most each of them lost at one time, summed

    def missing_bytes(self, row_bytes: int, state_bytes: int) -> int:
        return self.missing_tokens * row_bytes + self.sessions * state_bytes

    def line(self, budget: int, need: int, option: str) -> str:
        """The log line; `need` bytes instead of `budget` would have kept what was asked for again."""
        return log_line(
            "kv cache thrash",
            evicted_unread=self.evicted_unread,
            window_s=self.window_s,
            sessions=self.sessions,
            budget_mb=budget >> 20,
            need_mb=need >> 20,
            hint=f"raise {option}",
        )


@dataclass(frozen=True)
class _Request:
    at: float
    session: str
    prefilled: int
    repeated: int
    unread: int


class ThrashAlarm:
    def __init__(self) -> None:
        self._seen: deque[_Request] = deque()
        self._prefilled = self._repeated = self._losers = 0  # sums over the window
        self._silent_until = float("-inf")

    def request(
        self, now: float, session: str, prefilled: int, lost: int, reason: str, *, unread: int, capacity: int
    ) -> Thrash | None:
        """A request prefills `prefilled` tokens, `lost` of them known before and lost for `reason`.

        `unread` counts evictions without a read so far; `capacity` is the most tokens the cache can hold.
        """
        self._enter(_Request(now, session, prefilled, lost if reason in EVICTED else 0, unread), capacity)
        silent = now < self._silent_until <= now + SILENCE_S  # a silence further away: the clock was set back
        if silent or self._losers < REQUESTS or self._repeated < max(capacity, self._prefilled / TURNOVERS):
            return None
        self._silent_until = now + SILENCE_S
        worst: dict[str, int] = {}
        for each in self._seen:
            worst[each.session] = max(worst.get(each.session, 0), each.repeated)
        first = self._seen[0]
        sessions = sum(lost > 0 for lost in worst.values())
        return Thrash(unread - first.unread, int(now - first.at), sessions, sum(worst.values()))

    def _enter(self, request: _Request, capacity: int) -> None:
        self._seen.append(request)
        self._count(request, 1)
        while self._stale(self._seen[0], request.at, capacity):
            self._count(self._seen.popleft(), -1)

    def _count(self, request: _Request, sign: int) -> None:
        self._prefilled += sign * request.prefilled
        self._repeated += sign * request.repeated
        self._losers += sign * (request.repeated > 0)

    def _stale(self, request: _Request, now: float, capacity: int) -> bool:
        if not now - WINDOW_S <= request.at <= now:
            return True
        work, losers = self._prefilled - request.prefilled, self._losers - (request.repeated > 0)
        return len(self._seen) > 1 and work >= TURNOVERS * capacity and losers >= REQUESTS
