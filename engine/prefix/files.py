"""The files of the disk tier: one per record part, each whole or absent, each checked when read. Owns the format, no policy.

`<root>/<id % 256 in hex>/<id in hex>.kv|.state`, mode 0600: a 64-byte header (magic, identity, chain hash, length, XXH3 of the
payload, crc32 of the header), then the payload. Written under another name, fsynced, renamed, directory fsynced.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from engine.prefix.journal import sync_directory

MAGIC = b"MOORKV3\n"
_HEADER = struct.Struct("<8s16s16sQQ")  # then crc32 of these: 60 bytes, then zeros up to HEADER
HEADER = 64
CHUNK = 8 << 20  # bytes a read asks for: large enough for full disk speed, small enough to checksum out of the cache

KV, STATE = "kv", "state"
_IDENTITY = re.compile("[0-9a-f]{32}")


class Damaged(Exception):
    """A file that cannot be used; the message says why in a few words."""


class Busy(Exception):
    """Another server holds the directory."""


def identity(parts: dict[str, str]) -> bytes:
    """16 bytes that name everything cached values depend on (weights, quantization, tokenizer, template, KV layout)."""
    named = json.dumps({**parts, "format": MAGIC.decode()}, sort_keys=True)
    return hashlib.blake2b(named.encode(), digest_size=16).digest()


def buffer_of(size: int) -> memoryview:
    """`size` bytes to read into. Not cleared first: that would cost half of what reading does."""
    return memoryview(np.empty(size, np.uint8))


class Files:
    """Record files of one identity. `root` is made when absent, readable by the owner only."""

    def __init__(self, root: Path, identity: bytes) -> None:
        self.root = root
        self.identity = identity
        self._lock = -1

    def open(self) -> None:
        """Make the directory and take it for this process. Raises OSError, or Busy when another server has it."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise Busy(f"{self.root} is in use by another server") from None

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def path(self, record: int, part: str) -> Path:
        return self.root / f"{record % 256:02x}" / f"{record:x}.{part}"

    def write(self, record: int, part: str, key: bytes, buffers: Sequence[memoryview]) -> None:
        """Store the concatenation of `buffers`. Raises OSError; nothing is left behind then."""
        target = self.path(record, part)
        fresh = target.with_suffix(f".{part}.new")
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check = xxhash.xxh3_64()  # zlib's crc32 is slower than the disk
        for buffer in buffers:
            check.update(buffer)
        size = sum(buffer.nbytes for buffer in buffers)
        header = _HEADER.pack(MAGIC, self.identity, key, size, check.intdigest())
        header += struct.pack("<I", zlib.crc32(header))
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for buffer in (memoryview(header.ljust(HEADER, b"\0")), *buffers):
                at = 0
                while at < buffer.nbytes:
                    at += os.write(fd, buffer[at : at + CHUNK])
            os.fsync(fd)
            os.replace(fresh, target)
            sync_directory(target.parent)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def read(self, record: int, part: str, key: bytes, size: int, into: memoryview | None = None) -> memoryview:
        """The payload, `size` bytes, in a buffer of its own or in the first bytes of `into`.

        Raises Damaged when anything about the file is not as it was written.
        """
        try:
            fd = os.open(self.path(record, part), os.O_RDONLY)
        except OSError as e:
            raise Damaged("file is gone" if isinstance(e, FileNotFoundError) else e.strerror) from None
        try:
            header = os.read(fd, HEADER)
            if len(header) < HEADER:
                raise Damaged("file is cut off")
            magic, identity, stored_key, length, check = _HEADER.unpack_from(header)
            if zlib.crc32(header[: _HEADER.size]) != struct.unpack_from("<I", header, _HEADER.size)[0] or magic != MAGIC:
                raise Damaged("header is damaged")
            if identity != self.identity:
                raise Damaged("file belongs to other weights")
            if stored_key != key or length != size:
                raise Damaged("file belongs to another prefix")
            return self._payload(fd, buffer_of(size) if into is None else into[:size], check)
        except OSError as e:
            raise Damaged(e.strerror) from None
        finally:
            os.close(fd)

    @staticmethod
    def _payload(fd: int, data: memoryview, check: int) -> memoryview:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        at, seen = 0, xxhash.xxh3_64()
        while at < data.nbytes:
            got = os.readv(fd, [data[at : at + CHUNK]])
            if not got:
                raise Damaged("file is cut off")
            seen.update(data[at : at + got])
            at += got
        if seen.intdigest() != check:
            raise Damaged("checksum differs")
        return data

    def delete(self, record: int, parts: Sequence[str] = (KV, STATE)) -> None:
        for part in parts:
            self.path(record, part).unlink(missing_ok=True)

    def sweep(self, known: set[int]) -> int:
        """Delete files that no record names (a crash between file and journal leaves some); returns how many."""
        gone = 0
        for path in self.root.glob("[0-9a-f][0-9a-f]/*"):
            stem, _, part = path.name.partition(".")
            if part not in (KV, STATE) or int(stem, 16) not in known:
                path.unlink(missing_ok=True)
                gone += 1
        return gone


def strangers(root: Path, keep: Path) -> list[Path]:
    """Directories of other identities under `root`. Raises OSError."""
    return [d for d in root.iterdir() if d != keep and _IDENTITY.fullmatch(d.name) and d.is_dir()]


def retire_strangers(root: Path, keep: Path, before: float) -> list[str]:
    """Delete directories of other identities under `root` that no server holds and nobody wrote since `before` (wall clock).

    A model that was replaced would otherwise keep its cache for ever. Returns the names of what went. Raises OSError.
    """
    gone = []
    for directory in strangers(root, keep):
        journal = directory / "journal"
        if (journal if journal.exists() else directory).stat().st_mtime >= before:
            continue
        other = Files(directory, b"")
        try:
            other.open()
        except Busy:
            continue
        shutil.rmtree(directory)
        other.close()
        gone.append(directory.name)
    return gone
