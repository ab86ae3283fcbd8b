"""The files behind a record file: numbering, compression, and what is removed when.

A full file gets the next number and is then compressed by a thread of its own, written beside and renamed, so that a crash at any
moment leaves either the plain or the whole compressed file. Left-over plain ones are compressed at the next start.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import zstandard

from gateway.config import Records as Settings

log = logging.getLogger("moorage.records")

LEVEL = 3  # zstd's default: prompts that repeat shrink 10-30 times, at a few hundred MB/s
DAY_S = 86400.0


class Rotation:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._path = Path(settings.path)
        self._lock = threading.Lock()
        self._due = False
        self._worker: threading.Thread | None = None

    def rotate(self) -> None:
        """Give the present file a number; compression and removal happen beside."""
        os.replace(self._path, self._path.with_name(f"{self._path.name}.{self._next():06d}"))
        self.tidy()

    def tidy(self) -> None:
        """Compress and remove what is due, in a thread of its own that ends when there is no more."""
        with self._lock:
            self._due = True
            if self._worker is None:
                self._worker = threading.Thread(target=self._run, name="records-tidy", daemon=True)
                self._worker.start()

    def wait(self, timeout: float = 30.0) -> None:
        worker = self._worker
        if worker is not None:
            worker.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._worker = None
                    return
                self._due = False
            self._tidy()

    def files(self) -> list[tuple[int, Path]]:
        """Numbered files, oldest first."""
        found = []
        for p in self._path.parent.glob(self._path.name + ".*"):
            number = p.name.removeprefix(self._path.name + ".").removesuffix(".zst")
            if number.isdigit():
                found.append((int(number), p))
        return sorted(found)

    def _next(self) -> int:
        taken = self.files()
        return taken[-1][0] + 1 if taken else 1

    def _tidy(self) -> None:
        try:
            self._remove()
            if self._settings.compress:
                for _, path in self.files():
                    if path.suffix != ".zst":
                        self._compress(path)
        except OSError as e:
            log.error(
                "records: rotated files of %s stay as they are (%s); there must be room for one more", self._path, e.strerror
            )

    def _remove(self) -> None:
        files, settings = self.files(), self._settings
        oldest = time.time() - settings.keep_days * DAY_S if settings.keep_days else None
        for i, (_, path) in enumerate(files):
            too_many = len(files) - i > settings.keep_files
            if too_many or (oldest is not None and path.stat().st_mtime < oldest):
                path.unlink()
                why = f"keep_files is {settings.keep_files}" if too_many else f"keep_days is {settings.keep_days:g}"
                log.info("records: removed %s, %s", path.name, why)

    def _compress(self, path: Path) -> None:
        target, part = path.with_name(path.name + ".zst"), path.with_name(path.name + ".part")
        stat = path.stat()
        try:
            with path.open("rb") as source, open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).copy_stream(source, out, size=stat.st_size)
                out.flush()
                os.fsync(out.fileno())
        except OSError:
            part.unlink(missing_ok=True)  # on a full disk half a file would take the place that new records need
            raise
        os.utime(part, (stat.st_atime, stat.st_mtime))  # age is the age of the records
        os.replace(part, target)
        path.unlink()
