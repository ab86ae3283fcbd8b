"""The pool: every expert once, in host memory or in a packed file. It is the truth; slots hold copies."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from engine.hostmem import give_back, lazy, prefer_huge_pages
from engine.kernels.ops import Quant, Weight
from engine.lean import torch
from engine.nn.experts import Bank
from engine.numa import interleave

Stage: TypeAlias = "Callable[[int], torch.Tensor]"  # bytes -> page-locked memory for so many
Piece: TypeAlias = "tuple[int, int, torch.Tensor]"  # of gate_up (0) or down (1), from this byte on: these bytes


class Pool(Protocol):
    layers: int
    numbers: Sequence[int]  # of its layers among all that have experts
    experts: int  # a layer
    like: Bank  # shapes and types of an expert; its first dimension means nothing
    expert_bytes: int
    parts: int  # pieces in which an expert is copied

    def bank(self, layer: int) -> Bank | None:
        """The experts of a layer where they can be computed; None when they can only be copied."""

    def read(self, key: int, to: Bank, slot: int, part: int) -> int:
        """Copy a piece of expert `key` into row `slot` of `to`; returns its bytes. The link's threads call it. Raises OSError."""

    def check(self, key: int, to: Bank, slot: int) -> None:
        """All pieces of `key` are in row `slot` of `to`. Raises OSError if they are not what they should be."""

    def verified(self, key: int) -> bool:
        """Whether `check` has nothing to look at any more."""

    def pieces(self, key: int, part: int, stage: Stage) -> list[Piece]:
        """A piece of expert `key` for a device that copies by itself: where it lies in host memory, or read into `stage`'s.

        Raises OSError.
        """


def read_whole(pool: Pool, key: int, to: Bank, slot: int) -> int:
    """All pieces, one after the other; returns their bytes. Raises OSError."""
    size = sum(pool.read(key, to, slot, part) for part in range(pool.parts))
    pool.check(key, to, slot)
    return size


class HostPool:
    """Experts in host memory, one bank a layer. Raises ValueError when layers differ: they could not share slots."""

    def __init__(self, banks: Sequence[Bank], numbers: Sequence[int] | None = None) -> None:
        odd = [i for i, b in enumerate(banks) if kind_of(b) != kind_of(banks[0])]
        if odd:
            raise ValueError(f"the experts of layer {odd[0]} differ in shape or type from those of layer 0: no common slots")
        self._banks, self.numbers = banks, tuple(range(len(banks)) if numbers is None else numbers)
        self.layers, self.experts, self.like = len(banks), banks[0].experts, banks[0]
        self.expert_bytes = bank_bytes(banks[0]) // self.experts
        self.parts = 1  # memory has its rate at once

    def bank(self, layer: int) -> Bank:
        return self._banks[layer]

    def read(self, key: int, to: Bank, slot: int, part: int) -> int:
        copy_expert(self._banks[key // self.experts], key % self.experts, to, slot)
        return self.expert_bytes

    def check(self, key: int, to: Bank, slot: int) -> None:
        """Memory keeps what was written."""

    def verified(self, key: int) -> bool:
        return True

    def pieces(self, key: int, part: int, stage: Stage) -> list[Piece]:
        bank, row = self._banks[key // self.experts], key % self.experts
        return [(i, 0, data_of(w)[row].view(torch.uint8).view(-1)) for i, w in enumerate((bank.gate_up, bank.down))]


def data_of(weight: Weight) -> torch.Tensor:
    return weight.data if isinstance(weight, Quant) else weight


def bank_bytes(bank: Bank) -> int:
    return sum(data_of(w).nbytes for w in (bank.gate_up, bank.down))


def kind_of(bank: Bank) -> tuple[object, ...]:
    """Activation, shapes and types: equal for banks whose experts fit the same slots."""
    return bank.act, *((w.shape, w.type if isinstance(w, Quant) else w.dtype) for w in (bank.gate_up, bank.down))


class Room:
    """Memory for `slots` experts shaped as those of `like`, which may become up to `most` without moving. Raises MemoryError."""

    def __init__(self, like: Bank, slots: int, most: int | None = None) -> None:
        self.slots, self.most = slots, max(slots, most or 0)
        try:
            self.bank = self._reserve(like)
        except MemoryError:
            if self.most == slots:
                raise
            self.most = slots  # address space is limited here: there are as many as asked for and never more
            self.bank = self._reserve(like)
        self._touch(0, slots)

    def _reserve(self, like: Bank) -> Bank:
        return replace(like, gate_up=self._of(like.gate_up), down=self._of(like.down))

    def _of(self, weight: Weight) -> Weight:
        shape, dtype = data_of(weight).shape[1:], data_of(weight).dtype
        size = self.most * math.prod(shape) * dtype.itemsize
        data = torch.frombuffer(lazy(size), dtype=torch.uint8)[:size]
        prefer_huge_pages(data.data_ptr(), size)
        interleave(data.data_ptr(), size)
        data = data.view(dtype).view(self.most, *shape)
        return Quant(data, weight.type, weight.cols) if isinstance(weight, Quant) else data

    def resize(self, slots: int) -> None:
        """Have `slots` of them: what goes returns to the system. Raises MemoryError, with everything as it was."""
        if slots > self.most:
            raise MemoryError(f"{slots} expert slots: this process has address space for {self.most}; restart it with more")
        self._touch(self.slots, slots)
        for weight in (self.bank.gate_up, self.bank.down):
            data = data_of(weight)
            each = data[0].nbytes if len(data) else 0
            if slots < self.slots:
                give_back(data.data_ptr() + slots * each, (self.slots - slots) * each)
        self.slots = slots

    def _touch(self, first: int, behind: int) -> None:
        """Take the memory of these slots now, instead of during the first copies. What is in them stays.

        After a resize that failed when its work was done, `slots` is no longer the number that their owner counts with.
        """
        for weight in (self.bank.gate_up, self.bank.down):
            data = data_of(weight)[first:behind].view(torch.uint8).view(-1)
            for byte in (data[:: mmap.PAGESIZE], data[-1:]):
                byte.bitwise_or_(0)


def copy_expert(source: Bank, i: int, to: Bank, j: int) -> None:
    for a, b in ((source.gate_up, to.gate_up), (source.down, to.down)):
        data_of(b)[j].copy_(data_of(a)[i])
