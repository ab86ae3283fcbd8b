"""The link from a packed file into slots of host memory: `link.Link` on the native module's reader.

Reads begin and end there without Python's lock, which whoever computes would hold now and then, and kernels may compute on the
pieces of an expert that are there (`Ops.moe_arriving`). Only what is read for the first time comes to Python, to be verified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

from engine.experts.arena import Arena
from engine.experts.filepool import FilePool
from engine.experts.link import CopyFailed, TakenBack
from engine.experts.pack import BLOCK
from engine.experts.pool import Pool, data_of
from engine.experts.slots import Fetch

CHECKERS = 2  # threads that verify: each is several times as fast as a disk
FINER = 2  # half the piece and twice the readers of `filepool`: as much is on its way, and less is left when the last has come
AHEAD = 2  # pieces at once of what is read ahead: one alone leaves the disk idle between two
WHOLE, TAKEN_BACK = 0, 1  # how a read ended; anything else: it failed


def reads_by_itself(pool: Pool) -> bool:
    """Whether the experts of `pool` lie in a file and the native module has a reader."""
    return isinstance(pool, FilePool) and _reader() is not None


def _reader() -> Callable | None:
    try:
        from engine import _native
    except ImportError:
        return None
    return getattr(_native, "Reader", None)


class FileLink:
    """As `Link`, method for method."""

    def __init__(self, pool: FilePool, arena: Arena, workers: int) -> None:
        self._pool, self._arena = pool, arena
        weights = [data_of(weight) for weight in (arena.bank.gate_up, arena.bank.down)]
        piece = max(BLOCK, pool.piece // FINER)
        self.reader = _reader()(pool.file, pool.record, piece, AHEAD, FINER * workers, *weights)
        self._closed = False
        self._checkers = [threading.Thread(target=self._verify, name=f"expert-check-{i}", daemon=True) for i in range(CHECKERS)]
        for thread in self._checkers:
            thread.start()

    @property
    def alive(self) -> bool:
        return not self._closed or any(thread.is_alive() for thread in self._checkers)

    @property
    def bytes(self) -> int:
        return self.reader.bytes

    @property
    def busy_s(self) -> float:
        return self.reader.busy_s

    def submit(self, fetches: Collection[Fetch], behind: bool = False) -> None:
        if not fetches:
            return
        pool = self._pool
        self.reader.submit([(f.key, pool.offset(f.key), f.slot, not pool.verified(f.key)) for f in fetches], behind)

    def hurry(self, keys: Iterable[int]) -> None:
        if keys := list(keys):
            self.reader.hurry(keys)

    def wait(self, key: int) -> float:
        when, end, why = self.reader.wait(key)
        if end == WHOLE:
            return when
        if end == TAKEN_BACK:
            raise TakenBack(f"expert {key} was taken back")
        raise CopyFailed(f"expert {key} could not be copied: {self._pool.path}: {why}")

    def first(self, keys: Collection[int]) -> list[int]:
        return self.reader.first(list(keys))

    def arrived(self, key: int) -> bool:
        return self.reader.arrived(key)

    def cancel(self, keys: Iterable[int]) -> list[int]:
        keys = list(keys)
        return self.reader.cancel(keys) if keys else []

    def close(self) -> None:
        self.reader.close()
        for thread in self._checkers:
            thread.join()
        self._closed = True

    def _verify(self) -> None:
        while (found := self.reader.unchecked()) is not None:
            key, slot = found
            try:
                self._arena.check(key, slot)
            except Exception as problem:  # whoever waits decides
                self.reader.checked(key, str(problem) or type(problem).__name__)
            else:
                self.reader.checked(key, "")
