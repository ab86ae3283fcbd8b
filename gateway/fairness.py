"""A fair, bounded waiting line in front of a machine that can do only so much at a time.

Interactive requests go before batch ones, keys take turns inside a class, and a batch request is let through now and then so that
it never starves. Pure asyncio state of one process; nothing here blocks.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping

CLASSES = ("interactive", "batch")
# Of so many grants one goes to batch when both wait: batch keeps moving, an agent's user does not feel it.
BATCH_EVERY = 8


class Full(Exception):
    """The line is as long as it may be."""


class FairLine:
    """`async with`-free on purpose: a turn is admitted in one place and settled in another.

    `capacity` requests run at once (0 = no limit), at most `waiting` wait, `per_key` limits how many of one key run.
    """

    def __init__(self, capacity: int, waiting: int, per_key: Mapping[str, int] | None = None) -> None:
        self._capacity, self._waiting, self._per_key = capacity, waiting, dict(per_key or {})
        self._lines: dict[str, OrderedDict[str, deque[asyncio.Future]]] = {c: OrderedDict() for c in CLASSES}
        self._grants = 0
        self.running: Counter[str] = Counter()
        self.length = 0

    def enter_now(self, key: str) -> bool:
        """Take a place if one is free and nobody waits."""
        if self.length or not self._fits(key):
            return False
        self.running[key] += 1
        return True

    async def enter(self, key: str, kind: str = "interactive") -> None:
        """Wait for a place. Raises Full at once when the line is too long. A cancelled waiter leaves the line."""
        if self.enter_now(key):
            return
        if self.length >= self._waiting:
            raise Full
        future = asyncio.get_running_loop().create_future()
        self._lines[kind].setdefault(key, deque()).append(future)
        self.length += 1
        self._grant()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave(key)  # the place had been given just before
            else:
                self._forget(key, kind, future)
            raise

    def leave(self, key: str) -> None:
        """Give the place back."""
        self.running[key] -= 1
        if self.running[key] <= 0:
            del self.running[key]
        if self.length:
            self._grant()

    def _fits(self, key: str) -> bool:
        if self._capacity and self.running.total() >= self._capacity:
            return False
        limit = self._per_key.get(key, 0)
        return not limit or self.running[key] < limit

    def _grant(self) -> None:
        while (place := self._next()) is not None:
            kind, key = place
            line = self._lines[kind][key]
            future = line.popleft()
            if line:
                self._lines[kind].move_to_end(key)  # the next grant is another key's
            else:
                del self._lines[kind][key]
            self.length -= 1
            if not future.done():  # its waiter may have been cancelled and not have run yet
                self._grants += 1
                self.running[key] += 1
                future.set_result(None)

    def _next(self) -> tuple[str, str] | None:
        order = CLASSES[::-1] if self._grants % BATCH_EVERY == BATCH_EVERY - 1 else CLASSES
        return next(((kind, key) for kind in order for key in self._lines[kind] if self._fits(key)), None)

    def _forget(self, key: str, kind: str, future: asyncio.Future) -> None:
        line = self._lines[kind].get(key)
        if line is not None and future in line:
            line.remove(future)
            self.length -= 1
            if not line:
                del self._lines[kind][key]
