"""One layer call over two memories: which experts are computed where they are, which when they have come, and the merge."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from engine.experts.filelink import FileLink
from engine.lean import torch

if TYPE_CHECKING:
    from engine.experts.executor import TieredExperts

APART_S = 3e-4  # what a call computed in parts takes more than one computed at once: control_apart of ops/bench/experts.py


class Unreadable(Exception):
    """An expert that can only be read from a file could not be. One line for the user."""


class Call:
    """Sorts a layer's experts, has misses copied, computes what is there while they come, merges."""

    def __init__(self, owner: TieredExperts, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._owner, self._layer = owner, layer
        self._x, self._ids, self._weights = x, ids, weights
        self._device = owner.device
        if owner.device.apart and owner.tier.mode != "offload":
            host_ids, self._host_x = owner.device.to_host(ids, x)  # the processor computes some of its rows
        else:
            (host_ids,), self._host_x = owner.device.to_host(ids), x
        self._flat = host_ids.numpy().reshape(-1)  # numpy: a tenth of torch's time on so little
        self._bank = owner.pool.bank(layer) if owner.host is not None else None  # None: nothing is computed there
        self._first = layer * owner.experts
        self._pinned: list[int] = []
        self._parts: torch.Tensor | None = None  # [T * k, H], once something is computed apart
        self.waited = 0.0
        self.asked_at = 0.0  # when the link was given what this layer misses
        self.coming = False  # it missed something, or something it needs was on its way
        self.dry_at = 0.0  # when nothing of it was on its way any more

    def run(self) -> torch.Tensor:
        owner = self._owner
        owner.counts["top_k"] = self._ids.shape[1]
        asked = [self._first + e for e in sorted(set(self._flat.tolist()))]
        owner.expect(asked)
        if self._bank is None and not owner.slots.room():
            owner.settle()  # copies for another layer hold every slot, and nothing can be computed without one
        found = owner.slots.request(asked)
        arriving = [k for k in found.misses if k in owner.coming]
        misses = [k for k in found.misses if k not in owner.coming]
        self._pin([*found.hits, *arriving])
        count = owner.fetch_count(len(misses))
        fetched = owner.fetch_first(misses, self._layer) if count else []  # the link begins; the rest is thought about meanwhile
        likely = owner.predicted(self._layer, self._x, self._ids.shape[1])
        spare = max(0, owner.slots.room() - len(misses) + len(fetched))
        held = [k for k in likely if owner.slots.where[k] >= 0][:spare]
        owner.slots.pin(held)  # who is likely to be needed next must not leave for those that are needed now
        fetched += owner.fetch(misses[len(fetched) : count])
        coming = [*arriving, *fetched]
        self.asked_at = self.dry_at = time.perf_counter()
        self.coming = bool(coming)
        self._pin(fetched)
        if len(fetched) == len(misses):
            owner.fetch_predicted(likely, len(self._x), bool(coming))
        owner.slots.unpin(held)
        rest = [k for k in misses if k not in fetched]
        owner.copy_ahead(self._layer + 1, len(self._x), self._ids.shape[1])
        hits = [*found.hits]
        if not rest:
            if owner.copy_seconds(len(coming)) > APART_S:
                return self._as_they_come(hits, coming)
            lost = self._receive(coming)
            return self._in_slots() if not lost else self._merge(hits, coming, lost)
        if len(rest) == len(misses) + len(arriving) + len(hits) and self._bank is not None:
            return self._in_pool()
        if owner.tier.mode == "offload":
            self._waves(rest, hits, coming)
        else:
            self._branches(rest, hits, coming, len(fetched))
        return self._sum()

    def release(self) -> None:
        self._owner.slots.unpin(self._pinned)
        self._pinned = []

    # --- where and when

    def _as_they_come(self, hits: list[int], coming: list[int]) -> torch.Tensor:
        """The processor computes what is there while the link copies, and the others one after the other."""
        owner = self._owner
        if isinstance(owner.link, FileLink) and hasattr(owner.ops, "moe_arriving"):
            return self._as_they_are_read(coming, owner.link)
        self._compute(hits)
        self._compute_coming(coming)
        return self._sum()

    def _as_they_are_read(self, coming: list[int], link: FileLink) -> torch.Tensor:
        """The same in one call of the kernels, each expert as far as its pieces are there."""
        owner, bank = self._owner, self._owner.arena.bank
        place = self._place({key: owner.slots.filling(key) for key in coming})
        wanted = [(key - self._first, key) for key in coming]
        out, lost, self.waited = owner.ops.moe_arriving(
            self._x, self._ids, self._weights, bank.gate_up, bank.down, bank.act, place, wanted, link.reader
        )
        self._receive(coming)
        self._compute(lost, in_slots=False)
        return out

    def _branches(self, rest: list[int], hits: list[int], coming: list[int], fetched: int) -> None:
        """The processor computes the rest from the pool while the link copies, then hits, then what has arrived.

        A device is given its hits first: it computes them meanwhile.
        """
        link, rates = self._owner.link, self._owner.rates
        if self._device.apart:
            self._compute(hits)
        began, busy, moved = time.perf_counter(), link.busy_s, link.bytes
        self._compute(rest, in_slots=False)
        host_s = time.perf_counter() - began
        if not self._device.apart:
            self._compute(hits)
        self._compute_coming(coming)
        if rates is not None:
            host_bytes = len(rest) * self._owner.slot_bytes
            rates.observe(host_bytes, host_s, link.bytes - moved, link.busy_s - busy, overlapped=bool(fetched))

    def _waves(self, rest: list[int], hits: list[int], coming: list[int]) -> None:
        """More experts than slots: as many at a time as fit."""
        self._compute(hits)
        while True:
            self._compute_coming(coming)
            if not rest:
                return
            self.release()
            coming = self._owner.fetch(rest[: self._owner.slots.room()])
            if not coming and self._bank is None:
                self._owner.settle()  # every slot was being filled for another layer
                coming = self._owner.fetch(rest[: self._owner.slots.room()])
            if not coming:
                self._compute(rest, in_slots=False)
                return
            self._pin(coming)
            rest = rest[len(coming) :]

    def _compute_coming(self, keys: Sequence[int]) -> None:
        """Experts on their way, as soon as they are there; those that do not come, from the pool."""
        left, lost = dict.fromkeys(keys), []
        while left:
            began = time.perf_counter()
            come = self._owner.link.first(left)
            self.waited += time.perf_counter() - began
            failed = self._receive(come)
            self._compute([k for k in come if k not in failed])
            lost += failed
            for key in come:
                del left[key]
        self._compute_lost(lost)

    def _merge(self, hits: Sequence[int], coming: list[int], lost: list[int]) -> torch.Tensor:
        self._compute([*hits, *(k for k in coming if k not in lost)])
        self._compute_lost(lost)
        return self._sum()

    def _compute_lost(self, keys: list[int]) -> None:
        """Experts whose copies failed: from the pool, or from a second copy where nothing is computed there."""
        if keys and self._owner.host is None and self._owner.pool.bank(self._layer) is not None:
            again = self._owner.fetch(keys)
            self._pin(again)
            lost = self._receive(again)
            self._compute([k for k in again if k not in lost])
            keys = [k for k in keys if k not in again or k in lost]
        self._compute(keys, in_slots=False)

    def _receive(self, keys: list[int]) -> list[int]:
        """Wait for `keys`; returns those that did not come."""
        began, lost = time.perf_counter(), []
        for key in keys:
            when = self._owner.receive(key)
            if when is None:
                lost.append(key)
            else:
                self.dry_at = max(self.dry_at, when)
        self.waited += time.perf_counter() - began
        return lost

    def _pin(self, keys: list[int]) -> None:
        self._owner.slots.pin(keys)
        self._pinned += keys

    # --- arithmetic

    def _in_slots(self) -> torch.Tensor:
        bank = self._owner.arena.bank
        (place,) = self._device.to_device(self._place())
        out = self._owner.ops.moe(self._x, self._ids, self._weights, bank.gate_up, bank.down, bank.act, place)
        self._reading(np.unique(self._flat) + self._first)
        return out

    def _reading(self, keys: Sequence[int] | np.ndarray) -> None:
        """Kernels that read their slots were begun."""
        if self._device.apart:
            self._owner.arena.reading(self._owner.slots.where[keys].tolist())

    def _in_pool(self) -> torch.Tensor:
        bank = self._bank
        if self._device.apart:
            self._compute((np.unique(self._flat) + self._first).tolist(), in_slots=False)
            return self._sum()
        return self._owner.ops.moe(self._x, self._ids, self._weights, bank.gate_up, bank.down, bank.act)

    def _place(self, coming: Mapping[int, int] = MappingProxyType({})) -> torch.Tensor:
        """Slot of each expert of the layer; of those `coming` (key -> slot) the one in which they will be."""
        where = self._owner.slots.where[self._first : self._first + self._owner.experts].copy()
        for key, slot in coming.items():
            where[key - self._first] = slot
        return torch.from_numpy(where)

    def _compute(self, keys: Sequence[int], in_slots: bool = True) -> None:
        """Fill the parts of these experts."""
        if not keys:
            return
        if not in_slots and self._bank is None:
            packed = self._owner.pool.bank(self._layer) is None
            what, hint = ("read", "pack the model again") if packed else ("copied to the device", "restart the engine")
            raise Unreadable(f"{len(keys)} experts of layer {self._layer} could not be {what}; see the log, and {hint}")
        wanted = np.zeros(self._owner.experts, bool)
        wanted[[k - self._first for k in keys]] = True
        pairs = np.flatnonzero(wanted[self._flat])
        where, rows = torch.from_numpy(pairs), torch.from_numpy(pairs // self._ids.shape[1])
        ids = torch.from_numpy(self._flat[pairs])
        if self._parts is None:
            self._parts = self._device.empty((len(self._flat), self._x.shape[1]), self._x.dtype)
        if in_slots:
            bank, ops = self._owner.arena.bank, self._owner.ops
            where, rows, ids, place = self._device.to_device(where, rows, ids, self._place())
            out = ops.expert_rows(self._x.index_select(0, rows), ids, bank.gate_up, bank.down, bank.act, place)
            self._reading(keys)
        else:
            bank, ops = self._bank, self._owner.host
            out = ops.expert_rows(self._host_x.index_select(0, rows), ids, bank.gate_up, bank.down, bank.act)
            where, out = self._device.to_device(where, out)
        self._parts.index_copy_(0, where, out)

    def _sum(self) -> torch.Tensor:
        return self._owner.ops.moe_merge(self._parts.view(*self._ids.shape, -1), self._ids, self._weights)
