"""What running engines may still take of this machine's memory: promised to their requests, written only when these need it.

The kernel counts such memory as available. Each engine of a user therefore says in a small shared file how much it is; the file
is locked while its process lives, so that nobody believes what a dead one said.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path

from engine.protocol import log_line

log = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")  # in memory: gone after a restart of the machine
PREFIX = "moorage-promise-"
WIDTH = 20  # digits of every number: it is replaced by one write of the same length
GRAIN = 16 << 20  # bytes; smaller changes are not worth telling


class Promise:
    """That of this process. Where it cannot be made, others see this memory as available, and the log says so."""

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self._directory, self._said = directory, 0
        self._file, self._name = -1, ""
        try:
            while self._file < 0:
                self._make()
        except OSError as problem:
            hint = "other engines on this machine may count on the same memory"
            log.info(log_line("memory promise not told", path=directory, why=problem.strerror, hint=hint))

    def _make(self) -> None:
        file, self._name = tempfile.mkstemp(prefix=PREFIX, dir=self._directory)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            self._file = file
        else:
            os.close(file)  # somebody took it for a dead one's before it was locked

    def keep(self, size: int) -> None:
        """`size` bytes may still be taken."""
        if self._file >= 0 and (abs(size - self._said) >= GRAIN or size == 0 != self._said):
            os.pwrite(self._file, b"%0*d" % (WIDTH, size), 0)
            self._said = size

    def others(self) -> int:
        return promised(self._directory, self._name)

    def close(self) -> None:
        if self._file >= 0:
            Path(self._name).unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def promised(directory: Path = DIRECTORY, but: str = "") -> int:
    """Bytes that the engines of this user may still take, `but` one of them."""
    return sum(_said(path) for path in directory.glob(f"{PREFIX}*") if str(path) != but)


def _said(path: Path) -> int:
    """What a living engine of this user says; 0 for anything else. The file of a dead one is removed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        if os.fstat(file).st_uid != os.getuid():
            return 0  # not to be believed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(file, WIDTH, 0)
            return int(text) if text.isdigit() else 0
        path.unlink(missing_ok=True)
        return 0
    except OSError:
        return 0
    finally:
        os.close(file)
