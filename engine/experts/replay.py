"""Replays a routing trace through the real slots: miss rates of policies and capacities, and the bound no policy can beat."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from engine.experts.slots import Slots
from engine.experts.split import Rates, best_split, miss_seconds
from engine.experts.trace import Trace


@dataclass(frozen=True)
class Result:
    """`miss_rate` of distinct expert uses; `seconds` a step spends on misses in all layers, 0 without rates."""

    policy: str
    capacity: int
    uses: int
    misses: int
    fetched: int
    seconds: float = 0.0

    @property
    def miss_rate(self) -> float:
        return self.misses / self.uses if self.uses else 0.0


def replay(trace: Trace, policy: str, capacity: int, rates: Rates | None = None, expert_bytes: int = 0) -> Result:
    """All misses are fetched (offload), or q* of them when `rates` are given (hybrid)."""
    slots, seconds, steps = Slots(capacity, trace.layers, trace.experts, policy), 0.0, len(set(trace.step.tolist()))
    for keys in trace.calls():
        found = slots.request(keys)
        slots.pin(found.hits)
        room = slots.room()
        count = best_split(len(found.misses), rates, room) if rates else min(len(found.misses), room)
        for fetch in slots.fetch(found.misses[:count]):
            slots.landed(fetch.key)
        slots.unpin(found.hits)
        if rates and found.misses:
            seconds += miss_seconds(len(found.misses), count, expert_bytes, rates)
    c = slots.counts
    return Result(policy, capacity, c.hits + c.misses, c.misses, c.fetched, seconds / max(1, steps))


def belady(trace: Trace, capacity: int) -> Result:
    """The fewest misses possible: evict what is needed again last, or do not keep what is needed later than all that is held
    (Belady 1966 with bypass; an expert used now may leave now, so no policy with pinned experts can do better).
    """
    uses = [key for keys in trace.calls() for key in keys]
    upcoming: dict[int, int] = {}
    after = [0] * len(uses)  # position of the next use of the same key
    for i in range(len(uses) - 1, -1, -1):
        after[i] = upcoming.get(uses[i], len(uses))
        upcoming[uses[i]] = i
    held: dict[int, int] = {}  # key -> its next use
    far: list[tuple[int, int]] = []  # (-next use, key), some outdated
    misses = 0
    for i, key in enumerate(uses):
        if key not in held:
            misses += 1
        held[key] = after[i]
        heapq.heappush(far, (-after[i], key))
        while len(held) > capacity:
            when, victim = heapq.heappop(far)
            if held.get(victim) == -when:
                del held[victim]
    return Result("belady", capacity, len(uses), misses, misses)


def capacities(trace: Trace, points: int = 8) -> list[int]:
    """From one layer's worth of experts a token to all of them, evenly in the logarithm."""
    low = max(1, trace.ids.shape[1])
    steps = (low * (trace.keys / low) ** (i / max(1, points - 1)) for i in range(points))
    return sorted({min(trace.keys, math.ceil(n)) for n in steps})
