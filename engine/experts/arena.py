"""Fast memory: an arena of expert-sized slots. Which expert goes where is `slots`', who copies is `link`."""

from __future__ import annotations

from collections.abc import Iterable

from engine.experts.pool import Pool, Room, copy_expert
from engine.nn.experts import Bank


class Arena:
    """Slots for copies of a pool's experts. Raises MemoryError."""

    def __init__(self, pool: Pool, slots: int) -> None:
        self._pool = pool
        self._room = Room(pool.like, slots, pool.layers * pool.experts)

    @property
    def bank(self) -> Bank:
        """Row s is slot s; there may be more rows than slots in use."""
        return self._room.bank

    def put(self, key: int, slot: int, part: int) -> int:
        """Copy a piece of expert `key` of the pool into `slot`; returns its bytes."""
        return self._pool.read(key, self._room.bank, slot, part)

    def check(self, key: int, slot: int) -> None:
        """Raises OSError when what lies in `slot` is not expert `key`."""
        self._pool.check(key, self._room.bank, slot)

    def resize(self, slots: int, moves: Iterable[tuple[int, int]] = ()) -> None:
        """Have `slots` slots. `moves`: (old, new) slots of the experts that stay, all of which exist before and after.

        Fewer return their memory to the system at once. Raises MemoryError with everything as it was.
        """
        for old, new in moves:
            copy_expert(self._room.bank, old, self._room.bank, new)
        self._room.resize(slots)
