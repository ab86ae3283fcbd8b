"""A prefix cache that never reuses anything: the smallest correct `PrefixCache`, and the model the clever one is tested against.

Owns a free list of pages and a free list of slots, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.ipc import Anchor, token_array
from engine.nn.batch import PAGE, Cache
from engine.prefix.base import Match, OutOfPages


class NaiveLease:
    """Pages and one state slot of one sequence, all its own."""

    def __init__(self, owner: NaivePrefixCache, tokens: Sequence[int], slot: int) -> None:
        self.match = Match(common=0, reason="no-reuse")
        self.tokens = token_array(tokens)
        self.pages: list[int] = []
        self.slot = slot
        self._owner = owner
        self._open = True

    def grow(self, tokens: int) -> None:
        missing = -(-tokens // PAGE) - len(self.pages)
        if missing > len(self._owner.free_pages):
            raise OutOfPages(f"{missing} pages wanted, {len(self._owner.free_pages)} free")
        for _ in range(missing):
            self.pages.append(self._owner.free_pages.pop())

    def next_stop(self, start: int, end: int) -> int:
        return end

    def spare_slot(self) -> None:
        """Keeps nothing."""

    def checkpoint(self, tokens: Sequence[int], kind: str = "", slot: int | None = None) -> None:
        """Keeps nothing."""

    def close(self, tokens: Sequence[int], reason: str) -> None:
        if not self._open:
            return
        self._open = False
        self._owner.free_pages.extend(reversed(self.pages))
        self._owner.free_slots.append(self.slot)
        self.pages = []


class NaivePrefixCache:
    def __init__(self, cache: Cache, pages: int, slots: int) -> None:
        self._cache = cache
        self.pages, self.slots = pages, slots
        self.free_pages = list(range(pages))[::-1]
        self.free_slots = list(range(slots))[::-1]

    def open(self, tokens: Sequence[int], *, session: str, anchors: Sequence[Anchor], **more: object) -> NaiveLease:
        if not self.free_slots:
            raise OutOfPages("no free state slot")
        slot = self.free_slots.pop()
        for state in self._cache.states:
            if state is not None:
                state.conv[slot].zero_()
                state.s[slot].zero_()
        return NaiveLease(self, tokens, slot)

    def status(self) -> dict[str, object]:
        return {
            "kind": "naive",
            "pages": {"total": self.pages, "free": len(self.free_pages)},
            "slots": {"total": self.slots, "free": len(self.free_slots)},
        }

    def tick(self) -> bool:
        return False

    def flush(self, tier: str = "all") -> dict[str, int]:
        return {}

    def delete_session(self, session: str) -> dict[str, int]:
        return {}

    def resize(self, **sizes: int) -> None:
        raise NotImplementedError("nothing moves in the model that tests compare with")

    def shutdown(self) -> None:
        """Nothing is kept."""
