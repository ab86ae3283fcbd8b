"""A pack that fits in memory, computed on where its file is mapped. An expert is verified before anything is computed with it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from engine.experts.filepool import Pack
from engine.experts.pack import FLOATS, Part
from engine.kernels.ops import Guard, Ops, Quant, Weight
from engine.lean import torch
from engine.mapped import MappedFile, map_file
from engine.nn.experts import Bank
from engine.tensors import Library, dtype_in, uint8


class MappedExperts:
    """`nn.experts.Experts` over the records of `pack`. Raises OSError when its file cannot be mapped."""

    def __init__(self, pack: Pack, ops: Ops, library: Library = torch) -> None:
        self._pack, self._moe, self._guarded = pack, ops.moe, getattr(ops, "guards", False)
        self.file = map_file(pack.path)
        guards = [Guard(library.from_numpy(pack.sound(layer)), partial(self._check, layer)) for layer in range(pack.layers)]
        self._banks = [_bank(pack, layer, self.file, guard, library) for layer, guard in enumerate(guards)]
        self._checkers = ThreadPoolExecutor(max(1, getattr(ops, "threads", 1)), "verify")

    @property
    def banks(self) -> list[Bank]:
        return self._banks

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Raises OSError for an expert that is not what was packed."""
        bank = self._banks[layer]
        if not self._pack.sound(layer).all():
            self._check(layer, [e for e in np.unique(ids.numpy()).tolist() if not self._pack.verified(layer, e)])
        return self._moe(x, ids, weights, bank.gate_up, bank.down, bank.act)

    def in_place(self, layer: int) -> Bank | None:
        return self._banks[layer] if self._guarded else None

    def _check(self, layer: int, experts: Sequence[int]) -> None:
        pack = self._pack
        record, begin = pack.index.kinds[pack.index.layout[layer]].record, pack.index.offset(layer)
        whole = memoryview(self.file.memory)

        def check(expert: int) -> None:
            at = begin + expert * record
            pack.check(layer, expert, [whole[at : at + record]])

        list(self._checkers.map(check, experts))


def _bank(pack: Pack, layer: int, file: MappedFile, guard: Guard, library: Library) -> Bank:
    kind, at = pack.index.kinds[pack.index.layout[layer]], pack.index.offset(layer)
    up = _weight(file, kind.gate_up, at, pack.experts, kind.record, library)
    down = _weight(file, kind.down, at + kind.gate_up.bytes, pack.experts, kind.record, library)
    return Bank(up, down, pack.index.act, guard)


def _weight(file: MappedFile, part: Part, at: int, experts: int, record: int, library: Library) -> Weight:
    """[E, rows, cols] in the records that begin at `at`, one every `record` bytes."""
    dtype = dtype_in(library, FLOATS.get(part.kind, uint8))
    size = (experts - 1) * record + part.bytes
    raw = library.frombuffer(file.memory, dtype=dtype, count=size // dtype.itemsize, offset=at)
    width = part.bytes // part.rows // dtype.itemsize
    data = raw.as_strided((experts, part.rows, width), (record // dtype.itemsize, width, 1))
    return data if part.kind in FLOATS else Quant(data, part.kind, part.cols)
