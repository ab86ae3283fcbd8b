"""Other policies for the prefix simulator, to compare with: eviction orders in place of ours, and whole-prefix snapshots."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict

import numpy as np

from engine.prefix.policy import SegmentedLru
from ops.bench.prefix_result import Result
from ops.bench.prefix_traffic import BLOCK, GIB, Request, Shape


class PlainLru(SegmentedLru):
    """One segment: recency only."""

    def add(self, key, size, segment=0, *, oldest=False) -> None:
        super().add(key, size, 0, oldest=oldest)


class Density(SegmentedLru):
    """Lowest hits per byte and age first, as some engines score snapshots."""

    def order(self, newcomers=0):
        now = len(self._lists[0])
        ranked = sorted(enumerate(self._lists[0].items()), key=lambda e: (_reads(e[1][0]) + 1) / e[1][1] / (now - e[0]))
        yield from (key for _, (key, _) in ranked)

    def add(self, key, size, segment=0, *, oldest=False) -> None:
        super().add(key, size, 0, oldest=oldest)


def _reads(key: object) -> int:
    return getattr(key, "hits", None) or getattr(key, "reads", 0)


def snapshots(requests: list[Request], users: int, shape: Shape, disk_gib: float) -> Result:
    """Whole-prefix snapshots: every request stores its whole prompt, LRU; a prompt reuses the longest one it starts with."""
    began, budget, size, written = time.perf_counter(), disk_gib * GIB, 0, 0
    kept: OrderedDict[int, np.ndarray] = OrderedDict()
    sent: dict[str, list[np.ndarray]] = {}
    spent, reused = Counter(), 0
    for n, request in enumerate(requests):
        tokens = request.tokens[::BLOCK]
        best = max(kept, key=lambda k: _whole(kept[k], tokens), default=None)
        common = _whole(kept[best], tokens) * BLOCK if best is not None else 0
        known = max((_lcp(s, tokens) for s in sent.get(request.session, ())), default=0) * BLOCK
        if common:
            kept.move_to_end(best)
        sent[request.session] = [*sent.get(request.session, ())[-15:], tokens]
        total, limit = len(request.tokens), len(request.tokens) - 1
        spent.update(prompt=total, prefilled=total - min(common, limit), ideal=total - min(max(known, common), limit))
        reused += common
        cost = total * shape.row_bytes + shape.state_bytes
        kept[n], size, written = tokens, size + cost, written + cost
        while size > budget and kept:
            _, old = kept.popitem(last=False)
            size -= len(old) * BLOCK * shape.row_bytes + shape.state_bytes
    due = spent["ideal"] * shape.row_bytes + len(requests) * shape.state_bytes
    return Result(
        "snapshots",
        users,
        0.0,
        disk_gib,
        len(requests),
        spent["prompt"] / 1e6,
        spent["ideal"] / 1e6,
        spent["prefilled"] / spent["ideal"],
        written / GIB,
        written / due,
        0.0,
        float(reused > 0),
        0,
        {},
        time.perf_counter() - began,
    )


def _lcp(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _whole(stored: np.ndarray, tokens: np.ndarray) -> int:
    """Length of `stored` when `tokens` starts with it, else 0."""
    fits = len(stored) <= len(tokens) and stored[-1] == tokens[len(stored) - 1]
    return len(stored) if fits and np.array_equal(stored, tokens[: len(stored)]) else 0
