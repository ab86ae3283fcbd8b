"""The tensors behind page ids and state slots: copying a page, saving and restoring the recurrent state of a sequence.

The only file of this room that touches tensors of the decoder's cache; everything else handles ids and sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from engine.hostmem import give_back
from engine.lean import torch
from engine.nn.batch import PAGE, Cache
from engine.tensors import library_of

Blob: TypeAlias = "list[torch.Tensor]"  # one copied state: conv and s of each recurrent layer, in layer order


class TensorStorage:
    """`base.Storage` over the decoder's `Cache`."""

    def __init__(self, cache: Cache) -> None:
        self.page = PAGE
        self._pages = [t for layer in cache.kv if layer is not None for t in layer.tensors]
        self._states = [t for layer in cache.states if layer is not None for t in (layer.conv, layer.s)]
        self._library = library_of((self._pages + self._states)[0]) if self._pages or self._states else torch
        self.page_bytes = sum(t[0].numel() * t.element_size() for t in self._pages)
        self.row_bytes = self.page_bytes // PAGE
        self.state_bytes = sum(t[0].numel() * t.element_size() for t in self._states)

    def copy_page(self, source: int, target: int) -> None:
        for tensor in self._pages:
            tensor[target].copy_(tensor[source])

    def save(self, slot: int) -> Blob:
        return [tensor[slot].clone() for tensor in self._states]

    def load(self, blob: Blob, slot: int) -> None:
        for tensor, saved in zip(self._states, blob, strict=True):
            tensor[slot].copy_(saved)

    def clear(self, slot: int) -> None:
        for tensor in self._states:
            tensor[slot].zero_()

    def give_back(self, pages: Sequence[int]) -> None:
        _give_back(self._pages, pages)

    def give_back_slots(self, slots: Sequence[int]) -> None:
        _give_back(self._states, slots)

    def read_rows(self, pages: Sequence[int], start: int, count: int) -> list[memoryview]:
        if not self._pages:
            return []
        index = self._library.from_numpy(np.array(pages, np.int32)).to(self._pages[0].device)
        return [_bytes(_rows(t.index_select(0, index))[start : start + count]) for t in self._pages]

    def write_rows(self, pages: Sequence[int], start: int, count: int, data: memoryview, skip: int) -> None:
        total = data.nbytes // self.row_bytes if self.row_bytes else 0
        at = 0
        for tensor in self._pages:
            heads, dim = tensor.shape[1], tensor.shape[3]
            row = heads * dim * tensor.element_size()
            rows = self._library.frombuffer(data, dtype=tensor.dtype, count=total * heads * dim, offset=at).view(
                total, heads, dim
            )
            _scatter(tensor, pages, start, rows[skip : skip + count])
            at += total * row

    def pack(self, blob: Blob) -> list[memoryview]:
        return [_bytes(tensor) for tensor in blob]

    def unpack(self, data: memoryview) -> Blob:
        blob, at = [], 0
        for tensor in self._states:
            like = tensor[0]
            blob.append(self._library.frombuffer(data, dtype=like.dtype, count=like.numel(), offset=at).view(like.shape))
            at += like.numel() * like.element_size()
        return blob

    def layout(self) -> str:
        """Everything about the tensors that stored bytes depend on, for the identity of the disk tier."""
        shapes = [(tuple(t.shape[1:]), str(t.dtype)) for t in (*self._pages, *self._states)]
        return f"page={self.page} {shapes}"


def _give_back(tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
    """Return the memory of these rows, neighbours in one piece: only whole pages of the system can go."""
    runs: list[list[int]] = []  # first, behind the last
    for row in sorted(rows):
        if runs and runs[-1][1] == row:
            runs[-1][1] = row + 1
        else:
            runs.append([row, row + 1])
    for tensor in tensors:
        if tensor.device.type != "cpu":
            continue  # a device's memory is nobody else's
        each = tensor[0].numel() * tensor.element_size()
        for first, behind in runs:
            give_back(tensor.data_ptr() + first * each, (behind - first) * each)


def _rows(pages: torch.Tensor) -> torch.Tensor:
    """[n, Hkv, PAGE, D] -> [n * PAGE, Hkv, D]"""
    return pages.transpose(1, 2).reshape(-1, pages.shape[1], pages.shape[3])


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(library_of(tensor).uint8).cpu().numpy())


def _scatter(tensor: torch.Tensor, pages: Sequence[int], start: int, rows: torch.Tensor) -> None:
    """Write rows [count, Hkv, D] to positions [start, ...) of the run of `pages`; whole pages in one copy."""
    count, at = len(rows), 0
    while at < count:
        page, offset = divmod(start + at, PAGE)
        if offset or count - at < PAGE:
            size = min(PAGE - offset, count - at)
            tensor[pages[page], :, offset : offset + size] = rows[at : at + size].transpose(0, 1)
        else:
            run = 1  # pages with consecutive ids are one copy
            while at + (run + 1) * PAGE <= count and pages[page + run] == pages[page] + run:
                run += 1
            size = run * PAGE
            block = rows[at : at + size].view(run, PAGE, rows.shape[1], rows.shape[2]).transpose(1, 2)
            tensor[pages[page] : pages[page] + run].copy_(block)
        at += size
