"""Turns the write queue had no room for, until it has: one a session, the newest. Owns which, not how they are written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.prefix.radix import Node, RadixTree

MOST = 64  # sessions that wait; a node and a name each


@dataclass(frozen=True)
class Turn:
    """The path to the end of what is to be written, its pages (page i holds tokens [i * page, ...)), whose it is."""

    path: list[Node]
    pages: list[int]
    owner: str
    segment: int


class Unwritten:
    """`resumable` tells whether a sequence can go on from a node in memory."""

    def __init__(self, tree: RadixTree, resumable: Callable[[Node], bool]) -> None:
        self._tree, self._resumable = tree, resumable
        self._waiting: OrderedDict[str, tuple[Node, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, node: Node, owner: str, segment: int) -> bool:
        """False when too many wait already."""
        if owner not in self._waiting and len(self._waiting) >= MOST:
            return False
        self._waiting[owner] = node, segment
        return True

    def forget(self, owner: str | None = None) -> None:
        """What `owner` (None: anybody) waits to have written is not wanted any more."""
        if owner is None:
            self._waiting.clear()
        else:
            self._waiting.pop(owner, None)

    def take(self) -> Turn | None:
        """The one that waits longest, as far as memory still holds it; None when that is nothing."""
        owner, (node, segment) = self._waiting.popitem(last=False)
        path = self._tree.path_to(node)
        while path and not (path[-1].pages is not None and self._resumable(path[-1])):
            path.pop()
        return Turn(path, self._tree.pages_of(path, path[-1].end), owner, segment) if path else None
