"""Routed experts over two memories: hits from slots, misses fetched or computed where they lie, results merged exactly.

One control loop for every machine with a fast memory of its own and for the emulated one. `slots` decides who lies where,
`split` how many misses are fetched, `prefill` whether whole layers are copied ahead, `Link` moves the bytes; the arithmetic is
`Ops`'. The pool stays the truth: a copy that fails costs time, never an answer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from engine.experts.arena import Arena, CopyFailed, Link
from engine.experts.pool import Pool
from engine.experts.predict import Guesses, Predictor
from engine.experts.prefill import Prefill
from engine.experts.rates import Watched
from engine.experts.slots import Slots
from engine.experts.split import Rates, best_split
from engine.kernels.ops import Ops
from engine.protocol import log_line

log = logging.getLogger(__name__)

PRELOAD = 32  # experts asked for at once: keeps every reader busy

Mode = Literal["offload", "hybrid", "host"]


@dataclass(frozen=True)
class Tier:
    """How a fast memory is used. `link_rate` in bytes per second emulates a slower link; None is as fast as it goes."""

    slots: int
    mode: Mode = "offload"
    rates: Rates | None = None  # needed by hybrid; by the others only for copying layers ahead
    policy: str = "lru"
    link_rate: float | None = None
    workers: int = 1  # copies in flight at once


class Unreadable(Exception):
    """An expert that can only be read from a file could not be. One line for the user."""


class TieredExperts:
    """`nn.experts.Experts` over an arena of slots. One thread calls it; the link has its own."""

    def __init__(self, pool: Pool, ops: Ops, tier: Tier, predictor: Predictor | None = None) -> None:
        if tier.mode == "hybrid" and tier.rates is None:
            raise ValueError("hybrid needs measured rates: run `moorage engine bench bw`")
        self._pool, self._ops, self.tier = pool, ops, tier
        self._experts = pool.experts
        self._arena = Arena(pool, tier.slots)
        self.slots = Slots(tier.slots, pool.layers, self._experts, tier.policy)
        self._link = Link(lambda key, slot: self._arena.put(key, slot), tier.link_rate, tier.workers)
        self._coming: set[int] = set()  # submitted to the link, not landed
        self._bytes = pool.expert_bytes
        self._prefill = Prefill()
        self._predictor, self._guesses = predictor, Guesses()
        self._rates = Watched(tier.rates) if tier.rates else None
        self._ended: tuple[int, float] | None = None  # layer and time of the last call's end
        self.counts: Counter[str] = Counter()

    @property
    def pool(self) -> Pool:
        return self._pool

    @property
    def slot_bytes(self) -> int:
        return self._bytes

    @property
    def capacity(self) -> int:
        """Slots; at least those of one layer (`least`), at most one for each expert (`most`)."""
        return self.slots.capacity

    @property
    def least(self) -> int:
        return self._experts

    @property
    def most(self) -> int:
        return self._pool.layers * self._experts

    @property
    def what(self) -> str:
        """What `least` slots are."""
        return f"one layer of {self._experts} experts"

    # --- one layer call

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        moved, busy = self._link.bytes, self._link.busy_s
        call = _Call(self, layer, x, ids, weights)
        try:
            out = call.run()
        except BaseException:
            self.settle()
            self._ended = None
            raise
        finally:
            call.release()
        if self._rates and self.tier.mode == "offload":
            self._rates.observe(0, 0.0, self._link.bytes - moved, self._link.busy_s - busy, overlapped=False)
        now = time.perf_counter()
        between = began - self._ended[1] if self._ended and self._ended[0] == layer - 1 else 0.0
        self._prefill.observe(len(x), between + now - began - call.waited)
        self._ended = (layer, now)
        return out

    def collect(self) -> None:
        """Take in what has arrived meanwhile; never waits."""
        for key in [k for k in self._coming if self._link.arrived(k)]:
            self.receive(key)

    def receive(self, key: int) -> bool:
        """Wait for a coming expert; False when its copy failed (it is then as absent as before)."""
        self._coming.discard(key)
        try:
            self._link.wait(key)
        except CopyFailed as problem:
            self.slots.lost(key)
            self.counts["copy_failed"] += 1
            log.warning(log_line("expert copy failed", key=key, why=str(problem)))
            return False
        self.slots.landed(key)
        return True

    def fetch(self, keys: Iterable[int]) -> list[int]:
        """Start copying as many of `keys` as get a slot; returns them."""
        fetches = self.slots.fetch(keys)
        self._coming.update(f.key for f in fetches)
        self._link.submit(fetches)
        return [f.key for f in fetches]

    def fetch_count(self, misses: int) -> int:
        """How many of a layer's misses come into slots."""
        if self.tier.mode == "host":
            return 0
        room = self.slots.room()
        return best_split(misses, self._rates.now, room) if self.tier.mode == "hybrid" else min(misses, room)

    def copy_ahead(self, layer: int, rows: int, top_k: int) -> None:
        """Start copying the whole of `layer` when that is expected to be faster than fetching on demand, and it fits."""
        if layer >= self._pool.layers or self._rates is None or self.tier.mode == "host" or rows == 1:
            return
        keys = range(layer * self._experts, (layer + 1) * self._experts)
        absent = [k for k in keys if self.slots.where[k] < 0 and k not in self._coming]
        seconds = self._bytes / self._rates.now.link
        if len(absent) > self.slots.room() or not self._prefill.copy_ahead(rows, len(absent), self._experts, top_k, seconds):
            return
        present = [k for k in keys if self.slots.where[k] >= 0]
        self.slots.pin(present)  # they are of the layer that is about to be needed whole
        self.counts["layers_ahead"] += 1
        self.counts["ahead"] += len(self.fetch(absent))
        self.slots.unpin(present)

    def predicted(self, layer: int, x: torch.Tensor, top_k: int) -> list[int]:
        """Keys of the next layer that are likely to be asked for, the likeliest first."""
        if self._predictor is None or self.tier.mode != "offload":
            return []
        keys = [(layer + 1) * self._experts + e for e in self._predictor.predict(layer, x, top_k)]
        self._guesses.say(keys)
        return keys

    def fetch_predicted(self, keys: Sequence[int], rows: int) -> None:
        """Behind the misses of this layer, as many as the link can bring while it would idle: more would delay real misses."""
        absent = [k for k in keys if self.slots.where[k] < 0 and k not in self._coming]
        idle = self._prefill.layer_seconds(rows)
        if idle is not None and self._rates is not None:
            absent = absent[: int(idle * self._rates.now.link / self._bytes)]
        fetched = self.fetch(absent)
        self._guesses.open.update(fetched)
        self._guesses.fetched += len(fetched)

    def drop_wrong(self, asked: Iterable[int]) -> None:
        """What was predicted for this layer in vain and has not begun to come makes way for what it asks for."""
        for key in self._link.cancel(self._guesses.settle(asked) & self._coming):
            self._coming.discard(key)
            self.slots.lost(key)

    def preload(self, progress: Callable[[int], None]) -> None:
        """Fill free slots, layers evenly, before anybody waits for them. `progress` gets the bytes of each step.

        An expert that cannot be read is left out, aloud; who needs it is told then.
        """
        count = min(self.slots.capacity, self.most)
        order = [layer * self._experts + e for e in range(self._experts) for layer in range(self._pool.layers)]
        for at in range(0, count, PRELOAD):
            for key in self.fetch(order[at : min(at + PRELOAD, count)]):
                progress(self._bytes if self.receive(key) else 0)

    # --- safe points

    def settle(self) -> None:
        """Nothing is being copied after it: what has not begun is taken back, the rest awaited."""
        for key in self._link.cancel(self._coming):
            self._coming.discard(key)
            self.slots.lost(key)
        for key in list(self._coming):
            self.receive(key)

    def resize(self, slots: int) -> None:
        """Change the number of slots between steps; the best experts stay. Raises MemoryError with everything as it was.

        No change needs memory for two of them: slots stay where they are, and what goes returns to the system at once.
        """
        self.settle()
        capacity = self.slots.capacity
        if slots > capacity:
            self._arena.resize(slots)
        before = {key: int(self.slots.where[key]) for key in self.slots.resident}
        try:
            moves = self.slots.resize(slots)
            if slots < capacity:
                self._arena.resize(slots, [(before[move.key], move.slot) for move in moves])
        except BaseException:
            # Who of those that moved was copied is not known.
            self.slots.drop([key for key in self.slots.resident if self.slots.where[key] != before[key]])
            self.slots.resize(capacity)
            if slots > capacity:
                self._arena.resize(capacity)
            raise
        self.counts["resized"] += 1

    def evict(self, keys: Iterable[int]) -> None:
        self.settle()
        self.slots.drop(keys)

    def close(self) -> None:
        """End the link and give the slots' memory back."""
        self.settle()
        self._link.close()
        self._arena.resize(0)

    def status(self) -> dict[str, object]:
        c, rates = self.slots.counts, self._rates
        seconds = self._bytes / rates.now.link if rates else 0.0
        crossing = self._prefill.crossing(self._experts, max(1, self.counts["top_k"]), seconds) if rates else None
        return {
            "mode": self.tier.mode,
            "policy": self.slots.policy,
            "slots": self.slots.capacity,
            "resident": len(self.slots.resident),
            "slot_bytes": self._bytes,
            "hits": c.hits,
            "misses": c.misses,
            "fetched": c.fetched,
            "evicted": c.evicted,
            "resized": self.counts["resized"],
            "copy_failed": self.counts["copy_failed"],
            "layers_copied_ahead": self.counts["layers_ahead"],
            "whole_layers_from_rows": crossing,
            "predictions": self._guesses.status() if self._predictor else None,
            "rates": rates.status() if rates else None,
        }


