"""The slots of fast memory: which expert lies in which, which may leave, which come in. Decides; copies nothing.

One pool for all layers. A key is `layer * E + expert`. A layer asks for its distinct keys at once (`request`); misses that are
fetched get a slot at once (`fetch`) and count as resident when their bytes have arrived (`landed`), or never (`lost`). Slots that
are being filled or used are pinned; everything else may be a victim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine.experts.policies import Policy, make_policy


@dataclass(frozen=True)
class Fetch:
    """Bytes of expert `key` are to be copied into `slot`; `evicted` is who had to leave."""

    key: int
    slot: int
    evicted: int | None = None


@dataclass(frozen=True)
class Request:
    """A layer's distinct keys: those in slots, and the misses, most recently used first (never used last)."""

    hits: tuple[int, ...]
    misses: tuple[int, ...]


@dataclass
class Counts:
    hits: int = 0
    misses: int = 0
    fetched: int = 0
    evicted: int = 0


class Slots:
    """`capacity` slots for the experts of all layers. Not thread-safe: one control loop owns it."""

    def __init__(self, capacity: int, layers: int, experts: int, policy: str = "lru") -> None:
        keys = layers * experts
        self.counts = Counts()
        self.where = np.full(keys, -1, np.int32)  # slot of a resident key
        self._policy_name = policy
        self._policy: Policy = make_policy(policy, capacity, layers, experts)
        self._used = [0] * keys  # when a key was last asked for; 0 never
        self._now = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._filling: dict[int, int] = {}  # key -> slot
        self._pins: dict[int, int] = {}
        self.capacity = capacity

    @property
    def policy(self) -> str:
        return self._policy_name

    @property
    def resident(self) -> list[int]:
        return np.nonzero(self.where >= 0)[0].tolist()

    def request(self, keys: Iterable[int]) -> Request:
        """Note that a layer asks for `keys`, distinct and its own, and tell hits from misses."""
        wanted = list(keys)
        slots = self.where.take(wanted).tolist()  # few keys: lists cost a fraction of what masks do
        hits = [key for key, slot in zip(wanted, slots, strict=True) if slot >= 0]
        misses = [key for key, slot in zip(wanted, slots, strict=True) if slot < 0]
        misses.sort(key=self._used.__getitem__, reverse=True)
        self._now += 1
        for key in wanted:
            self._used[key] = self._now
        self._policy.use(hits, misses)
        self.counts.hits += len(hits)
        self.counts.misses += len(misses)
        return Request(tuple(hits), tuple(misses))

    def room(self) -> int:
        """Slots that are free or whose expert may leave."""
        pinned = sum(slot >= 0 for slot in self.where.take(list(self._pins)).tolist()) if self._pins else 0
        return self.capacity - len(self._filling) - pinned

    def fetch(self, keys: Iterable[int], keep: Iterable[int] = ()) -> list[Fetch]:
        """Give slots to the first of `keys` that get one, victims picked in one pass. Resident or arriving keys are skipped.

        None of `keep` leaves for them.
        """
        wanted = [key for key in dict.fromkeys(keys) if self.where[key] < 0 and key not in self._filling]
        short = len(wanted) - len(self._free)
        victims = self._policy.victims(short, self._pins.keys() | keep if keep else self._pins) if short > 0 else []
        out = []
        for key in wanted[: len(self._free) + len(victims)]:
            if self._free:
                slot, evicted = self._free.pop(), None
            else:
                evicted = victims.pop(0)
                slot = int(self.where[evicted])
                self.where[evicted] = -1
                self.counts.evicted += 1
            self._filling[key] = slot
            out.append(Fetch(key, slot, evicted))
        assert not victims
        self.counts.fetched += len(out)
        return out

    def landed(self, key: int) -> None:
        """The bytes of a fetched key have arrived."""
        self.where[key] = self._filling.pop(key)
        self._policy.admit(key)

    def lost(self, key: int) -> None:
        """A fetch was given up: its slot is free again."""
        self._free.append(self._filling.pop(key))

    def filling(self, key: int) -> int:
        """The slot into which a fetched key comes that has not arrived."""
        return self._filling[key]

    def pin(self, keys: Iterable[int]) -> None:
        """Keys that must not leave until as many `unpin`s: they are being read."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def drop(self, keys: Iterable[int]) -> None:
        """Make resident keys leave, pinned or not in use by the caller's word."""
        for key in keys:
            if self.where[key] >= 0:
                self._policy.remove(key)
                self._free.append(int(self.where[key]))
                self.where[key] = -1
                self.counts.evicted += 1

    def resize(self, capacity: int) -> list[Fetch]:
        """Change the number of slots at a safe point: nothing pinned, nothing arriving.

        Slots 0..capacity-1 remain. The best experts stay: those in slots that go away move into slots of lesser ones that leave;
        each move is returned as a Fetch whose bytes the owner copies from the old slot (`evicted` is None).
        """
        assert not self._pins and not self._filling, "slots change only between steps"
        resident = len(self.resident)
        if resident > capacity:
            for key in self._policy.victims(resident - capacity, ()):
                self._free.append(int(self.where[key]))
                self.where[key] = -1
                self.counts.evicted += 1
        self._free = [s for s in self._free if s < capacity] + list(range(self.capacity, capacity))
        moves = []
        for key in self.resident:
            if self.where[key] >= capacity:
                moves.append(Fetch(key, self._free.pop()))
        for move in moves:
            self.where[move.key] = move.slot
        self.capacity = capacity
        return moves

    def check(self) -> None:
        """Every slot is free, filling or held by exactly one key (an assertion for tests and debugging)."""
        held = [int(self.where[k]) for k in self.resident]
        slots = sorted([*held, *self._free, *self._filling.values()])
        assert slots == list(range(self.capacity)), f"slots {slots} of {self.capacity}"
