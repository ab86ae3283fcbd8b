"""A pack that fits in memory, computed on where its file is mapped. An expert is verified before anything is computed with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.experts.filepool import Pack
from engine.experts.pack import FLOATS, Part
from engine.kernels.ops import Ops, Quant, Weight
from engine.lean import torch
from engine.mapped import MappedFile, map_file
from engine.nn.experts import Bank
from engine.tensors import Library, dtype_in, uint8


class MappedExperts:
    """`nn.experts.Experts` over the records of `pack`. Raises OSError when its file cannot be mapped."""

    def __init__(self, pack: Pack, ops: Ops, library: Library = torch) -> None:
        self._pack, self._moe = pack, ops.moe
        self.file = map_file(pack.path)
        self._banks = [_bank(pack, layer, self.file, library) for layer in range(pack.layers)]
        self._left = [pack.experts] * pack.layers  # experts of a layer that were not verified yet
        self._checkers = ThreadPoolExecutor(max(1, getattr(ops, "threads", 1)), "verify")

    @property
    def banks(self) -> list[Bank]:
        return self._banks

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Raises OSError for an expert that is not what was packed."""
        if self._left[layer]:
            self._verify(layer, ids)
        bank = self._banks[layer]
        return self._moe(x, ids, weights, bank.gate_up, bank.down, bank.act)

    def _verify(self, layer: int, ids: torch.Tensor) -> None:
        pack = self._pack
        record, begin = pack.index.kinds[pack.index.layout[layer]].record, pack.index.offset(layer)
        whole = memoryview(self.file.memory)
        new = [expert for expert in np.unique(ids.numpy()).tolist() if not pack.verified(layer, expert)]

        def check(expert: int) -> None:
            at = begin + expert * record
            pack.check(layer, expert, [whole[at : at + record]])

        if new:
            list(self._checkers.map(check, new))
            self._left[layer] -= len(new)


def _bank(pack: Pack, layer: int, file: MappedFile, library: Library) -> Bank:
    kind, at = pack.index.kinds[pack.index.layout[layer]], pack.index.offset(layer)
    up = _weight(file, kind.gate_up, at, pack.experts, kind.record, library)
    down = _weight(file, kind.down, at + kind.gate_up.bytes, pack.experts, kind.record, library)
    return Bank(up, down, pack.index.act)


def _weight(file: MappedFile, part: Part, at: int, experts: int, record: int, library: Library) -> Weight:
    """[E, rows, cols] in the records that begin at `at`, one every `record` bytes."""
    dtype = dtype_in(library, FLOATS.get(part.kind, uint8))
    size = (experts - 1) * record + part.bytes
    raw = library.frombuffer(file.memory, dtype=dtype, count=size // dtype.itemsize, offset=at)
    width = part.bytes // part.rows // dtype.itemsize
    data = raw.as_strided((experts, part.rows, width), (record // dtype.itemsize, width, 1))
    return data if part.kind in FLOATS else Quant(data, part.kind, part.cols)