class _Call:
    """One layer call: sorts its experts, has misses copied, computes what is there, merges."""

    def __init__(self, owner: TieredExperts, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._owner, self._layer = owner, layer
        self._x, self._ids, self._weights = x, ids, weights
        self._bank = owner._pool.bank(layer)
        self._first = layer * owner._experts
        self._pinned: list[int] = []
        self._parts: torch.Tensor | None = None  # [T * k, H], once something is computed apart
        self.waited = 0.0

    def run(self) -> torch.Tensor:
        owner = self._owner
        owner.collect()
        if self._bank is None and not owner.slots.room():
            owner.settle()  # copies for another layer hold every slot, and nothing can be computed without one
        owner.counts["top_k"] = self._ids.shape[1]
        asked = (self._ids.unique() + self._first).tolist()
        owner.drop_wrong(asked)
        likely = owner.predicted(self._layer, self._x, self._ids.shape[1])
        found = owner.slots.request(asked)
        arriving = [k for k in found.misses if k in owner._coming]
        misses = [k for k in found.misses if k not in owner._coming]
        self._pin([*found.hits, *arriving])
        spare = max(0, owner.slots.room() - len(misses))
        held = [k for k in likely if owner.slots.where[k] >= 0][:spare]
        owner.slots.pin(held)  # who is likely to be needed next must not leave for those that are needed now
        fetched = owner.fetch(misses[: owner.fetch_count(len(misses))])
        self._pin(fetched)
        if len(fetched) == len(misses):
            owner.fetch_predicted(likely, len(self._x))
        owner.slots.unpin(held)
        rest = [k for k in misses if k not in fetched]
        owner.copy_ahead(self._layer + 1, len(self._x), self._ids.shape[1])
        if not rest:
            lost = self._receive([*arriving, *fetched])
            return self._in_slots() if not lost else self._merge(found.hits, [*arriving, *fetched], lost)
        if len(rest) == len(found.misses) + len(found.hits) and self._bank is not None:
            return self._in_pool()
        if owner.tier.mode == "offload":
            self._waves(rest, [*found.hits], [*arriving, *fetched])
        else:
            self._branches(rest, [*found.hits], [*arriving, *fetched], len(fetched))
        return self._sum()

    def release(self) -> None:
        self._owner.slots.unpin(self._pinned)
        self._pinned = []

    # --- where and when

    def _branches(self, rest: list[int], hits: list[int], coming: list[int], fetched: int) -> None:
        """The processor computes the rest from the pool while the link copies, then hits, then what has arrived."""
        began, busy, moved = time.perf_counter(), self._owner._link.busy_s, self._owner._link.bytes
        self._compute(rest, in_slots=False)
        host_s = time.perf_counter() - began
        self._compute(hits)
        lost = self._receive(coming)
        self._compute([k for k in coming if k not in lost])
        self._compute(lost, in_slots=False)
        link, rates = self._owner._link, self._owner._rates
        if rates is not None:
            host_bytes = len(rest) * self._owner._bytes
            rates.observe(host_bytes, host_s, link.bytes - moved, link.busy_s - busy, overlapped=bool(fetched))

    def _waves(self, rest: list[int], hits: list[int], coming: list[int]) -> None:
        """More experts than slots: as many at a time as fit."""
        self._compute(hits)
        while True:
            lost = self._receive(coming)
            self._compute([k for k in coming if k not in lost])
            self._compute(lost, in_slots=False)
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

    def _merge(self, hits: Sequence[int], coming: list[int], lost: list[int]) -> torch.Tensor:
        self._compute([*hits, *(k for k in coming if k not in lost)])
        self._compute(lost, in_slots=False)
        return self._sum()

    def _receive(self, keys: list[int]) -> list[int]:
        """Wait for `keys`; returns those that did not come."""
        began = time.perf_counter()
        lost = [k for k in keys if not self._owner.receive(k)]
        self.waited += time.perf_counter() - began
        return lost

    def _pin(self, keys: list[int]) -> None:
        self._owner.slots.pin(keys)
        self._pinned += keys

    # --- arithmetic

    def _in_slots(self) -> torch.Tensor:
        bank = self._owner._arena.bank
        return self._owner._ops.moe(self._x, self._ids, self._weights, bank.gate_up, bank.down, bank.act, self._place())

    def _in_pool(self) -> torch.Tensor:
        bank = self._bank
        return self._owner._ops.moe(self._x, self._ids, self._weights, bank.gate_up, bank.down, bank.act)

    def _place(self) -> torch.Tensor:
        where = self._owner.slots.where[self._first : self._first + self._owner._experts]
        return torch.from_numpy(where.copy())

    def _compute(self, keys: Sequence[int], in_slots: bool = True) -> None:
        """Fill the parts of these experts."""
        if not keys:
            return
        if not in_slots and self._bank is None:
            raise Unreadable(
                f"{len(keys)} experts of layer {self._layer} could not be read; see the log, and pack the model again"
            )
        top_k, flat = self._ids.shape[1], self._ids.reshape(-1)
        wanted = torch.zeros(self._owner._experts, dtype=torch.bool)
        wanted[[k - self._first for k in keys]] = True
        pairs = wanted[flat].nonzero()[:, 0]
        bank, place = (self._owner._arena.bank, self._place()) if in_slots else (self._bank, None)
        rows = self._x[pairs // top_k]
        if self._parts is None:
            self._parts = torch.empty(len(flat), self._x.shape[1])
        self._parts[pairs] = self._owner._ops.expert_rows(rows, flat[pairs], bank.gate_up, bank.down, bank.act, place)

    def _sum(self) -> torch.Tensor:
        return self._owner._ops.moe_merge(self._parts.view(*self._ids.shape, -1), self._ids, self._weights)
