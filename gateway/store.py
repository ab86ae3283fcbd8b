"""Shared state behind routing and limits: counters in windows and small values with an age. Every call is one atomic step.

`MemoryStore` is the default and serves one gateway process. All of it is bounded; what falls out is the oldest.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

# 100,000 sessions or keys at ~300 bytes each are 30 MB; more than that within the life of an entry is an attack.
MAX_ENTRIES = 100_000


class Grant(msgspec.Struct, frozen=True):
    """`ok`: the amount was booked. `remaining` of the window; `wait` seconds until the amount would fit (0 when ok)."""

    ok: bool
    remaining: float
    wait: float = 0.0


class Store(Protocol):
    async def take(self, name: str, amount: float, limit: float, window: float) -> Grant:
        """Book `amount` against `limit` per `window` seconds, if it fits. Negative amounts give back."""
        ...

    async def put(self, name: str, value: bytes, ttl: float) -> None: ...

    async def get(self, name: str) -> bytes | None: ...

    async def close(self) -> None: ...


class MemoryStore:
    """A Store in this process. Windows are fixed, aligned to the first booking."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_entries: int = MAX_ENTRIES) -> None:
        self._clock = clock
        self._max = max_entries
        self._windows: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (end, used)
        self._values: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # name -> (end, value)

    async def take(self, name: str, amount: float, limit: float, window: float) -> Grant:
        now = self._clock()
        end, used = self._windows.get(name, (0.0, 0.0))
        if now >= end:
            end, used = now + window, 0.0
        if amount > 0 and used + amount > limit:
            self._keep(self._windows, name, (end, used))
            return Grant(False, max(0.0, limit - used), end - now)
        used = max(0.0, used + amount)
        self._keep(self._windows, name, (end, used))
        return Grant(True, limit - used)

    async def put(self, name: str, value: bytes, ttl: float) -> None:
        self._keep(self._values, name, (self._clock() + ttl, value))

    async def get(self, name: str) -> bytes | None:
        end, value = self._values.get(name, (0.0, b""))
        if self._clock() >= end:
            self._values.pop(name, None)
            return None
        return value

    def _keep(self, table: OrderedDict, name: str, entry: tuple) -> None:
        table[name] = entry
        table.move_to_end(name)
        if len(table) > self._max:
            table.popitem(last=False)

    async def close(self) -> None:
        self._windows.clear()
        self._values.clear()
