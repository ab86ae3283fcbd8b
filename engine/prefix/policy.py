"""Who is evicted first. Owns order only: it knows keys and sizes, no tensors, tokens or files.

Recency with three exceptions. A state whose conversation went on is superseded: it serves edits only and leaves first. What was
never read again (a title request, a one-shot sub-agent) is in probation, and when such newcomers hold more than their share they
push each other out, oldest first; below it they compete by recency like everybody, so an idle conversation still makes room for
a new one. The share grows when newcomers come back and shrinks when others do. Tools and system text that several conversations
read are anchored and leave last, up to a share of the budget. Hit counts and density scores are not used: counts never age, and
density starves the long conversations that cost most to lose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from enum import IntEnum
from heapq import merge
from itertools import islice
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

PROBATION_SHARE = 0.2  # of the budget, for what nobody has read again: a conversation of 80 % of it stays whole (Karedla 1994)
ANCHORED_SHARE = 0.25  # of the budget: tools + system of a few agents, never most of the memory


class Segment(IntEnum):
    SUPERSEDED = 0
    PROBATION = 1
    PROTECTED = 2
    ANCHORED = 3


_ANCHORED = Segment.ANCHORED  # asked for at every entry: looking it up in the enumeration takes half of that


class SegmentedLru(Generic[Key]):
    """Recency order in four segments; sizes in any one unit (pages, bytes), `budget` in the same unit."""

    def __init__(self, budget: int) -> None:
        self._lists: tuple[OrderedDict[Key, tuple[int, int]], ...] = tuple(OrderedDict() for _ in Segment)  # -> size, tick
        self._sizes = [0] * len(Segment)
        self._where: dict[Key, int] = {}  # key -> Segment
        self._newest = self._oldest = 0  # ticks: each list is sorted by them
        self.resize(budget)

    def resize(self, budget: int) -> None:
        self._least = self._newcomers = int(budget * PROBATION_SHARE)
        self._budget = budget
        self._anchored = int(budget * ANCHORED_SHARE)

    def missed(self, size: int, newcomer: bool) -> None:
        """`size` of what went is asked for again. Newcomers that come back deserve a larger share, up to that of recency alone.

        What others lose by it shrinks the share again (as in ARC, Megiddo and Modha 2003).
        """
        self._newcomers += size if newcomer else -size
        self._newcomers = max(self._least, min(self._budget, self._newcomers))

    def __contains__(self, key: Key) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    @property
    def size(self) -> int:
        return sum(self._sizes)

    def add(self, key: Key, size: int, segment: int = Segment.PROBATION, *, oldest: bool = False) -> None:
        """Enter `key` as the most recent of its segment (`oldest`: as the next victim of it), wherever it was before."""
        if key in self._where:
            self.drop(key)
        if oldest:
            self._oldest -= 1
            self._lists[segment][key] = size, self._oldest
            self._lists[segment].move_to_end(key, last=False)
        else:
            self._newest += 1
            self._lists[segment][key] = size, self._newest
        self._sizes[segment] += size
        self._where[key] = segment
        self._bound_anchored()

    def _bound_anchored(self) -> None:
        while self._sizes[_ANCHORED] > self._anchored:
            key, (size, _) = next(iter(self._lists[_ANCHORED].items()))
            self.add(key, size, Segment.PROTECTED)

    def extend(self, entries: Iterable[tuple[Key, int, int]]) -> None:
        """Enter many new keys with their sizes and segments, the oldest first."""
        lists, sizes, where, tick = self._lists, self._sizes, self._where, self._newest
        for tick, (key, size, segment) in enumerate(entries, self._newest + 1):
            lists[segment][key] = size, tick
            sizes[segment] += size
            where[key] = segment
        self._newest = tick
        self._bound_anchored()

    def drop(self, key: Key) -> None:
        """Forget `key` if it is here."""
        segment = self._where.pop(key, None)
        if segment is not None:
            self._sizes[segment] -= self._lists[segment].pop(key)[0]

    def resize_key(self, key: Key, size: int) -> None:
        """The size of `key` changed; its place did not."""
        segment = self._where[key]
        before, tick = self._lists[segment][key]
        self._sizes[segment] += size - before
        self._lists[segment][key] = size, tick

    def touch(self, key: Key, segment: int | None = None) -> None:
        """Make `key` the most recent of its segment, or of a higher one."""
        here = self._where[key]
        self.add(key, self._lists[here][key][0], max(here, here if segment is None else segment))

    def demote(self, key: Key) -> None:
        """Move `key` to the lowest segment."""
        here = self._where[key]
        self.add(key, self._lists[here][key][0], Segment.SUPERSEDED)

    def victim(self, newcomers: int = 0) -> Key | None:
        """The next to go; None when empty."""
        return next(self.order(newcomers), None)

    def order(self, newcomers: int = 0) -> Iterator[Key]:
        """All keys, the next victim first. `newcomers`: what one that is not here, because it runs, holds.

        It counts for half of their share at most: the first turn of a long conversation is to leave those of others alone.
        """
        superseded, probation, protected, anchored = self._lists
        yield from superseded
        beyond, left = 0, self._sizes[Segment.PROBATION] + min(newcomers, self._newcomers // 2)
        for key, (size, _) in probation.items():
            if left <= self._newcomers:
                break
            beyond, left = beyond + 1, left - size
            yield key
        by_age = merge(islice(probation.items(), beyond, None), protected.items(), key=lambda entry: entry[1][1])
        yield from (key for key, _ in by_age)
        yield from anchored
