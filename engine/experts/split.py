"""How many of a layer's missing experts are fetched into fast memory and how many are computed where they lie.

The two branches run at once: the link copies q experts while the processor computes the other m - q from host memory. Both read
host memory, so the processor is slower while the link runs: three rates, all measured with the real kernels (`calibrate`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROUNDING = 1e-9  # relative; times this close are equal: one memory shared by both branches makes whole ranges of q equal


@dataclass(frozen=True)
class Rates:
    """Bytes per second of stored weights. `link`: copied to fast memory; `host`: computed from host memory, alone; `shared`:
    the same while the link runs."""

    link: float
    host: float
    shared: float

    def __post_init__(self) -> None:
        if not (0 < self.link < math.inf and 0 < self.host < math.inf and 0 <= self.shared < math.inf):
            raise ValueError(f"rates must be positive numbers, got {self}")

    @staticmethod
    def of_one_memory(link: float, host: float) -> Rates:
        """Both branches share the host memory's rate: what the link takes the processor lacks."""
        return Rates(link, host, max(0.0, host - link))


def fill_seconds(fetched: int, expert_bytes: int, rates: Rates) -> float:
    return fetched * expert_bytes / rates.link


def host_seconds(misses: int, fetched: int, expert_bytes: int, rates: Rates) -> float:
    """Until the processor has computed the misses that are not fetched: at the shared rate while the link runs, then alone."""
    work = (misses - fetched) * expert_bytes
    fill = fill_seconds(fetched, expert_bytes, rates)
    if work <= rates.shared * fill:
        return work / rates.shared if work else 0.0
    return fill + (work - rates.shared * fill) / rates.host


def miss_seconds(misses: int, fetched: int, expert_bytes: int, rates: Rates) -> float:
    """Until both branches are done: max(T_fill, T_cpu)."""
    return max(fill_seconds(fetched, expert_bytes, rates), host_seconds(misses, fetched, expert_bytes, rates))


def best_split(misses: int, rates: Rates, room: int | None = None) -> int:
    """q*, the number of misses to fetch that makes `miss_seconds` smallest; of equals the larger, because fetched experts stay.

    At least one when there is a miss, so that the cache always learns, and at most `room` (slots that may be given away).

    Both branches end together at q = m * link / (link + shared); that is m * B_P / B_H when they share one memory
    (shared = B_H - B_P). Below it the time falls with q as long as link + shared >= host: overlapping is worth something.
    """
    room = misses if room is None else min(room, misses)
    if room <= 0:
        return 0
    together = misses * rates.link / (rates.link + rates.shared)
    candidates = {min(max(n, 1), room) for n in (1, math.floor(together), math.ceil(together))}
    times = {q: miss_seconds(misses, q, 1, rates) for q in candidates}
    return max(q for q, time in times.items() if time <= min(times.values()) * (1 + ROUNDING))
