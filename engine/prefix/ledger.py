"""What a journal comes to: the records it leaves. And the same on file, the index, so that a start need not read every frame.

The index names the bytes of the journal it speaks of and their checksum, and has one of its own. It is believed when both hold
and is nothing but time saved: torn, gone, or beside another journal, all frames are read; what came after it is read behind it.
Tokens stay in the journal until somebody asks for them: most of a large journal is tokens that nobody does ask for.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from engine.prefix.journal import Drop, DropState, Frame, Put, Spent, Use, scan
from engine.prefix.records import Record
from engine.protocol import log_line

logger = logging.getLogger(__name__)

MAGIC = b"MOORIX1\n"
HEADER = len(MAGIC) + 8  # then XXH3 of all that follows
CHUNK = 1 << 20  # bytes: checksummed while they are in the processor's cache
TOKEN = 4  # bytes
NOTHING = np.iinfo(np.int32).max  # a token of no vocabulary: equal to none, spelled as none


class Source:
    """The bytes of a journal, also after it was replaced or deleted. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self._fd, size, at)

    def rest(self, at: int) -> memoryview:
        """All from byte `at` on."""
        size = max(0, os.fstat(self._fd).st_size - at)
        data = memoryview(np.empty(size, np.uint8))
        return data[: self._fill(data, at)]

    def digest(self, size: int) -> int:
        """Checksum of the first `size` bytes; -1 when there are fewer."""
        buffer, seen, at = memoryview(bytearray(CHUNK)), xxhash.xxh3_64(), 0
        while at < size:
            got = self._fill(buffer[: size - at], at)
            if not got:
                return -1
            seen.update(buffer[:got])
            at += got
        return seen.intdigest()

    def _fill(self, data: memoryview, at: int) -> int:
        done = 0
        while done < len(data) and (got := os.preadv(self._fd, [data[done:]], at + done)):
            done += got
        return done


class Unread(msgspec.Struct, eq=False):
    """Tokens that are still in the journal."""

    journal: Source
    record: Record

    def read(self) -> np.ndarray:
        """int32 [record.end - record.start]; tokens that match nothing when they are not as they were written."""
        record = self.record
        size = (record.end - record.start) * TOKEN
        try:
            data = self.journal.read(record.at, size)
        except OSError:
            data = b""
        if len(data) == size and xxhash.xxh3_64_intdigest(data) == record.check:
            return np.frombuffer(data, np.int32)
        hint = "changed under the server: what it names is prefilled again"
        logger.warning(log_line("kv cache journal damaged", tokens=record.end, record=f"{record.id:x}", hint=hint))
        return np.array([record.first, *[NOTHING] * (size // TOKEN - 1)], np.int32)  # the tree found it by its first


class _Index(msgspec.Struct, frozen=True, array_like=True):
    read: int
    check: int
    frames: int
    next_id: int
    spent: dict[int, int]
    records: list[Record]


_unpack = msgspec.msgpack.Decoder(_Index).decode


class Ledger:
    """The sum of all whole frames of a journal."""

    def __init__(self, journal: Source | None = None) -> None:
        self.records: dict[int, Record] = {}  # not bound to each other yet; parents before children
        self.spent: Counter[int] = Counter()  # bytes written by hour
        self.next_id = 1  # ids are never used twice, not even those of records that went
        self.frames = 0  # that came to this
        self.scanned = 0  # of them, read one by one
        self.read = 0  # bytes of them
        self.damaged = 0  # bytes behind them
        self._journal = journal

    def tokens(self, record: Record) -> Unread:
        return Unread(self._journal, record)

    def scan(self) -> None:
        """Add the frames behind what was read."""
        data, base = self._journal.rest(self.read), self.read
        for frame, end in scan(data):
            self._add(frame, base + end)
            self.read = base + end
            self.scanned += 1
        self.frames += self.scanned
        self.damaged = base + len(data) - self.read

    def _add(self, frame: Frame, end: int) -> None:
        """`end`: byte of the journal behind the frame."""
        kind = type(frame)
        if kind is Put:
            self.next_id = max(self.next_id, frame.id + 1)
            self.records[frame.id] = _record(frame, end)
        elif kind is Use:
            record = self.records.get(frame.id)
            if record is not None:
                record.used, record.reads, record.owner = max(frame.at, record.born), frame.reads, frame.owner
        elif kind is Drop:
            for each in frame.ids:
                self.records.pop(each, None)
        elif kind is DropState:
            for record in filter(None, map(self.records.get, frame.ids)):
                record.state_bytes = 0
        elif kind is Spent:
            self.spent[frame.hour] = frame.bytes

    def load(self, packed: bytes) -> bool:
        """Begin with an index; False, changing nothing, when it is damaged or speaks of another journal."""
        if packed[:HEADER] != MAGIC + xxhash.xxh3_64_digest(packed[HEADER:]):
            return False
        index = _unpack(memoryview(packed)[HEADER:])
        if self._journal.digest(index.read) != index.check:
            return False
        self.records = {record.id: record for record in index.records}
        self.spent.update(index.spent)
        self.next_id, self.frames, self.read = index.next_id, index.frames, index.read
        return True

    def pack(self) -> bytes:
        """The index of this, before its records are bound to anything."""
        check = self._journal.digest(self.read)
        body = msgspec.msgpack.encode(
            _Index(self.read, check, self.frames, self.next_id, self.spent, list(self.records.values()))
        )
        return MAGIC + xxhash.xxh3_64_digest(body) + body


def _record(put: Put, end: int) -> Record:
    size, check = len(put.tokens), xxhash.xxh3_64_intdigest(put.tokens)
    first = int.from_bytes(put.tokens[:TOKEN], "little", signed=True)
    tokens = (put.start, put.start + size // TOKEN, end - size, first, check)
    return Record(
        put.id, put.parent, *tokens, put.kv_bytes, put.state_bytes, 0, put.born, put.born, put.kind, put.owner, put.key, True
    )


def read(journal: Path, index: Path) -> Ledger:
    """What `journal` comes to, with the help of `index` where it fits; absent files are empty ones. Raises OSError."""
    try:
        ledger = Ledger(Source(journal))
    except FileNotFoundError:
        return Ledger()
    try:
        packed = index.read_bytes()
    except OSError:
        packed = b""  # the journal says it all
    ledger.load(packed)
    ledger.scan()
    return ledger


def condense(journal: Path, index: Path) -> None:
    """Write the index of `journal`. Not synced: one that did not survive is not whole, and is not believed. Raises OSError."""
    fresh = index.with_suffix(".new")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(read(journal, index).pack())
        os.replace(fresh, index)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
