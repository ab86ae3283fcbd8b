"""Files that are computed on where they lie: mapped once, read ahead by threads, watched for changes. Imports no torch.

The pages are the system's page cache, in huge pages where the file system caches in them. Nothing is copied, so a start costs no
more than the disk does; what a file would lose by being changed underneath is caught by `intact` after every step.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from engine.numa import even_out, interleave_thread, our_nodes
from engine.protocol import log_line

log = logging.getLogger(__name__)

T, R = TypeVar("T"), TypeVar("R")
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which mmap does not name
READERS = 4  # reads in flight: one has three fifths of the disk's rate (2.6 s for 2.8 GB on a virtual NVMe, 1.6 s with four)
STEP = 16 << 20  # bytes of one call: the end of the process waits for no more than this


class FileChanged(Exception):
    """A file that is computed on is no longer the one that was opened. One line for the user."""


class MappedFile:
    """Raises OSError, and ValueError for an empty file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._stamp = _stamp(self._file)
            self.size = self._stamp[0]
            if not self.size:
                raise ValueError(f"{path} is empty")
            self.address = _map(self._file, self.size)
        except BaseException:
            os.close(self._file)
            raise
        # for torch, which warns about memory that Python says cannot be written; whoever writes ends the process
        self.memory = (ctypes.c_ubyte * self.size).from_address(self.address)
        weakref.finalize(self.memory, _unmap, self.address, self.size, self._file)
        self._gone: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by the STEP they lie in
        self._readers: list[threading.Thread] = []

    def same(self) -> bool:
        """Whether `path` still names what is mapped, unchanged."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        mine = os.fstat(self._file)
        return (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino) and _stamp(self._file) == self._stamp

    def intact(self) -> None:
        """Raises FileChanged when somebody wrote to it; another file in its place under the same name is no matter."""
        if _stamp(self._file) != self._stamp:
            raise FileChanged(f"{self.path} was changed while the engine computed on it; rename a new file over it instead")

    def need(self, begin: int, end: int) -> None:
        """Have the system read [begin, end) meanwhile; returns at once."""
        if not self._readers:
            os.posix_fadvise(self._file, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def read_ahead(self) -> None:
        """Have threads read all of it into memory."""
        share = -(-self.size // READERS // STEP) * STEP
        for begin in range(0, self.size, share):
            part = (begin, min(self.size, begin + share), self.memory)
            reader = threading.Thread(target=self._populate, args=part, daemon=True)
            self._readers.append(reader)
            reader.start()

    def let_go(self, begin: int, end: int) -> None:
        """What lies in [begin, end) was copied: it shall not be resident twice."""
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        for step in range(begin // STEP, -(-end // STEP)):
            low, high = max(begin, step * STEP), min(end, (step + 1) * STEP)
            self._gone[step].append((low, high))
            _madvise(self.address + low, high - low, mmap.MADV_DONTNEED)

    def _populate(self, begin: int, end: int, memory: ctypes.Array) -> None:
        """`memory` stays mapped as long as somebody holds it."""
        interleave_thread()
        for at in range(begin, end, STEP):
            if not _madvise(self.address + at, min(STEP, end - at), POPULATE_READ):
                return  # an older kernel, or a disk that fails: whoever needs the page will meet the error
            even_out(self.address + at, min(STEP, end - at))
            for low, high in self._gone.get(at // STEP, ()):  # whoever copies was here first
                _madvise(self.address + low, high - low, mmap.MADV_DONTNEED)


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _map(file: int, size: int) -> int:
    """Shared and read-only: no limit on a process' data counts it. Raises OSError."""
    address = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def _unmap(address: int, size: int, file: int) -> None:
    LIBC.munmap(address, size)
    os.close(file)


def _madvise(address: int, size: int, advice: int) -> bool:
    return LIBC.madvise(address, size, advice) == 0


def _stamp(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def watched(compute: Callable[[T], R], files: Sequence[MappedFile]) -> Callable[[T], R]:
    """Raises FileChanged instead of returning what was computed on a file that is no longer what was loaded."""

    def run(what: T) -> R:
        out = compute(what)
        for file in files:
            file.intact()
        return out

    return run if files else compute


_ahead: dict[Path, MappedFile] = {}  # by `begin`, until `map_file` takes them


def map_file(path: Path) -> MappedFile:
    """The file, mapped; what `begin` opened is taken over if it is still the same. Raises OSError, ValueError."""
    early = _ahead.pop(path.resolve(), None)
    return early if early is not None and early.same() else MappedFile(path)


def begin(paths: list[Path], room: int) -> None:
    """Start reading files of which a start will map all, if they fit in `room` bytes of memory. Errors are left to `map_file`."""
    our_nodes()  # what it has to say is said once, before several threads ask
    for path in paths:
        try:
            file = MappedFile(path.resolve())
        except (OSError, ValueError) as problem:
            log.debug(log_line("not read ahead", path=path, why=str(problem)))
            continue
        _ahead[path.resolve()] = file
        if file.size <= room:
            room -= file.size
            file.read_ahead()
