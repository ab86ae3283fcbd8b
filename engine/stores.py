"""What can be resized while the engine runs: slots of packed experts, KV pages, saved states, places for running requests.

Each store counts in units of its own and changes between two steps only. A change that cannot be made leaves the store as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.experts.executor import TieredExperts
from engine.experts.grouped import GroupedExperts
from engine.memory import MIN_CONTEXT, context_of, gib, pages_of
from engine.prefix.base import OutOfPages
from engine.prefix.cache import RadixCache
from engine.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.build import Parts

ENDLESS = 1 << 62


class CannotResize(Exception):
    """Why memory stays as it is. One line with the arithmetic."""


class Store(Protocol):
    """`field` names it in commands. A unit takes `each` bytes; `have`, `least`, `most` and `held` count units.

    `held` is what cannot go without interrupting a request, `unused` bytes of `have` that take no memory yet. `on_device`: in
    the memory of a device of its own.
    """

    field: str
    each: int
    on_device: bool

    @property
    def have(self) -> int: ...

    @property
    def least(self) -> int: ...

    @property
    def most(self) -> int: ...

    @property
    def held(self) -> int: ...

    @property
    def unused(self) -> int: ...

    def why_least(self) -> str:
        """What `least` is needed for."""

    def resize(self, count: int) -> None:
        """Raises CannotResize or MemoryError with everything as it was."""

    def keep(self) -> None:
        """What there is now was asked for."""

    def trim(self) -> int:
        """Return what memory can be returned without having less; for the worst hour. Returns its bytes."""


class Plain:
    """A store in host memory with nothing to remember and nothing to trim."""

    on_device = False

    def keep(self) -> None: ...

    def trim(self) -> int:
        return 0


class ExpertStore(Plain):
    """Slots of packed experts (bytes of them, where they are of several kinds): the best ones stay."""

    field = "expert_bytes"
    unused = 0  # taken at once, so that no step waits for the kernel's zeros

    def __init__(self, executor: TieredExperts | GroupedExperts) -> None:
        self._executor, self.each = executor, executor.slot_bytes
        self.least = self.held = executor.least
        self.most = executor.most
        self.on_device = executor.on_device

    @property
    def have(self) -> int:
        return self._executor.capacity

    def why_least(self) -> str:
        return self._executor.what

    def resize(self, count: int) -> None:
        self._executor.resize(count)


class PageStore:
    """KV pages. What no request holds is evicted first; then the youngest requests give up theirs and are computed again later.

    The longest context of a new request follows the number of pages, up to `wanted` tokens.
    """

    field = "kv_bytes"
    on_device = False

    def __init__(self, prefix: RadixCache, scheduler: Scheduler, wanted: int) -> None:
        self._prefix, self._scheduler, self._wanted = prefix, scheduler, wanted
        self.each = prefix.storage.page_bytes
        self._promised = scheduler.limits.max_context  # what clients may count on, whatever memory does by itself

    @property
    def have(self) -> int:
        return self._prefix.pool.total

    @property
    def most(self) -> int:
        return self._prefix.pool.most

    @property
    def least(self) -> int:
        return pages_of(max(self._scheduler.longest, min(MIN_CONTEXT, self._wanted)))

    @property
    def held(self) -> int:
        pages = {page for seq in self._scheduler.running for page in seq.lease.pages}
        return max(pages_of(self._promised), len(pages) + len(self._scheduler.running))  # and one each to go on with

    @property
    def unused(self) -> int:
        return (self.have - self._prefix.pool.touched) * self.each

    def why_least(self) -> str:
        longest = self._scheduler.longest
        return f"a request of {longest} tokens" if longest > MIN_CONTEXT else f"the smallest context ({MIN_CONTEXT} tokens)"

    def resize(self, count: int) -> None:
        while True:
            try:
                self._prefix.resize(pages=count)
                break
            except OutOfPages as problem:
                if not self._scheduler.give_way("its memory is given to something else"):
                    raise CannotResize(str(problem)) from problem
        self._scheduler.resized(max_context=context_of(count, self._wanted))

    def keep(self) -> None:
        self._promised = self._scheduler.limits.max_context

    def trim(self) -> int:
        return self._prefix.trim() * self.each


class StateStore(Plain):
    """The budget for saved recurrent states, in bytes."""

    field = "state_bytes"
    each, least, held, most = 1, 0, 0, ENDLESS

    def __init__(self, prefix: RadixCache) -> None:
        self._prefix = prefix

    @property
    def have(self) -> int:
        return self._prefix.ram.state_budget

    @property
    def unused(self) -> int:
        return max(0, self.have - self._prefix.ram.state_order.size)

    def why_least(self) -> str:
        return "nothing"

    def resize(self, count: int) -> None:
        self._prefix.resize(state_bytes=count)


class PlaceStore(Plain):
    """Places for running requests, each with a recurrent state where the model has one."""

    field = "max_running"
    least = 1

    def __init__(self, prefix: RadixCache, scheduler: Scheduler) -> None:
        self._prefix, self._scheduler = prefix, scheduler
        self.each = prefix.storage.state_bytes

    @property
    def have(self) -> int:
        return self._prefix.slots.total

    @property
    def most(self) -> int:
        return self._prefix.slots.most

    @property
    def held(self) -> int:
        return max(1, len(self._scheduler.running))

    @property
    def unused(self) -> int:
        return (self.have - self._prefix.slots.touched) * self.each

    def why_least(self) -> str:
        return "one request"

    def resize(self, count: int) -> None:
        while len(self._scheduler.running) > count:
            self._scheduler.give_way("fewer requests are to run together")
        try:
            self._prefix.resize(slots=count)
        except OutOfPages as problem:
            raise CannotResize(str(problem)) from problem
        self._scheduler.resized(max_running=count)


def stores_of(parts: Parts, scheduler: Scheduler) -> list[Store]:
    """What can move in this engine."""
    prefix, stores = parts.prefix, []
    if parts.experts and parts.experts.slots:
        stores.append(ExpertStore(parts.experts.slots))
    if isinstance(prefix, RadixCache):
        if prefix.storage.page_bytes:
            stores.append(PageStore(prefix, scheduler, parts.wanted_context or parts.limits.max_context))
        if prefix.storage.state_bytes:
            stores.append(StateStore(prefix))
        stores.append(PlaceStore(prefix, scheduler))
    return stores


def describe(store: Store) -> dict[str, object]:
    sizes = {"bytes": store.have * store.each, "unused_bytes": store.unused}
    return {**sizes, "units": store.have, "least": store.least, "most": store.most}


def size_of(store: Store, count: int) -> str:
    """For people."""
    return gib(count * store.each) if store.each else str(count)
