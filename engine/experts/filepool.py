"""Reading a packed file: past the page cache, straight to where an expert is computed. A record is verified the first time.

Layers whose experts are of one kind share slots and are one `FilePool`; a `Pack` has as many of them as kinds.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash

from engine.experts.pack import BLOCK, FLOATS, Kind, PackError, Part, read_index
from engine.experts.pool import data_of
from engine.kernels.ops import Quant, Weight
from engine.nn.experts import Bank
from engine.protocol import log_line

log = logging.getLogger(__name__)


class Pack:
    """A complete pack. Raises PackError for one that is incomplete or not of checkpoint `source`."""

    def __init__(self, directory: Path, source: str | None = None) -> None:
        self.index = index = read_index(directory)
        if not index.complete:
            raise PackError(f"{directory}: {index.done} of {index.layers} layers are packed; run the same `pack` again")
        if source is not None and index.source != source:
            raise PackError(f"{directory} was packed from another checkpoint: pack this model")
        self.path = directory / "experts.bin"
        if self.path.stat().st_size != index.size:
            raise PackError(f"{self.path} has not the size its index says: remove {directory} and pack again")
        self.layers, self.experts = index.layers, index.experts
        self._file = _open_direct(self.path)
        self._verified = np.zeros(self.layers * self.experts, bool)
        self._local = threading.local()
        self._offsets = [index.offset(layer) for layer in range(index.layers)]
        self._longest = max(kind.record for kind in index.kinds)
        owned = [[n for n, kind in enumerate(index.layout) if kind == number] for number in range(len(index.kinds))]
        self.pools = tuple(FilePool(self, kind, layers) for kind, layers in zip(index.kinds, owned, strict=True))

    @property
    def record(self) -> int:
        """Bytes of the longest record."""
        return self._longest

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

    def read(self, layer: int, expert: int, record: int, into: Sequence[memoryview]) -> None:
        """The `record` bytes of one expert, `into` page-aligned memory. Raises OSError if they are not what was written."""
        at, key = self._offsets[layer] + expert * record, layer * self.experts + expert
        got = os.preadv(self._file, into, at)
        if got != record:
            raise OSError(f"{self.path}: read {got} of {record} bytes at {at}")
        if not self._verified[key]:
            seen = xxhash.xxh3_64()
            for part in into:
                seen.update(part)
            if seen.intdigest() != self.index.checksums[key]:
                raise OSError(f"{self.path}: expert {expert} of layer {layer} is damaged; pack the model again")
            self._verified[key] = True

    def buffer(self, record: int) -> memoryview:
        """Page-aligned memory of this thread, overwritten by its next read."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = mmap.mmap(-1, self._longest)
        return memoryview(self._local.buffer)[:record]

    def close(self) -> None:
        os.close(self._file)


class FilePool:
    """`pool.Pool` over those `numbers` (layers of the pack) whose experts are of one `kind`; its own layers count from 0."""

    def __init__(self, pack: Pack, kind: Kind, numbers: Sequence[int]) -> None:
        self._pack, self._kind, self.numbers = pack, kind, tuple(numbers)
        self.layers, self.experts, self.expert_bytes = len(numbers), pack.experts, kind.bytes
        self.like = Bank(_empty(kind.gate_up), _empty(kind.down), pack.index.act)

    def bank(self, layer: int) -> None:
        return None

    def read(self, key: int, to: Bank, slot: int) -> int:
        """Raises OSError."""
        layer, expert = divmod(key, self.experts)
        number, record, split = self.numbers[layer], self._kind.record, self._kind.gate_up.bytes
        rows = _row(to.gate_up, slot), _row(to.down, slot)
        if all(row.data_ptr() % BLOCK == 0 and row.nbytes % BLOCK == 0 for row in rows):  # as direct reads demand
            self._pack.read(number, expert, record, [memoryview(row.numpy()) for row in rows])
            return self.expert_bytes
        buffer = self._pack.buffer(record)
        self._pack.read(number, expert, record, [buffer])
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        rows[0].copy_(raw[:split])
        rows[1].copy_(raw[split : self._kind.bytes])
        return self.expert_bytes


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as problem:
        log.warning(
            log_line("pack read through the page cache", path=path, why=problem.strerror, hint="its disk has no direct reads")
        )
        return os.open(path, os.O_RDONLY)


def _empty(part: Part) -> Weight:
    if part.kind in FLOATS:
        return torch.empty(0, part.rows, part.cols, dtype=FLOATS[part.kind])
    return Quant(torch.empty(0, part.rows, part.bytes // part.rows, dtype=torch.uint8), part.kind, part.cols)


def _row(weight: Weight, slot: int) -> torch.Tensor:
    """The bytes of one slot, flat."""
    return data_of(weight)[slot].view(-1).view(torch.uint8)
