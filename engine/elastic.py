"""Memory that moves while the engine runs: by command, and by itself when it runs short.

Called between steps only, which is the safe point: nothing is being computed and queued requests go on waiting. Answers do not
change: slots hold copies, what is evicted is computed again. A command is checked before anything is changed, and undone as a
whole when one of its parts fails.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from engine.experts.pressure import PAUSE_S, Governor, Memory, read_device, read_memory
from engine.hostmem import total_bytes
from engine.memory import gib
from engine.promises import Promise
from engine.protocol import log_line
from engine.stores import ENDLESS, CannotResize, PlaceStore, Store, describe, size_of

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at memory: PSI's own window is ten seconds, a leak takes longer than this

Change = tuple[Store, int]  # and how many units it is to have


class _Place:
    """Stores that share one memory: the machine's, or a device's own."""

    def __init__(self, stores: Sequence[Store], total: int, read: Callable[[], Memory], promise: Promise | None) -> None:
        self.stores, self.read, self._promise = tuple(stores), read, promise
        self.governor = Governor(total)
        self.trimmed = float("-inf")

    @property
    def free(self) -> int:
        """Available, and promised to nobody else."""
        return self.read().available - (self._promise.others() if self._promise else 0)


class Elastic:
    """`stores` share the memory of one machine, or lie `on_device`, whose free and all bytes `device` tells as
    torch.cuda.mem_get_info does. `mapped` bytes of weights
    seem available and are not. What they had at first, or were told to have, is what they grow back to.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        total: int | None = None,
        read: Callable[[], Memory] | None = None,
        promise: Promise | None = None,
        device: Callable[[], tuple[int, int]] | None = None,
        mapped: int = 0,
    ) -> None:
        self._stores, self._promise, self._mapped = tuple(stores), promise, mapped
        self._wanted = {store.field: store.have for store in stores}
        there = [store for store in stores if store.on_device and device]
        here = [store for store in stores if store not in there]
        self._host = _Place(here, total or total_bytes() or ENDLESS, read or partial(read_memory, mapped=mapped), promise)
        self._places = [self._host]
        if device and there:
            self._places.append(_Place(there, device()[1], lambda: read_device(device), None))
        self._looked = float("-inf")
        self.moves = 0
        self._keep_promise()

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(store.field for store in self._stores)

    def status(self) -> dict[str, object]:
        memory = self._host.read()
        stores = {store.field: {**describe(store), "wanted": self._wanted[store.field]} for store in self._stores}
        device = next((place for place in self._places if place is not self._host), None)
        there = {"device_available": device.read().available} if device else {}
        return {"available": memory.available, "stalled": memory.stalled, **there, "moves": self.moves, "stores": stores}

    # --- by command

    def check(self, sizes: Mapping[str, int]) -> list[Change]:
        """Units that `sizes` (bytes by field; `max_running` counts) come to. Raises CannotResize; changes nothing."""
        changes = [(store, self._units(store, sizes[store.field])) for store in self._stores if store.field in sizes]
        after = {store.field: count for store, count in changes}
        for place in self._places:
            if any(count > store.have for store, count in changes if store in place.stores):
                self._fits(place, after)
        return changes

    def _fits(self, place: _Place, after: Mapping[str, int]) -> None:
        own = sum(store.have * store.each - store.unused for store in place.stores)
        whole = {store.field: after.get(store.field, store.have) * store.each for store in place.stores}
        need, free = sum(whole.values()) - own, place.free
        if need > free:
            kinds = ", ".join(f"{field} {gib(size)}" for field, size in whole.items() if size)
            raise CannotResize(f"{kinds} need {gib(need)} more than is in use now, {gib(free)} are available: ask for less")

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
            for place in self._places:
                self._follow(now, place)
            self._keep_promise()
        return LOOK_S

    def _keep_promise(self) -> None:
        """Tell other engines what of all this was not taken yet, or seems not to be: mapped weights."""
        if self._promise:
            self._promise.keep(sum(store.unused for store in self._host.stores) + self._mapped)

    def _follow(self, now: float, place: _Place) -> None:
        stores = [store for store in place.stores if not isinstance(store, PlaceStore)]  # requests are not interrupted
        memory = place.read()
        floors = [min(max(s.least, s.held), s.have) for s in stores]
        wanted = [max(self._wanted[s.field], floor) for s, floor in zip(stores, floors, strict=True)]
        have, least, most = (_bytes(stores, counts) for counts in ([s.have for s in stores], floors, wanted))
        target = place.governor.target(now, have, least, most, memory)
        if target == have:
            if have <= least and place.governor.short(memory) and now - place.trimmed >= PAUSE_S:
                place.trimmed = now
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
