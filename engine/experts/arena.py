"""Fast memory: an arena of expert-sized slots, and the link that copies experts from the pool into it.

`Arena` owns the bytes, `Link` the order and the speed of copies; which expert goes where is `slots`', when is `executor`'s. On a
machine without a second memory the link is emulated: a thread that copies at a given rate, with the control code of a real one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from engine.experts.pool import Pool, Room, copy_expert
from engine.experts.slots import Fetch
from engine.nn.experts import Bank

MANY = 8  # copies waiting: one token asks for no more of a layer in most models; it is a prompt, and only the rate counts


class Arena:
    """Slots for copies of a pool's experts. Raises MemoryError."""

    def __init__(self, pool: Pool, slots: int) -> None:
        self._pool = pool
        self._room = Room(pool.like, slots, pool.layers * pool.experts)

    @property
    def bank(self) -> Bank:
        """Row s is slot s; there may be more rows than slots in use."""
        return self._room.bank

    def put(self, key: int, slot: int) -> int:
        """Copy expert `key` of the pool into `slot`; returns its bytes."""
        return self._pool.read(key, self._room.bank, slot)

    def resize(self, slots: int, moves: Iterable[tuple[int, int]] = ()) -> None:
        """Have `slots` slots. `moves`: (old, new) slots of the experts that stay, all of which exist before and after.

        Fewer return their memory to the system at once. Raises MemoryError with everything as it was.
        """
        for old, new in moves:
            copy_expert(self._room.bank, old, self._room.bank, new)
        self._room.resize(slots)


class CopyFailed(Exception):
    """The bytes of an expert did not arrive; its slot holds nothing of worth."""


class Link:
    """Copies experts on threads of its own, begun in the order they were asked for.

    `copy(key, slot)` moves the bytes and returns their number. `rate` in bytes per second holds a link of one worker to the speed
    of another machine's; None copies as fast as this one can. A disk gives most to several `workers` at once. `few` of them copy
    when little is asked for: experts then come one after the other, and the first is computed while the next is on its way.
    """

    def __init__(
        self, copy: Callable[[int, int], int], rate: float | None = None, workers: int = 1, few: int | None = None
    ) -> None:
        assert rate is None or workers == 1, "an emulated wire carries one copy at a time"
        self._copy, self._rate = copy, rate
        self._few = min(few or workers, workers)
        self._lock = threading.Lock()
        self._wanted, self._arrived = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue: deque[Fetch] = deque()
        self._done: dict[int, tuple[float, Exception | None]] = {}  # key -> when, and what went wrong
        self._closed = False
        self._active, self._since = 0, 0.0  # copies under way, since when there was at least one
        self.bytes = 0
        self.busy_s = 0.0  # in which at least one copy was under way
        self._threads = [threading.Thread(target=self._work, name=f"expert-link-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def submit(self, fetches: Collection[Fetch]) -> None:
        with self._lock:
            if self._closed:
                self._done.update((f.key, (time.perf_counter(), RuntimeError("the link is closed"))) for f in fetches)
                self._arrived.notify_all()
            else:
                self._queue.extend(fetches)
                self._wanted.notify(len(fetches))

    def wait(self, key: int) -> float:
        """Until the bytes of a submitted `key` are there; returns since when. Raises CopyFailed."""
        with self._lock:
            self._arrived.wait_for(lambda: key in self._done)
            when, problem = self._done.pop(key)
        if problem is not None:
            raise CopyFailed(f"expert {key} could not be copied: {problem}") from problem
        return when

    def first(self, keys: Collection[int]) -> list[int]:
        """Wait for the first of the submitted `keys`; returns all of them that need not be waited for any more."""
        with self._lock:
            self._arrived.wait_for(lambda: not self._done.keys().isdisjoint(keys))
            return [key for key in keys if key in self._done]

    def arrived(self, key: int) -> bool:
        with self._lock:
            return key in self._done

    def cancel(self, keys: Iterable[int]) -> list[int]:
        """Take back those of `keys` that have not begun; returns them. The others must still be waited for."""
        with self._lock:
            wanted = set(keys)
            taken = [f.key for f in self._queue if f.key in wanted]
            self._queue = deque(f for f in self._queue if f.key not in wanted)
        return taken

    def close(self) -> None:
        """End the threads; what is queued is not copied any more, and whoever waits is told."""
        with self._lock:
            self._closed = True
            for fetch in self._queue:
                self._done[fetch.key] = time.perf_counter(), RuntimeError("the link was closed")
            self._queue.clear()
            self._wanted.notify_all()
            self._arrived.notify_all()
        for thread in self._threads:
            thread.join()

    def _can_begin(self) -> bool:
        at_once = self._few if len(self._queue) < MANY else len(self._threads)
        return bool(self._queue) and self._active < at_once

    def _work(self) -> None:
        free_at = 0.0  # when the emulated wire can begin the next copy
        while True:
            with self._lock:
                self._wanted.wait_for(lambda: self._closed or self._can_begin())
                if not self._queue:
                    return
                fetch = self._queue.popleft()
                began = time.perf_counter()
                if not self._active:
                    self._since = began
                self._active += 1
            problem: Exception | None = None
            try:
                size = self._copy(fetch.key, fetch.slot)
            except Exception as error:  # whoever waits decides; the link goes on
                problem, size = error, 0
            if self._rate:
                free_at = max(free_at, began) + size / self._rate
                rest = free_at - time.perf_counter()
                if rest > 0:
                    time.sleep(rest)
            with self._lock:
                self._active -= 1
                now = time.perf_counter()
                self.busy_s, self._since = self.busy_s + now - self._since, now
                self.bytes += size
                self._done[fetch.key] = now, problem
                self._arrived.notify_all()
