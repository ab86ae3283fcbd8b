"""Reading a packed file: past the page cache, straight to where an expert is computed. A record is verified the first time.

Layers whose experts are of one kind share slots and are one `FilePool`; a `Pack` has as many of them as kinds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine.experts.pack import BLOCK, FLOATS, Kind, PackError, Part, closed, read_index
from engine.experts.pool import Piece, Stage, data_of
from engine.hostmem import huge
from engine.kernels.ops import Quant, Weight
from engine.lean import torch
from engine.nn.experts import Bank
from engine.protocol import log_line
from engine.tensors import dtype_in

log = logging.getLogger(__name__)

READERS = 4  # reads in flight: at this depth random ones reach the disk's sequential rate
PIECE = 2 << 20  # bytes of one read: a few of them at once have the disk's rate, and what is not needed any more is soon over


class Pack:
    """A complete pack. Raises PackError for one that is incomplete or not of checkpoint `source`."""

    def __init__(self, directory: Path, source: str | None = None) -> None:
        self.index = index = read_index(directory)
        if not index.complete:
            raise PackError(f"{directory}: {index.done} of {index.layers} layers are packed; run the same `pack` again")
        if source is not None and index.source != source:
            raise PackError(f"{directory} was packed from another checkpoint: pack this model")
        self.path = directory / "experts.bin"
        try:
            if self.path.stat().st_size != index.size:
                raise PackError(f"{self.path} has not the size its index says: remove {directory} and pack again")
            self.file = _open_direct(self.path)
        except OSError as problem:
            raise closed(self.path, problem) from None
        self.layers, self.experts = index.layers, index.experts
        self._verified = np.zeros(self.layers * self.experts, bool)
        self._local = threading.local()
        self.offsets = [index.offset(layer) for layer in range(index.layers)]
        owned = [[n for n, kind in enumerate(index.layout) if kind == number] for number in range(len(index.kinds))]
        self.pools = tuple(FilePool(self, kind, layers) for kind, layers in zip(index.kinds, owned, strict=True))

    @property
    def expert_bytes(self) -> int:
        """All experts together."""
        return sum(pool.layers * pool.experts * pool.expert_bytes for pool in self.pools)

    @property
    def least_bytes(self) -> int:
        """Slots for one layer of each kind."""
        return sum(pool.experts * pool.expert_bytes for pool in self.pools)

    @property
    def stored_as(self) -> str:
        """`Q4_K` or `Q4_K, Q6_K`"""
        names = [part.kind.upper() for kind in self.index.kinds for part in (kind.gate_up, kind.down)]
        return ", ".join(dict.fromkeys(names))

    def read(self, layer: int, expert: int, record: int, at: int, into: Sequence[memoryview]) -> None:
        """Of one expert's `record` bytes what is behind `at`, `into` page-aligned memory. Raises OSError."""
        begin, want = self.offsets[layer] + expert * record + at, sum(len(part) for part in into)
        got = os.preadv(self.file, into, begin)
        if got != want:
            raise OSError(f"{self.path}: read {got} of {want} bytes at {begin}")

    def verified(self, layer: int, expert: int) -> bool:
        return bool(self._verified[layer * self.experts + expert])

    def sound(self, layer: int) -> NDArray[np.uint8]:
        """[E], 0 for an expert that was not verified yet; changes when it is."""
        return self._verified[layer * self.experts : (layer + 1) * self.experts].view(np.uint8)

    def check(self, layer: int, expert: int, parts: Sequence[memoryview]) -> None:
        """Raises OSError if these are not the bytes that were written; looks at each expert once."""
        key = layer * self.experts + expert
        if not self._verified[key]:
            seen = xxhash.xxh3_64()
            for part in parts:
                seen.update(part)
            if seen.intdigest() != self.index.checksums[key]:
                raise OSError(f"{self.path}: expert {expert} of layer {layer} is damaged; pack the model again")
            self._verified[key] = True

    def buffer(self, size: int) -> memoryview:
        """Page-aligned memory of this thread, overwritten by its next read; for a piece at most."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = huge(PIECE)
        return memoryview(self._local.buffer)[:size]

    def close(self) -> None:
        os.close(self.file)


class FilePool:
    """`pool.Pool` over those `numbers` (layers of the pack) whose experts are of one `kind`; its own layers count from 0."""

    def __init__(self, pack: Pack, kind: Kind, numbers: Sequence[int]) -> None:
        self._pack, self._kind, self.numbers = pack, kind, tuple(numbers)
        self.layers, self.experts, self.expert_bytes = len(numbers), pack.experts, kind.bytes
        self.piece, self.record, self.path = PIECE, kind.record, pack.path
        self.parts = -(-kind.record // PIECE)
        self._kept: _Rows | None = None

    @cached_property
    def like(self) -> Bank:
        """Imports torch, which a pack that is computed on where it lies does without."""
        return Bank(_empty(self._kind.gate_up), _empty(self._kind.down), self._pack.index.act)

    def bank(self, layer: int) -> None:
        return None

    @property
    def file(self) -> int:
        """Its descriptor, for direct reads."""
        return self._pack.file

    def offset(self, key: int) -> int:
        """Where in the file the record of `key` begins."""
        layer, expert = divmod(key, self.experts)
        return self._pack.offsets[self.numbers[layer]] + expert * self.record

    def read(self, key: int, to: Bank, slot: int, part: int) -> int:
        """Raises OSError."""
        layer, expert = divmod(key, self.experts)
        number, record = self.numbers[layer], self._kind.record
        begin, end = part * PIECE, min(record, (part + 1) * PIECE)
        rows = self._rows(to)
        into = rows.between(slot, begin, end)
        size = sum(len(piece) for piece in into)
        if size == end - begin and rows.on_borders:
            self._pack.read(number, expert, record, begin, into)
            return size
        buffer, at = self._pack.buffer(end - begin), 0
        self._pack.read(number, expert, record, begin, [buffer])
        for piece in into:
            piece[:] = buffer[at : at + len(piece)]
            at += len(piece)
        return size

    def check(self, key: int, to: Bank, slot: int) -> None:
        layer, expert = divmod(key, self.experts)
        padding = memoryview(bytes(self._kind.record - self._kind.bytes))
        self._pack.check(self.numbers[layer], expert, [*self._rows(to).between(slot, 0, self._kind.record), padding])

    def verified(self, key: int) -> bool:
        layer, expert = divmod(key, self.experts)
        return self._pack.verified(self.numbers[layer], expert)

    def pieces(self, key: int, part: int, stage: Stage) -> list[Piece]:
        layer, expert = divmod(key, self.experts)
        record, own = self._kind.record, self._kind.gate_up.bytes
        begin, end = part * PIECE, min(record, (part + 1) * PIECE)
        buffer = stage(end - begin)
        self._pack.read(self.numbers[layer], expert, record, begin, [memoryview(buffer.numpy())])
        borders = ((0, 0, own), (1, own, self._kind.bytes))  # matrix, its first byte in the record, the one behind it
        cuts = ((i, at, max(begin, at), min(end, behind)) for i, at, behind in borders)
        return [(i, low - at, buffer[low - begin : high - begin]) for i, at, low, high in cuts if low < high]

    def _rows(self, bank: Bank) -> _Rows:
        """Kept for the bank of the last read: there is one of a pool, and a read has no time to lose."""
        kept = self._kept
        if kept is None or kept.bank is not bank:
            self._kept = kept = _Rows(bank)
        return kept


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except PermissionError:
        raise
    except OSError as problem:
        log.warning(
            log_line("pack read through the page cache", path=path, why=problem.strerror, hint="its disk has no direct reads")
        )
        return os.open(path, os.O_RDONLY)


def _empty(part: Part) -> Weight:
    if part.kind in FLOATS:
        return torch.empty(0, part.rows, part.cols, dtype=dtype_in(torch, FLOATS[part.kind]))
    return Quant(torch.empty(0, part.rows, part.bytes // part.rows, dtype=torch.uint8), part.kind, part.cols)


class _Rows:
    """The bytes of a bank's slots: gate_up, then down, as in a record."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        flat = [data_of(w).reshape(len(data_of(w)), -1).view(torch.uint8) for w in (bank.gate_up, bank.down)]
        self._each = [data.shape[1] for data in flat]
        self._all = [memoryview(data.view(-1).numpy()) for data in flat]
        # of the disk's blocks, in memory: as direct reads demand
        self.on_borders = all(data.data_ptr() % BLOCK == 0 and data.shape[1] % BLOCK == 0 for data in flat)

    def between(self, slot: int, begin: int, end: int) -> list[memoryview]:
        """Bytes [begin, end) of a record, where they lie in `slot`."""
        found, at = [], 0
        for each, data in zip(self._each, self._all, strict=True):
            low, high = max(0, begin - at), min(each, end - at)
            if low < high:
                found.append(data[slot * each + low : slot * each + high])
            at += each
        return found
