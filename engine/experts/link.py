"""The link that brings experts from the pool into slots: order, pieces, and who is told when they are there.

Which expert goes where is `slots`', when is `executor`'s. On a machine without a second memory the link is emulated: a thread
that copies at a given rate, with the control code of a real one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from engine.cores import wake_at_once
from engine.experts.slots import Fetch


class CopyFailed(Exception):
    """The bytes of an expert did not arrive; its slot holds nothing of worth."""


class TakenBack(CopyFailed):
    """It was cancelled while pieces of it were on their way."""


@dataclass(eq=False)
class _Job:
    """An expert that was asked for: which of its pieces begins next, how many are on their way."""

    fetch: Fetch
    next: int = 0
    under_way: int = 0
    problem: Exception | None = None  # no further piece begins


class Link:
    """Copies experts piece by piece on threads of its own, begun in the order they were asked for.

    `copy(key, slot, part)` moves one of `parts` pieces and returns its bytes; `check(key, slot)`, if there is one, raises when
    what came is not what it should be. A disk gives most to several `workers` at once: they share an expert's pieces, so experts
    come one after the other at its whole rate, and the first is computed while the next is on its way. `rate` in bytes per second
    holds a link of one worker to the speed of another machine's; None copies as fast as this one can.
    """

    def __init__(
        self,
        copy: Callable[[int, int, int], int],
        rate: float | None = None,
        workers: int = 1,
        parts: int = 1,
        check: Callable[[int, int], None] | None = None,
    ) -> None:
        assert rate is None or workers == 1, "an emulated wire carries one copy at a time"
        self._copy, self._rate, self._parts, self._check = copy, rate, parts, check
        self._lock = threading.Lock()
        self._wanted, self._arrived = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue: deque[_Job] = deque()  # pieces of these are yet to begin
        self._behind: deque[_Job] = deque()  # and of these, when there is nothing else
        self._jobs: dict[int, _Job] = {}  # by key, all that have not ended
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

    def submit(self, fetches: Collection[Fetch], behind: bool = False) -> None:
        """`behind`: only when nothing else is to be copied."""
        with self._lock:
            if self._closed:
                self._done.update((f.key, (time.perf_counter(), RuntimeError("the link is closed"))) for f in fetches)
                self._arrived.notify_all()
                return
            jobs = [_Job(fetch) for fetch in fetches]
            self._jobs.update((job.fetch.key, job) for job in jobs)
            (self._behind if behind else self._queue).extend(jobs)
            self._wanted.notify(len(jobs) * self._parts)

    def hurry(self, keys: Iterable[int]) -> None:
        """Those of submitted `keys` that were to be copied behind everything, or were taken back half way, are needed now."""
        with self._lock:
            for key in keys:
                job = self._jobs.get(key)
                if job is None or job in self._queue:
                    continue
                if job in self._behind:
                    self._behind.remove(job)
                elif not isinstance(job.problem, TakenBack):
                    continue  # its last pieces are on their way, or it has failed
                job.problem = None
                if job.next < self._parts:
                    self._queue.append(job)
                    self._wanted.notify(self._parts - job.next)

    def wait(self, key: int) -> float:
        """Until the bytes of a submitted `key` are there; returns since when. Raises CopyFailed."""
        with self._lock:
            self._arrived.wait_for(lambda: key in self._done)
            when, problem = self._done.pop(key)
        if isinstance(problem, TakenBack):
            raise problem
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
        """Take back those of `keys` that are not there yet; returns those of which nothing is on its way.

        The others must still be waited for: no further piece of them begins, and unless all had begun, they end as TakenBack.
        """
        taken = []
        with self._lock:
            for key in keys:
                job = self._jobs.get(key)
                if job is None or (job.under_way and job.next == self._parts):
                    continue
                self._drop(job)
                if job.under_way:
                    job.problem = job.problem or TakenBack(f"expert {key} was taken back")
                else:
                    del self._jobs[key]
                    taken.append(key)
        return taken

    def close(self) -> None:
        """End the threads; what is queued is not copied any more, and whoever waits is told."""
        with self._lock:
            self._closed = True
            for job in [*self._queue, *self._behind]:
                job.problem = job.problem or RuntimeError("the link was closed")
                if not job.under_way:
                    self._end(job)
            self._queue.clear()
            self._behind.clear()
            self._wanted.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        wake_at_once()
        free_at = 0.0  # when the emulated wire can begin the next copy
        while True:
            with self._lock:
                self._wanted.wait_for(lambda: self._closed or self._can_begin())
                if not self._can_begin():
                    return
                job, part = self._begin()
                began = time.perf_counter()
            problem: Exception | None = None
            try:
                size = self._copy(job.fetch.key, job.fetch.slot, part)
            except Exception as error:  # whoever waits decides; the link goes on
                problem, size = error, 0
            if self._rate:
                free_at = max(free_at, began) + size / self._rate
                rest = free_at - time.perf_counter()
                if rest > 0:
                    time.sleep(rest)
            self._landed(job, size, problem)

    def _can_begin(self) -> bool:
        """What is behind comes alone and one piece at a time: it takes nothing from the last pieces of what is needed, and
        whoever turns out to be needed instead waits for no more than that piece.
        """
        return bool(self._queue) or (bool(self._behind) and not self._active)

    def _begin(self) -> tuple[_Job, int]:
        """The next piece."""
        job = (self._queue or self._behind)[0]
        part, job.next = job.next, job.next + 1
        if job.next == self._parts:
            self._drop(job)
        if not self._active:
            self._since = time.perf_counter()
        self._active += 1
        job.under_way += 1
        return job, part

    def _landed(self, job: _Job, size: int, problem: Exception | None) -> None:
        with self._lock:
            self._active -= 1
            now = time.perf_counter()
            self.busy_s, self._since = self.busy_s + now - self._since, now
            self.bytes += size
            if problem is not None:
                job.problem = problem
                self._drop(job)
            whole = job.problem is None and job.under_way == 1 and job.next == self._parts
            if self._behind and not self._active:
                self._wanted.notify()
            if not whole or self._check is None:
                job.under_way -= 1
                if not job.under_way and (whole or job.problem is not None):
                    self._end(job)
                return
        try:  # without the lock: it reads all of it
            self._check(job.fetch.key, job.fetch.slot)
        except Exception as error:
            job.problem = error
        with self._lock:
            job.under_way -= 1
            self._end(job)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.fetch.key]
        self._done[job.fetch.key] = time.perf_counter(), job.problem
        self._arrived.notify_all()

    def _drop(self, job: _Job) -> None:
        """No further piece of it begins."""
        for queue in (self._queue, self._behind):
            if job in queue:
                queue.remove(job)
