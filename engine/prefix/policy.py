"""Who is evicted first. Owns order only: it knows keys and sizes, no tensors, tokens or files.

Segmented LRU with anchor pins. A state whose conversation went on is superseded: it serves edits only and leaves first. What was
never read again (a title request, a one-shot sub-agent) stays in probation and leaves next; what was hit is protected; what ends
at tools or system text is anchored. The upper segments are bounded shares of the budget and spill downwards, so nothing is
pinned for ever. Hit counts and density scores are not used: counts never age, and density starves the long conversations that
cost most to lose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from enum import IntEnum
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

PROTECTED_SHARE = 0.8  # of the budget: the rest is room in which newcomers can prove themselves (SLRU, Karedla 1994)
ANCHORED_SHARE = 0.25  # of the budget: tools + system of a few agents, never most of the memory


class Segment(IntEnum):
    SUPERSEDED = 0
    PROBATION = 1
    PROTECTED = 2
    ANCHORED = 3


class SegmentedLru(Generic[Key]):
    """Recency order in four segments; sizes in any one unit (pages, bytes), `budget` in the same unit."""

    def __init__(self, budget: int) -> None:
        self._lists: tuple[OrderedDict[Key, int], ...] = tuple(OrderedDict() for _ in Segment)
        self._sizes = [0] * len(Segment)
        self._where: dict[Key, int] = {}  # key -> Segment
        self.resize(budget)

    def resize(self, budget: int) -> None:
        self._caps = (budget, budget, int(budget * PROTECTED_SHARE), int(budget * ANCHORED_SHARE))

    def __contains__(self, key: Key) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    @property
    def size(self) -> int:
        return sum(self._sizes)

    def add(self, key: Key, size: int, segment: int = Segment.PROBATION, *, oldest: bool = False) -> None:
        """Enter `key` as the most recent of its segment (`oldest`: as the next victim), wherever it was before."""
        if key in self._where:
            self.drop(key)
        self._lists[segment][key] = size
        if oldest:
            self._lists[segment].move_to_end(key, last=False)
        self._sizes[segment] += size
        self._where[key] = segment
        if self._sizes[segment] > self._caps[segment]:
            self._spill()

    def drop(self, key: Key) -> None:
        """Forget `key` if it is here."""
        segment = self._where.pop(key, None)
        if segment is not None:
            self._sizes[segment] -= self._lists[segment].pop(key)

    def resize_key(self, key: Key, size: int) -> None:
        """The size of `key` changed; its place did not."""
        segment = self._where[key]
        self._sizes[segment] += size - self._lists[segment][key]
        self._lists[segment][key] = size

    def touch(self, key: Key, segment: int | None = None) -> None:
        """Make `key` the most recent of its segment, or of a higher one."""
        here = self._where[key]
        self.add(key, self._lists[here][key], max(here, here if segment is None else segment))

    def demote(self, key: Key) -> None:
        """Move `key` to the lowest segment."""
        here = self._where[key]
        self.add(key, self._lists[here][key], Segment.SUPERSEDED)

    def _spill(self) -> None:
        for segment in (Segment.ANCHORED, Segment.PROTECTED):
            while self._sizes[segment] > self._caps[segment] and self._lists[segment]:
                key, size = self._lists[segment].popitem(last=False)
                self._sizes[segment] -= size
                below = segment - 1
                self._lists[below][key] = size
                self._sizes[below] += size
                self._where[key] = below

    def victim(self) -> Key | None:
        """The next to go; None when empty."""
        return next(self.order(), None)

    def order(self) -> Iterator[Key]:
        """All keys, the next victim first."""
        for entries in self._lists:
            yield from entries
