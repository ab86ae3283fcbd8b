"""Whole layers copied ahead, or experts on demand: decided per layer call by what each would take. Decides; copies nothing.

A large prompt chunk touches nearly every expert of a layer: then the next layer is copied while this one computes, and the copy
is hidden. A 20-token tool result touches few: copying whole layers would stream the pool for nothing. Both sides are computed
from the link's measured rate and the measured time of a layer at such a number of rows.
"""

from __future__ import annotations

WEIGHT = 0.3  # of the newest time in the running average of a layer's time


def expected_distinct(rows: int, experts: int, top_k: int) -> float:
    """Experts that `rows` tokens touch if each draws `top_k` evenly: the most there can be for a given skew."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


class Prefill:
    """Remembers how long a layer takes without waiting for copies, and how long the link idles, by power of two of its rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._idle: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """A layer call of `rows` rows (and what lies between it and the next one) took so long, waiting for copies left out."""
        _average(self._seconds, rows, seconds)

    def observe_idle(self, rows: int, seconds: float) -> None:
        """So long after the last expert of a layer had come the next layer's were asked for."""
        _average(self._idle, rows, seconds)

    def layer_seconds(self, rows: int) -> float | None:
        """None until such a call was seen."""
        return self._seconds.get(rows.bit_length())

    def idle_seconds(self, rows: int) -> float | None:
        """Of the link behind a layer's misses; until that was seen, all of the layer's own time."""
        return self._idle.get(rows.bit_length(), self.layer_seconds(rows))

    def copy_ahead(self, rows: int, absent: int, experts: int, top_k: int, expert_seconds: float) -> bool:
        """Whether copying the `absent` experts of the next layer now beats fetching those it will turn out to need.

        Ahead, the layer takes the longer of its own time and the copy. On demand only the expected share is copied, and computed
        as it comes, but nothing before the first has come, and the link idles until it is asked. `expert_seconds` is the link's
        time for one expert.
        """
        own, idle = self.layer_seconds(rows), self.idle_seconds(rows)
        if own is None or idle is None or not absent:
            return False
        needed = absent * expected_distinct(rows, experts, top_k) / experts
        return max(own, absent * expert_seconds) < max(own + expert_seconds, idle + needed * expert_seconds)

    def crossing(self, experts: int, top_k: int, expert_seconds: float, most: int = 1 << 14) -> int | None:
        """The fewest rows, among the sizes seen, from which whole layers are copied; None if at none of them."""
        sizes = [1 << (bucket - 1) for bucket in sorted(self._seconds)]
        return next((n for n in sizes if n <= most and self.copy_ahead(n, experts, experts, top_k, expert_seconds)), None)


def _average(times: dict[int, float], rows: int, seconds: float) -> None:
    bucket = rows.bit_length()
    before = times.get(bucket, seconds)
    times[bucket] = before + WEIGHT * (seconds - before)
