"""Who is served next: weighted fair queueing over sessions (Demers, Keshav and Shenker 1989), in prompt tokens.

Every session is a flow with a finish tag: the virtual time at which its admitted work would be done if all sessions shared the
machine evenly. The smallest tag is served first, so a short request passes a long one, a session with many requests does not
push out a session with one, and whoever waits is reached as virtual time passes its tag: nothing starves. Priorities are
weights. Requests without a session have the share of one together, divided evenly: each is a flow that is `crowd` times as slow.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

NOMINAL = 512  # tokens a request is assumed to cost before its cache lookup says how many are new
DECODE_COST = 4  # a decode step of one row takes about as long as this many prompt tokens (weights are read once for either)
MAX_FLOWS = 4096  # sessions remembered; only those ahead of virtual time matter


def weight(priority: int) -> float:
    """Share of a request: each priority step is a factor of four, bounded so that tags stay exact in float64."""
    return 4.0 ** max(-8, min(8, priority))


@dataclass
class FairClock:
    """Virtual time and the finish tag of each session."""

    now: float = 0.0
    _finish: dict[str, float] = field(default_factory=dict)

    def key(self, session: str, arrived: float, priority: int, crowd: int = 1) -> float:
        """Order of a waiting request that arrived at virtual time `arrived`; `crowd` of them have no session."""
        if not session:
            return arrived + NOMINAL * crowd / weight(priority)
        return max(arrived, self._finish.get(session, 0.0)) + NOMINAL / weight(priority)

    def admit(self, session: str, arrived: float, priority: int, new_tokens: int, crowd: int = 1) -> float:
        """Charge an admitted request to its session and return its tag."""
        if not session:
            return arrived + new_tokens * crowd / weight(priority)
        tag = max(arrived, self._finish.get(session, 0.0)) + new_tokens / weight(priority)
        self._finish[session] = tag
        if len(self._finish) > MAX_FLOWS:
            self._forget()
        return tag

    def charge(self, session: str, priority: int, decoded: int) -> None:
        """Charge sampled tokens, so that long answers count as well."""
        if not session:
            return  # no later request is known to be its
        owed = max(self.now, self._finish.get(session, 0.0))
        self._finish[session] = owed + decoded * DECODE_COST / weight(priority)

    def advance(self, tokens: int, active: Collection[tuple[str, int]]) -> None:
        """`tokens` prompt tokens were computed while the (session, priority) pairs of `active` had work."""
        shares: dict[str, float] = {}
        for session, priority in active:
            shares[session] = max(shares.get(session, 0.0), weight(priority))
        self.now += tokens / (sum(shares.values()) or 1.0)

    def _forget(self) -> None:
        """Drop sessions that virtual time has passed, then the nearest ones: they lose least."""
        ahead = sorted(((tag, s) for s, tag in self._finish.items() if tag > self.now), reverse=True)
        self._finish = {s: tag for tag, s in ahead[: MAX_FLOWS // 2]}
