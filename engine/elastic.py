"""Memory that moves while the engine runs: by command, and by itself when it runs short.

Called between steps only, which is the safe point: nothing is being computed and queued requests go on waiting. Answers do not
change: slots hold copies, what is evicted is computed again. A command is checked before anything is changed, and undone as a
whole when one of its parts fails.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from engine.experts.pressure import PAUSE_S, Governor, Memory, read_memory
from engine.hostmem import total_bytes
from engine.memory import gib
from engine.promises import Promise
from engine.protocol import log_line
from engine.stores import ENDLESS, CannotResize, PlaceStore, Store, describe, size_of

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at memory: PSI's own window is ten seconds, a leak takes longer than this

Change = tuple[Store, int]  # and how many units it is to have


class Elastic:
    """`stores` share the memory of one machine. What they had at first, or were told to have, is what they grow back to."""

    def __init__(
        self,
        stores: Sequence[Store],
        total: int | None = None,
        read: Callable[[], Memory] = read_memory,
        promise: Promise | None = None,
    ) -> None:
        self._stores, self._read, self._promise = tuple(stores), read, promise
        self._wanted = {store.field: store.have for store in stores}
        self._governor = Governor(total or total_bytes() or ENDLESS)
        self._looked = self._trimmed = float("-inf")
        self.moves = 0
        self._keep_promise()

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(store.field for store in self._stores)

    def status(self) -> dict[str, object]:
        memory = self._read()
        stores = {store.field: {**describe(store), "wanted": self._wanted[store.field]} for store in self._stores}
        return {"available": memory.available, "stalled": memory.stalled, "moves": self.moves, "stores": stores}

    # --- by command

    def check(self, sizes: Mapping[str, int]) -> list[Change]:
        """Units that `sizes` (bytes by field; `max_running` counts) come to. Raises CannotResize; changes nothing."""
        changes = [(store, self._units(store, sizes[store.field])) for store in self._stores if store.field in sizes]
        after = {store.field: count for store, count in changes}
        if any(count > store.have for store, count in changes):
            own = {store.field: store.have * store.each - store.unused for store in self._stores}
            whole = {store.field: after.get(store.field, store.have) * store.each for store in self._stores}
            need, free = (
                sum(whole.values()) - sum(own.values()),
                self._read().available - (self._promise.others() if self._promise else 0),
            )
            if need > free:
                kinds = ", ".join(f"{field} {gib(size)}" for field, size in whole.items() if size)
                raise CannotResize(f"{kinds} need {gib(need)} more than is in use now, {gib(free)} are available: ask for less")
        return changes

    def set(self, sizes: Mapping[str, int]) -> None:
        """Change all of it or nothing, and keep to it. Raises CannotResize with everything as it was."""
        changes = self.check(sizes)
        changes.sort(key=lambda change: change[1] > change[0].have)  # what shrinks makes room for what grows
        done: list[Change] = []
        for store, count in changes:
            done.append((store, store.have))
            try:
                if count != store.have:
                    store.resize(count)
            except Exception as problem:
                log.warning(log_line("memory not moved", what=store.field, units=done[-1][1], asked=count, why=str(problem)))
                left = self._undo(done)
                raise CannotResize(f"{store.field}: {problem}; {left or 'nothing was changed'}") from problem
        for store, before in done:
            self._wanted[store.field] = store.have
            store.keep()
            if store.have != before:
                self._tell(store, before, "asked for", logging.INFO)
        self._keep_promise()

    def _undo(self, done: Sequence[Change]) -> str:
        """Last first. Returns what could not be undone, "" when everything was."""
        left = []
        for store, before in reversed(done):
            try:
                if store.have != before:
                    store.resize(before)
            except Exception as problem:  # the others must still be undone
                log.error(log_line("memory not moved back", what=store.field, units=store.have, before=before, why=str(problem)))
                left.append(f"{store.field} stays at {size_of(store, store.have)}")
        return ", ".join(left)

    def _units(self, store: Store, size: int) -> int:
        counted = isinstance(store, PlaceStore)
        count, least = size if counted else size // store.each, store.least
        if count < least:
            asked = f"{size} are asked for" if counted else f"{gib(size)} hold {count}"
            raise CannotResize(f"{store.field}: {store.why_least()} needs {least} ({size_of(store, least)}), {asked}")
        if count > store.most:
            log.info(log_line("memory asked for is more than there is use for", what=store.field, most=store.most))
        return min(count, store.most)

    # --- by itself

    def tick(self, now: float) -> float:
        """Look at memory if it is time, and follow it; returns the seconds until it wants to be called again."""
        if now - self._looked >= LOOK_S:
            self._looked = now
            movable = [store for store in self._stores if not isinstance(store, PlaceStore)]  # requests are not interrupted
            self._follow(now, movable, self._read())
            self._keep_promise()
        return LOOK_S

    def _keep_promise(self) -> None:
        """Tell other engines what of all this was not taken yet."""
        if self._promise:
            self._promise.keep(sum(store.unused for store in self._stores))

    def _follow(self, now: float, stores: Sequence[Store], memory: Memory) -> None:
        floors = [min(max(s.least, s.held), s.have) for s in stores]
        wanted = [max(self._wanted[s.field], floor) for s, floor in zip(stores, floors, strict=True)]
        have, least, most = (_bytes(stores, counts) for counts in ([s.have for s in stores], floors, wanted))
        target = self._governor.target(now, have, least, most, memory)
        if target == have:
            if have <= least and self._governor.short(memory) and now - self._trimmed >= PAUSE_S:
                self._trimmed = now
                self._trim(stores, memory)
            return
        share = (target - least) / (most - least)  # the same of every store's room between floor and wanted
        for store, low, high in zip(stores, floors, wanted, strict=True):
            goal = low + share * (high - low)
            # rounded outwards, so that every move moves something
            count = min(store.have, int(goal)) if target < have else max(store.have, math.ceil(goal))
            if count != store.have:
                self._move(store, count, memory)

    def _trim(self, stores: Sequence[Store], memory: Memory) -> None:
        """Nothing can have less, and memory is still short: what was kept for later is forgotten and its memory returned."""
        gone = sum(store.trim() for store in stores)
        if gone:
            facts = {"available": gib(memory.available), "stalled": memory.stalled}
            log.warning(log_line("memory returned", size=gib(gone), why="memory is short and everything at its least", **facts))

    def _move(self, store: Store, count: int, memory: Memory) -> None:
        before, why = store.have, "memory is short" if count < store.have else "memory is free again"
        try:
            store.resize(count)
        except (MemoryError, CannotResize) as problem:
            log.warning(log_line("memory not moved", what=store.field, units=before, asked=count, why=str(problem)))
            return
        facts = {"available": gib(memory.available), "stalled": memory.stalled}
        self._tell(store, before, why, logging.WARNING if count < before else logging.INFO, **facts)

    def _tell(self, store: Store, before: int, why: str, level: int, **facts: object) -> None:
        self.moves += 1
        sizes = {"size": size_of(store, store.have), "before": size_of(store, before)}
        log.log(level, log_line("memory moved", what=store.field, **sizes, why=why, **facts))


def _bytes(stores: Sequence[Store], counts: Sequence[int]) -> int:
    return sum(count * store.each for store, count in zip(stores, counts, strict=True))
