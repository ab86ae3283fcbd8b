"""The index of the disk tier as an append-only journal: which records exist, whose child each is, when they were used.

Frames are `length u32 | crc32 u32 | msgpack`. A crash can tear the last frame only; reading stops there, says so, and the
file is cut back. Nothing is looked up in here while serving: it is read once at start and rewritten when it has grown stale.
What its frames come to is `ledger`.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

_HEAD = struct.Struct("<II")
MAX_FRAME = 64 << 20  # a record of 16M tokens; a larger length is a damaged frame


class Put(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Record `id` holds tokens `[start, start + len(tokens) / 4)` of the sequence that goes on from `parent` at `start`."""

    id: int
    parent: int  # 0 = the sequence starts here
    start: int
    kv_bytes: int
    state_bytes: int
    kind: str
    owner: str  # the session it belongs to; SHARED when several read it
    born: float  # wall clock, seconds
    key: bytes  # chain hash of all tokens up to its end
    tokens: bytes  # int32 little endian; the last bytes of the frame, so that who knows its end can find them


class Drop(msgspec.Struct, frozen=True, tag=2, array_like=True):
    ids: tuple[int, ...]


class DropState(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """The recurrent state of these records is gone, their KV rows are not."""

    ids: tuple[int, ...]


class Use(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Record `id` and its ancestors were read at `at` by `reads` requests so far."""

    id: int
    at: float
    reads: int
    owner: str


class Spent(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """Bytes written in the hour that began at `hour * 3600`: the daily cap survives a restart."""

    hour: int
    bytes: int


Frame = Put | Drop | DropState | Use | Spent

_decode = msgspec.msgpack.Decoder(Frame).decode
_encode = msgspec.msgpack.Encoder().encode


def pack(frame: Frame) -> bytes:
    body = _encode(frame)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def scan(data: memoryview, at: int = 0) -> Iterator[tuple[Frame, int]]:
    """The frames of a journal from byte `at` on, each with the byte behind it, up to the first that is not whole."""
    size, check = _HEAD.size, zlib.crc32
    while at + size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        at += size + length
        body = data[at - length : at]
        if length > MAX_FRAME or len(body) < length or check(body) != crc:
            return
        try:
            frame = _decode(body)
        except msgspec.DecodeError:
            return
        yield frame, at


def rewrite(path: Path, frames: Iterable[Frame]) -> int:
    """Replace the journal by `frames`, whole or not at all; returns how many."""
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as out:
        count = sum(bool(out.write(pack(frame))) for frame in frames)
        out.flush()
        os.fsync(out.fileno())
    os.replace(fresh, path)
    sync_directory(path.parent)
    return count


class Journal:
    """Appends frames to `path`; made anew, with its directory, when it was deleted under us."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._inode = -1

    def append(self, frames: Iterable[Frame]) -> None:
        """Write and fsync. Raises OSError; a half-written frame is cut off again where the disk allows it."""
        if self._lost():
            self.close()
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._inode = os.fstat(self._fd).st_ino
        data, before = b"".join(map(pack, frames)), os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(28, "No space left on device", str(self.path))
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, before)
            raise

    def _lost(self) -> bool:
        try:
            return self._fd < 0 or os.stat(self.path).st_ino != self._inode
        except FileNotFoundError:
            return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = self._inode = -1


def sync_directory(path: Path) -> None:
    """Make a rename in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
