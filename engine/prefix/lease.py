"""A live sequence's hold on the cache; see `base.Lease` for the contract."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.prefix.anchors import Stop
from engine.prefix.base import Match
from engine.prefix.policy import Segment
from engine.prefix.radix import Node

if TYPE_CHECKING:
    from engine.prefix.cache import RadixCache


class RadixLease:
    def __init__(self, cache: RadixCache, session: str, match: Match, tokens: array, slot: int) -> None:
        self.match = match
        self.tokens = tokens
        self.pages: list[int] = []
        self.slot = slot
        self.spare: int | None = None  # a second slot, while a step is on its way that leaves a state in it
        self.session = session
        self.keep = True
        self.segment = Segment.PROBATION  # of what it adds: a conversation that grows is protected up to its last token
        self.stops: list[Stop] = []
        self.published = match.common  # tokens of it that are in the tree, readable by others
        self.kept: Node | None = None  # the deepest node it published
        self.locked: Node | None = None  # the deepest node it holds
        self.answered = False
        self.closed = False
        self._cache = cache

    def grow(self, tokens: int) -> None:
        if tokens > len(self.tokens):
            self._cache.answering(self)
        missing = -(-tokens // self._cache.page) - len(self.pages)
        if missing > 0:
            own = len(self.pages) + missing - self.match.common // self._cache.page
            self.pages += self._cache.take(missing, own if self.segment == Segment.PROBATION else 0)

    def next_stop(self, start: int, end: int) -> int:
        return min((s.offset for s in self.stops if start < s.offset <= end), default=end)

    def spare_slot(self) -> int | None:
        return self._cache.spare_slot(self)

    def checkpoint(self, tokens: Sequence[int], kind: str = "", slot: int | None = None) -> None:
        self._cache.checkpoint(self, tokens, kind, slot)

    def close(self, tokens: Sequence[int], reason: str) -> None:
        self._cache.close(self, tokens, reason)
