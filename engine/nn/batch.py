"""What one forward step consumes: `Batch` (rows of several sequences) and `Cache` (the tensors their past lives in)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.hostmem import lazy
from engine.kernels.ops import KVLayer, Piece, Segments, StateLayer
from engine.lean import torch
from engine.models.spec import AttentionSpec, DeltaNetSpec, LatentSpec, ModelSpec
from engine.numa import interleave
from engine.tensors import CPU, Library, dtype_in

PAGE = 64  # tokens a KV page holds: small enough that a copied tail is cheap, large enough that tables stay short


@dataclass(frozen=True)
class Batch:
    """T rows. tokens, positions int32 [T]; `logit_rows` int32 [R] names the rows whose logits are wanted."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: Segments
    logit_rows: torch.Tensor

    def on(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        seg = self.segments
        moved = Segments(*(part.to(device) for part in (seg.cu, seg.start, seg.pages, seg.slot)), seg.kept)
        return Batch(self.tokens.to(device), self.positions.to(device), moved, self.logit_rows.to(device))


class Flat:
    """A batch as the scheduler has it: kernels that take a whole step read it as it is, for others it is a `Batch`.

    A decode step has a handful of numbers, and behind the weights all code is cold: tensors of them take long.
    """

    def __init__(self, pieces: list[Piece], library: Library = torch) -> None:
        self.pieces, self._library = pieces, library
        self.end = max(piece[2] for piece in pieces)  # all positions lie below it

    @cached_property
    def batch(self) -> Batch:
        """All numbers but the page table travel in one array: each array of its own costs microseconds."""
        ints: list[list[int]] = [[] for _ in range(6)]
        tokens, positions, starts, slots, rows, kept = ints
        borders = [0]
        for known, start, end, slot, _, wanted, keep in self.pieces:
            base = borders[-1] - start
            tokens += known[start:end]
            positions += range(start, end)
            rows += [base + position for position in wanted]
            borders.append(base + end)
            starts.append(start)
            slots.append(slot)
            kept += (keep[0] - start, keep[1]) if keep else (0, -1)
        if all(piece[6] is None for piece in self.pieces):
            kept.clear()
        parts = (tokens, positions, borders, starts, slots, rows, kept)
        flat = self._library.from_numpy(np.array([number for part in parts for number in part], np.int32))
        tokens_, positions_, cu, start, slot, rows_, kept_ = flat.split_with_sizes([len(part) for part in parts])
        segments = Segments(cu, start, self._page_table(), slot, kept_.view(-1, 2) if kept else None)
        return Batch(tokens_, positions_, segments, rows_)

    def _page_table(self) -> torch.Tensor:
        """Pages in use by each sequence, int32 [S, P], -1 behind them."""
        used = [-(-piece[2] // PAGE) for piece in self.pieces]
        table = np.full((len(used), max(used)), -1, np.int32)
        for row, count, piece in zip(table, used, self.pieces, strict=True):
            row[:count] = piece[4][:count]
        return self._library.from_numpy(table)

    @property
    def tokens(self) -> torch.Tensor:
        return self.batch.tokens

    @property
    def positions(self) -> torch.Tensor:
        return self.batch.positions

    @property
    def segments(self) -> Segments:
        return self.batch.segments

    @property
    def logit_rows(self) -> torch.Tensor:
        return self.batch.logit_rows

    def on(self, device: torch.device) -> Batch:
        return self.batch.on(device)


@dataclass(frozen=True)
class Cache:
    """One entry per layer; None where the layer has no such cache."""

    kv: tuple[KVLayer | None, ...]
    states: tuple[StateLayer | None, ...]


def allocate_cache(
    spec: ModelSpec, pages: int, slots: int, kv_dtype: torch.dtype, device: torch.device = CPU, library: Library = torch
) -> Cache:
    """Zeroed cache tensors of `library` with room for `pages` KV pages and `slots` recurrent states. Raises MemoryError.

    What was never written takes no memory of the host: there may be room for more pages than the machine holds.
    """
    kv_dtype, float32 = dtype_in(library, kv_dtype), library.float32

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _zeros(shape, dtype, device, library)

    kv: list[KVLayer | None] = []
    states: list[StateLayer | None] = []
    for layer in spec.layers:
        mixer = layer.mixer
        kv.append(None)
        states.append(None)
        if isinstance(mixer, AttentionSpec):
            shape = (pages, mixer.kv_heads, PAGE, mixer.head_dim)
            kv[-1] = KVLayer(zeros(shape, kv_dtype), zeros(shape, kv_dtype))
        elif isinstance(mixer, LatentSpec):
            kv[-1] = KVLayer(zeros((pages, 1, PAGE, mixer.row), kv_dtype), None)
        elif isinstance(mixer, DeltaNetSpec):
            conv = zeros((slots, mixer.conv_channels, mixer.conv_kernel - 1), float32)
            states[-1] = StateLayer(conv, zeros((slots, mixer.value_heads, mixer.key_dim, mixer.value_dim), float32))
    return Cache(tuple(kv), tuple(states))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, library: Library) -> torch.Tensor:
    """As torch.zeros, which writes them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    data = library.frombuffer(lazy(size), dtype=library.uint8)[:size]
    interleave(data.data_ptr(), size)
    return data.view(dtype).view(shape)
