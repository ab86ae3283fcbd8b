"""Durable records: files plus journal, written by one thread, read by the engine loop. Owns I/O order, no policy.

Files first, then the journal entry that makes them known. The engine loop hands over jobs and collects outcomes; it never waits
for the disk unless it needs the pages a job still holds.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from engine.prefix.files import KV, STATE, Files, buffer_of, retire_strangers, strangers
from engine.prefix.journal import Drop, DropState, Frame, Journal, Put, rewrite
from engine.prefix.ledger import Ledger, condense, read
from engine.protocol import log_line

logger = logging.getLogger(__name__)

MAX_JOBS = 256
INDEX_EVERY = 1000  # frames behind the index after which a stop, or a start, writes it anew: reading them takes 5 ms


@dataclass(frozen=True)
class WriteJob:
    """`rows` and `state` produce the buffers when the thread gets to it, so that a waiting job costs no copy."""

    put: Put
    rows: Callable[[], Sequence[memoryview]]
    state: Callable[[], Sequence[memoryview]]
    pages: list[int]  # held for the job; dropped by the loop when the outcome is collected


@dataclass(frozen=True)
class Outcome:
    job: WriteJob
    error: str = ""  # "" = stored


@dataclass(frozen=True)
class _Sweep:
    known: set[int]
    before: float


@dataclass(frozen=True)
class _Condense:
    """Write the index of the journal."""


@dataclass
class _Stop:
    done: threading.Event = field(default_factory=threading.Event)


class DiskStore:
    """The records under `root` that belong to `identity`. Its methods are called by the engine loop only.

    Raises OSError when the directory cannot be made, files.Busy when another server has it.
    """

    def __init__(self, root: Path, identity: bytes) -> None:
        self._files = Files(root / identity.hex(), identity)
        self._files.open()
        self.others = len(strangers(root, self._files.root))  # what other weights, templates, kernels left here
        self._journal = Journal(self._files.root / "journal")
        self._index = self._files.root / "index"
        self._unindexed = 0  # frames of the journal behind its index
        self._jobs: queue.Queue[WriteJob | Frame | _Sweep | _Condense | _Stop] = queue.Queue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._failed: set[int] = set()
        self._waiting: dict[int, WriteJob] = {}
        self.errors: list[str] = []  # of notes and sweeps; writes report through their outcome
        self.pending_pages = 0
        self.swept = 0
        self._reader = ThreadPoolExecutor(1, "kv-reader")
        self._buffers = (memoryview(b""), memoryview(b""))  # kept: fresh memory costs as much as reading into it
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def jobs(self) -> list[WriteJob]:
        """Jobs whose outcome has not been collected."""
        return list(self._waiting.values())

    @property
    def directory(self) -> str:
        return str(self._files.root)

    def load(self) -> Ledger:
        """What the journal comes to; call before the first write."""
        ledger = read(self._journal.path, self._index)
        self._unindexed = ledger.scanned
        return ledger

    def compact(self, frames: Iterable[Frame]) -> str:
        """Replace the journal; call before the first write. Returns the error, "" when done."""
        try:
            self._unindexed = rewrite(self._journal.path, frames)
        except OSError as e:
            return e.strerror or str(e)
        return ""

    def condense(self) -> None:
        """Write the journal's index if it has fallen behind."""
        if self._unindexed >= INDEX_EVERY:
            self._jobs.put(_Condense())

    def read(self, record: int, part: str, key: bytes, size: int) -> memoryview:
        """See Files.read. Raises Damaged."""
        return self._files.read(record, part, key, size)

    def read_in_turn(self, wanted: Sequence[tuple[int, bytes, int]]) -> Iterator[memoryview]:
        """The KV payloads of `wanted` (record, key, size); while the caller uses one, the next is read.

        A payload is valid until the next is asked for. Raises Damaged for the one whose turn it is.
        """
        largest = max((size for _, _, size in wanted), default=0)
        if self._buffers[0].nbytes < largest:
            self._buffers = (buffer_of(largest), buffer_of(largest))
        reading: list[Future[memoryview]] = []
        for n in range(len(wanted) + 1):
            if n < len(wanted):
                record, key, size = wanted[n]
                reading.append(self._reader.submit(self._files.read, record, KV, key, size, self._buffers[n % 2]))
            if n:
                yield reading[n - 1].result()

    def submit(self, job: WriteJob) -> None:
        assert self.pending < MAX_JOBS
        self._waiting[job.put.id] = job
        self.pending_pages += len(job.pages)
        self._jobs.put(job)

    def note(self, frame: Frame) -> None:
        """Append to the journal; for Drop and DropState also delete the files."""
        self._jobs.put(frame)

    def sweep(self, known: set[int], before: float) -> None:
        """Delete files no record names, and what other identities left before the wall-clock time `before`."""
        self._jobs.put(_Sweep(known, before))

    def collect(self, wait_s: float = 0.0) -> list[Outcome]:
        """Outcomes so far; waits up to `wait_s` for the first when there is none and one is due."""
        out: list[Outcome] = []
        while self.pending:
            try:
                outcome = self._outcomes.get(timeout=wait_s) if wait_s and not out else self._outcomes.get_nowait()
            except queue.Empty:
                break
            del self._waiting[outcome.job.put.id]
            self.pending_pages -= len(outcome.job.pages)
            out.append(outcome)
        return out

    def stop(self, timeout_s: float) -> bool:
        """Finish what is queued; False if that took longer than `timeout_s`."""
        stop = _Stop()
        self._jobs.put(stop)
        finished = stop.done.wait(timeout_s)
        self._reader.shutdown(wait=False)
        if finished:
            self._journal.close()
            self._files.close()
        return finished

    def _run(self) -> None:
        while True:
            item = self._jobs.get()
            if isinstance(item, _Stop):
                if self._unindexed >= INDEX_EVERY:
                    self._condense()
                item.done.set()
                return
            if isinstance(item, _Condense):
                self._condense()
            elif isinstance(item, WriteJob):
                self._outcomes.put(Outcome(item, self._write(item)))
            else:
                self._housekeep(item)

    def _write(self, job: WriteJob) -> str:
        put = job.put
        if put.parent in self._failed:
            self._failed.add(put.id)
            return "what it continues could not be stored"
        try:
            self._files.write(put.id, KV, put.key, job.rows())
            if put.state_bytes:
                self._files.write(put.id, STATE, put.key, job.state())
            self._append(put)
        except OSError as e:
            self._failed.add(put.id)
            return e.strerror or str(e)
        return ""

    def _append(self, frame: Frame) -> None:
        self._journal.append((frame,))
        self._unindexed += 1

    def _condense(self) -> None:
        try:
            condense(self._journal.path, self._index)
            self._unindexed = 0
        except OSError as e:  # no reason to stop writing records
            logger.info(log_line("kv cache index not written", error=e.strerror, hint="the next start reads the whole journal"))

    def _housekeep(self, item: Frame | _Sweep) -> None:
        root = self._files.root
        try:
            if isinstance(item, _Sweep):
                self.swept += self._files.sweep(item.known)
                for name in retire_strangers(root.parent, root, item.before):
                    logger.info(log_line("kv cache evicted", tier="disk", reason="ttl", identity=name))
                return
            self._append(item)
            if isinstance(item, Drop | DropState):
                for record in item.ids:
                    self._files.delete(record, (STATE,) if isinstance(item, DropState) else (KV, STATE))
        except OSError as e:
            self.errors.append(f"{os.path.basename(str(e.filename or self._files.root))}: {e.strerror}")
            del self.errors[:-100]
