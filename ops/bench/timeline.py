"""When a disk that experts are read from idles while tokens are decoded, and why: from times of its reads and of layer calls."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from engine.experts.executor import TieredExperts

Span = tuple[float, float]
BETWEEN, NONE, BEFORE, BEHIND, GAPS = (
    "between two layers",
    "in layers that miss nothing",
    "before a layer's first read",
    "behind a layer's last read",
    "between two reads of a layer",
)
READING = "reading"
WHY = (READING, BEFORE, GAPS, BEHIND, NONE, BETWEEN)


class Timeline:
    """Notes the begin and end of every read and of every layer call of `experts` while entered."""

    def __init__(self, experts: TieredExperts) -> None:
        self._experts, self.reads, self.calls = experts, [], []
        self._run = experts.run

    def __enter__(self) -> Timeline:
        self._experts.link.reader.reads()  # forgets those before
        self._experts.run = self._call
        return self

    def __exit__(self, *_: object) -> None:
        self.reads += self._experts.link.reader.reads()
        self._experts.run = self._run

    def _call(self, layer: int, *more: Any) -> Any:
        slots, began = self._experts.slots.counts, time.perf_counter()
        before = slots.misses
        out = self._run(layer, *more)
        self.calls.append((began, time.perf_counter(), layer, slots.misses - before))
        return out

    def idle(self) -> dict[str, float]:
        """Milliseconds a token in which nothing was read, by what was going on; `reading` the rest."""
        busy, seen = union([(a, b) for a, b, _ in self.reads]), Counter()
        tokens = max(1, sum(1 for *_, layer, _ in self.calls if layer == 0))
        for at, (began, ended, _, misses) in enumerate(self.calls):
            if at:
                between = (self.calls[at - 1][1], began)
                seen[BETWEEN] += outside(busy, between)
            free = outside(busy, (began, ended))
            if not misses:
                seen[NONE] += free
                continue
            inside = [(a, b) for a, b in busy if b > began and a < ended]
            first, last = (min(a for a, _ in inside), max(b for _, b in inside)) if inside else (began, began)
            seen[BEFORE] += max(0.0, min(first, ended) - began)
            seen[BEHIND] += max(0.0, ended - max(last, began))
            seen[GAPS] += free - max(0.0, min(first, ended) - began) - max(0.0, ended - max(last, began))
        whole = self.calls[-1][1] - self.calls[0][0]
        seen[READING] = whole - sum(seen.values())
        return {why: 1e3 * seen[why] / tokens for why in WHY}

    def lines(self, tokens: int) -> dict[str, list]:
        """Reads and calls of the last `tokens`, in ms from their beginning, for a figure."""
        starts = [began for began, _, layer, _ in self.calls if layer == 0][-tokens:]
        zero = starts[0]
        reads = [[1e3 * (a - zero), 1e3 * (b - zero), key] for a, b, key in sorted(self.reads) if b >= zero]
        calls = [[1e3 * (a - zero), 1e3 * (b - zero), layer, misses] for a, b, layer, misses in self.calls if a >= zero]
        return {"reads": reads, "calls": calls}


def union(spans: list[Span]) -> list[Span]:
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def outside(busy: list[Span], span: Span) -> float:
    """Of `span` what no part of `busy` covers."""
    covered = sum(min(end, span[1]) - max(begin, span[0]) for begin, end in busy if begin < span[1] and end > span[0])
    return span[1] - span[0] - covered
