"""One layer call over two memories: which experts are computed where they are, which when they have come, and the merge."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

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
        self._flat = ids.numpy().reshape(-1)  # numpy: a tenth of torch's time on so little
        self._bank = owner.pool.bank(layer)
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
        asked = (np.unique(self._flat) + self._first).tolist()
        owner.expect(asked)
        if self._bank is None and not owner.slots.room():
            owner.settle()  # copies for another layer hold every slot, and nothing can be computed without one
        likely = owner.predicted(self._layer, self._x, self._ids.shape[1])
        found = owner.slots.request(asked)
        arriving = [k for k in found.misses if k in owner.coming]
        misses = [k for k in found.misses if k not in owner.coming]
        self._pin([*found.hits, *arriving])
        spare = max(0, owner.slots.room() - len(misses))
        held = [k for k in likely if owner.slots.where[k] >= 0][:spare]
        owner.slots.pin(held)  # who is likely to be needed next must not leave for those that are needed now
        fetched = owner.fetch(misses[: owner.fetch_count(len(misses))])
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
        self._compute(hits)
        self._compute_coming(coming)
        return self._sum()

    def _branches(self, rest: list[int], hits: list[int], coming: list[int], fetched: int) -> None:
        """The processor computes the rest from the pool while the link copies, then hits, then what has arrived."""
        link, rates = self._owner.link, self._owner.rates
        began, busy, moved = time.perf_counter(), link.busy_s, link.bytes
        self._compute(rest, in_slots=False)
        host_s = time.perf_counter() - began
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
        self._compute(lost, in_slots=False)

    def _merge(self, hits: Sequence[int], coming: list[int], lost: list[int]) -> torch.Tensor:
        self._compute([*hits, *(k for k in coming if k not in lost)])
        self._compute(lost, in_slots=False)
        return self._sum()

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
        return self._owner.ops.moe(self._x, self._ids, self._weights, bank.gate_up, bank.down, bank.act, self._place())

    def _in_pool(self) -> torch.Tensor:
        bank = self._bank
        return self._owner.ops.moe(self._x, self._ids, self._weights, bank.gate_up, bank.down, bank.act)

    def _place(self) -> torch.Tensor:
        where = self._owner.slots.where[self._first : self._first + self._owner.experts]
        return torch.from_numpy(where.copy())

    def _compute(self, keys: Sequence[int], in_slots: bool = True) -> None:
        """Fill the parts of these experts."""
        if not keys:
            return
        if not in_slots and self._bank is None:
            raise Unreadable(
                f"{len(keys)} experts of layer {self._layer} could not be read; see the log, and pack the model again"
            )
        wanted = np.zeros(self._owner.experts, bool)
        wanted[[k - self._first for k in keys]] = True
        pairs = np.flatnonzero(wanted[self._flat])
        bank, place = (self._owner.arena.bank, self._place()) if in_slots else (self._bank, None)
        rows = self._x.index_select(0, torch.from_numpy(pairs // self._ids.shape[1]))
        ids = torch.from_numpy(self._flat[pairs])
        if self._parts is None:
            self._parts = torch.empty(len(self._flat), self._x.shape[1])
        out = self._owner.ops.expert_rows(rows, ids, bank.gate_up, bank.down, bank.act, place)
        self._parts.index_copy_(0, torch.from_numpy(pairs), out)

    def _sum(self) -> torch.Tensor:
        return self._owner.ops.moe_merge(self._parts.view(*self._ids.shape, -1), self._ids, self._weights)
