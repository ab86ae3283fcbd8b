"""Fast memory: an arena of expert-sized slots. Which expert goes where is `slots`', who copies is `link`."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from engine.experts.pool import Pool, Room, bank_bytes, copy_expert, data_of
from engine.experts.streams import Device, Mark
from engine.kernels.ops import Quant, Weight
from engine.lean import torch
from engine.nn.experts import Bank


class Arena:
    """Slots of host memory for copies of a pool's experts. Raises MemoryError."""

    emptied = 0  # times that a change of size cost all that lay in slots

    def __init__(self, pool: Pool, slots: int) -> None:
        self._pool = pool
        self._room = Room(pool.like, slots, pool.layers * pool.experts)

    @property
    def bank(self) -> Bank:
        """Row s is slot s; there may be more rows than slots in use."""
        return self._room.bank

    def put(self, key: int, slot: int, part: int) -> int:
        """Copy a piece of expert `key` of the pool into `slot`; returns its bytes."""
        return self._pool.read(key, self._room.bank, slot, part)

    def check(self, key: int, slot: int) -> None:
        """Raises OSError when what lies in `slot` is not expert `key`."""
        self._pool.check(key, self._room.bank, slot)

    def reading(self, slots: Iterable[int]) -> None:
        """Kernels that read these were begun; here they have ended."""

    def resize(self, slots: int, moves: Iterable[tuple[int, int]] = ()) -> None:
        """Have `slots` slots. `moves`: (old, new) slots of the experts that stay, all of which exist before and after.

        Fewer return their memory to the system at once. Raises MemoryError with everything as it was.
        """
        for old, new in moves:
            copy_expert(self._room.bank, old, self._room.bank, new)
        self._room.resize(slots)


class DeviceArena:
    """Slots in a device's memory. What comes into one waits for the kernels that read it. Raises MemoryError.

    An expert counts as there when the processor has seen its copy end: a copy that failed is known before anything is computed
    with it, and rates are those of bytes that came.
    """

    def __init__(self, pool: Pool, slots: int, device: Device) -> None:
        self._pool, self._device = pool, device
        self._own = threading.local()  # page-locked memory of each thread of the link
        self.emptied = 0
        self._lay(slots)

    def _lay(self, slots: int) -> None:
        like = self._pool.like
        with torch.inference_mode(False):  # the link's threads may not write to tensors of it
            self.bank = replace(like, gate_up=self._room(like.gate_up, slots), down=self._room(like.down, slots))
            # as bytes, [slots, bytes of a matrix]
            self._bytes = [_rows(data_of(weight)) for weight in (self.bank.gate_up, self.bank.down)]
        # Memory that was freed may be ours while kernels begun before still use it.
        self._read: list[Mark] = [self._device.mark()] * slots

    def _room(self, like: Weight, slots: int) -> Weight:
        data = self._device.empty((slots, *data_of(like).shape[1:]), data_of(like).dtype)
        return Quant(data, like.type, like.cols) if isinstance(like, Quant) else data

    def put(self, key: int, slot: int, part: int) -> int:
        """As `Arena.put`. Two threads keep one copy queued behind the one under way."""
        pieces = self._pool.pieces(key, part, self._stage)
        pairs = [(self._bytes[i][slot, at : at + len(data)], data) for i, at, data in pieces]
        self._device.copy(pairs, [self._read[slot]]).synchronize()
        return sum(data.nbytes for _, _, data in pieces)

    def _stage(self, size: int) -> torch.Tensor:
        """Page-locked memory of this thread; free again, because each copy is waited for."""
        held = getattr(self._own, "stage", None)
        if held is None or len(held) < size:
            self._own.stage = held = self._device.pinned(size)
        return held[:size]

    def check(self, key: int, slot: int) -> None:
        """As `Arena.check`; reads the slot back, the first time an expert comes."""
        if self._pool.verified(key):
            return
        back, pairs = self._stage(bank_bytes(self.bank) // len(self._read)), []
        for flat in self._bytes:
            part, back = back[: flat.shape[1]], back[flat.shape[1] :]
            pairs.append((part, flat[slot]))
        self._device.copy(pairs).synchronize()
        self._pool.check(key, self._as_bank([part for part, _ in pairs]), 0)

    def _as_bank(self, parts: list[torch.Tensor]) -> Bank:
        """One expert's bytes in host memory as a bank."""

        def weight(like: Weight, flat: torch.Tensor) -> Weight:
            data = flat.view(data_of(like).dtype).view(1, *data_of(like).shape[1:])
            return Quant(data, like.type, like.cols) if isinstance(like, Quant) else data

        like = self._pool.like
        return replace(like, gate_up=weight(like.gate_up, parts[0]), down=weight(like.down, parts[1]))

    def reading(self, slots: Iterable[int]) -> None:
        """Kernels that read these were begun: what comes into one of them waits for their end."""
        mark = self._device.mark()
        for slot in slots:
            self._read[slot] = mark

    def resize(self, slots: int, moves: Iterable[tuple[int, int]] = ()) -> None:
        """As `Arena.resize`, but for a moment both must fit; where they do not, what lay in slots is lost (`emptied`).

        Raises MemoryError with as many slots as before.
        """
        self._device.finish()
        before, held = self.bank, len(self._read)
        try:
            self._lay(slots)
        except MemoryError:
            before = None
        if before is None:
            self._start_over(held, slots)
            return
        both = min(held, slots)
        for old, new in zip((before.gate_up, before.down), (self.bank.gate_up, self.bank.down), strict=True):
            data_of(new)[:both].copy_(data_of(old)[:both])
        for old, new in moves:
            copy_expert(before, old, self.bank, new)
        self._read = [self._device.mark()] * slots
        del before, old, new
        self._device.finish()

    def _start_over(self, held: int, slots: int) -> None:
        self.emptied += 1
        del self.bank, self._bytes
        self._device.finish()
        try:
            self._lay(slots)
        except MemoryError:
            self._lay(held)
            raise


def _rows(data: torch.Tensor) -> torch.Tensor:
    """[slots, ...] -> uint8 [slots, bytes of one]"""
    each = data.shape[1:].numel() * data.element_size()
    return data.view(torch.uint8).view(data.shape[0], each)
