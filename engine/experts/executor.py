"""Routed experts over two memories: hits from slots, misses fetched or computed where they lie, results merged exactly.

One control loop for every machine with a fast memory of its own and for the emulated one. `slots` decides who lies where,
`split` how many misses are fetched, `prefill` whether whole layers are copied ahead, `Link` moves the bytes, `streams` is the
memory of the slots; the arithmetic is `Ops`'. The pool stays the truth: a copy that fails costs time, never an answer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.experts.arena import Arena, DeviceArena
from engine.experts.call import Call
from engine.experts.filelink import FileLink, reads_by_itself
from engine.experts.layers import spans
from engine.experts.link import CopyFailed, Link, TakenBack
from engine.experts.pool import Pool
from engine.experts.predict import Guesses, Predictor
from engine.experts.prefill import Prefill
from engine.experts.rates import Watched
from engine.experts.slots import Slots
from engine.experts.split import Rates, best_split
from engine.experts.streams import HERE, Device
from engine.kernels.ops import Ops
from engine.lean import torch
from engine.protocol import log_line

log = logging.getLogger(__name__)

PRELOAD = 32  # experts asked for at once: keeps every reader busy
COPIES = 2  # to a device, given to it at once: the next begins when one ends, not when a thread has woken up

Mode = Literal["offload", "hybrid", "host"]


@dataclass(frozen=True)
class Tier:
    """How a fast memory is used. `link_rate` in bytes per second emulates a slower link; None is as fast as it goes."""

    slots: int
    mode: Mode = "offload"
    rates: Rates | None = None  # needed by hybrid; by the others only for copying layers ahead
    policy: str = "lru"
    link_rate: float | None = None
    workers: int = 1  # pieces in flight at once
    fixed: bool = False  # this number of slots and no other: none at all, or one for each expert


@dataclass(frozen=True)
class _Last:
    """The last call: its layer, when it ended, whether it had experts copied, and when the last of those was there."""

    layer: int
    ended_at: float
    coming: bool
    dry_at: float


class TieredExperts:
    """`nn.experts.Experts` over an arena of slots. One thread calls it; the link has its own.

    Slots lie in `device`'s memory, where `ops` computes. `host` computes what stays in host memory; it must have `ops`'
    arithmetic, else answers would depend on what lay where. None on a device: nothing is computed there, all misses are fetched.
    """

    def __init__(
        self,
        pool: Pool,
        ops: Ops,
        tier: Tier,
        predictor: Predictor | None = None,
        device: Device = HERE,
        host: Ops | None = None,
    ) -> None:
        if tier.mode == "hybrid" and tier.rates is None:
            raise ValueError("hybrid needs measured rates: run `moorage engine bench bw`")
        self.pool, self.ops, self.tier, self.device = pool, ops, tier, device
        self.host = host if device.apart else ops
        if self.host is None and (tier.mode != "offload" or not tier.slots):
            raise ValueError(f"{tier.mode} with {tier.slots} slots computes in host memory, for which there are no kernels")
        self.experts = pool.experts
        self.arena = DeviceArena(pool, tier.slots, device) if device.apart else Arena(pool, tier.slots)
        self.slots = Slots(tier.slots, pool.layers, self.experts, tier.policy)
        check = self.arena.check if pool.bank(0) is None else None  # memory keeps what was written
        workers = max(tier.workers, COPIES) if device.apart else tier.workers
        self.link: Link | FileLink
        if reads_by_itself(pool) and not device.apart and tier.link_rate is None:
            self.link = FileLink(pool, self.arena, workers)
        else:
            self.link = Link(lambda *piece: self.arena.put(*piece), tier.link_rate, workers, pool.parts, check)
        self.coming: set[int] = set()  # submitted to the link, not landed
        self.slot_bytes = pool.expert_bytes
        self._prefill = Prefill()
        self._predictor, self._guesses = predictor, Guesses()
        self.rates = Watched(tier.rates) if tier.rates else None
        self._last: _Last | None = None
        self.counts: Counter[str] = Counter()

    @property
    def capacity(self) -> int:
        """Slots; at least those of one layer (`least`), at most one for each expert (`most`)."""
        return self.slots.capacity

    @property
    def least(self) -> int:
        return self.capacity if self.tier.fixed else self.experts

    @property
    def most(self) -> int:
        return self.capacity if self.tier.fixed else self.pool.layers * self.experts

    @property
    def on_device(self) -> bool:
        """Whether slots lie in the memory of a device of its own; an emulated one is host memory."""
        return self.device.apart

    @property
    def placed(self) -> str:
        """As `placement` calls it."""
        if self.tier.fixed and self.slots.capacity:
            return "resident"
        return "stream" if self.pool.bank(0) is None else self.tier.mode

    @property
    def what(self) -> str:
        """What `least` slots are."""
        return f"one layer of {self.experts} experts"

    # --- one layer call

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        moved, busy = self.link.bytes, self.link.busy_s
        call = Call(self, layer, x, ids, weights)
        try:
            out = call.run()
        except BaseException:
            self.settle()
            self._last = None
            raise
        finally:
            call.release()
        if self.rates and self.tier.mode == "offload":
            self.rates.observe(0, 0.0, self.link.bytes - moved, self.link.busy_s - busy, overlapped=False)
        self._observe(layer, len(x), began, call)
        return out

    def _observe(self, layer: int, rows: int, began: float, call: Call) -> None:
        now, before = time.perf_counter(), self._last
        between = 0.0
        if before and before.layer == layer - 1 and self._follows(layer):
            between = began - before.ended_at
            if before.coming:
                self._prefill.observe_idle(rows, max(0.0, call.asked_at - before.dry_at))
        self._prefill.observe(rows, between + now - began - call.waited)
        self._last = _Last(layer, now, call.coming, call.dry_at)

    def _follows(self, layer: int) -> bool:
        """Whether `layer` comes right behind the one before it here; a layer of another executor may lie between them."""
        return 0 < layer < self.pool.layers and self.pool.numbers[layer] == self.pool.numbers[layer - 1] + 1

    def collect(self) -> None:
        """Take in what has arrived meanwhile; never waits."""
        for key in [k for k in self.coming if self.link.arrived(k)]:
            self.receive(key)

    def receive(self, key: int) -> float | None:
        """Wait for a coming expert; returns since when it is there, None when its copy failed (then it is absent as before)."""
        self.coming.discard(key)
        try:
            when = self.link.wait(key)
        except TakenBack:
            self.slots.lost(key)
            return None
        except CopyFailed as problem:
            self.slots.lost(key)
            self.counts["copy_failed"] += 1
            log.warning(log_line("expert copy failed", key=key, why=str(problem)))
            return None
        self.slots.landed(key)
        return when

    def fetch(self, keys: Iterable[int], behind: bool = False, keep: Iterable[int] = ()) -> list[int]:
        """Start copying as many of `keys` as get a slot, maybe `behind` everything else; returns them. None of `keep` leaves."""
        fetches = self.slots.fetch(keys, keep)
        self.coming.update(f.key for f in fetches)
        self.link.submit(fetches, behind)
        return [f.key for f in fetches]

    def fetch_count(self, misses: int) -> int:
        """How many of a layer's misses come into slots."""
        if self.tier.mode == "host":
            return 0
        room = self.slots.room()
        return best_split(misses, self.rates.now, room) if self.tier.mode == "hybrid" else min(misses, room)

    def copy_ahead(self, layer: int, rows: int, top_k: int) -> None:
        """Start copying the whole of `layer` when that is expected to be faster than fetching on demand, and it fits."""
        if not self._follows(layer) or self.rates is None or self.tier.mode == "host" or rows == 1:
            return
        keys = range(layer * self.experts, (layer + 1) * self.experts)
        absent = [k for k in keys if self.slots.where[k] < 0 and k not in self.coming]
        seconds = self.copy_seconds(1)
        if len(absent) > self.slots.room() or not self._prefill.copy_ahead(rows, len(absent), self.experts, top_k, seconds):
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
        keys = [(layer + 1) * self.experts + e for e in self._predictor.predict(layer, x, top_k)]
        self._guesses.say(keys)
        return keys

    def fetch_first(self, misses: Sequence[int], layer: int) -> list[int]:
        """Start copying one miss of `layer`, before it is known who of the next layer should stay: all of them do."""
        following = (layer + 1) % self.pool.layers * self.experts
        return self.fetch(misses[:1], keep=range(following, following + self.experts))

    def copy_seconds(self, experts: int) -> float:
        """What the link takes for so many of them; endless when its rate is not known."""
        if not experts:
            return 0.0
        return experts * self.slot_bytes / self.rates.now.link if self.rates else float("inf")

    def fetch_predicted(self, keys: Sequence[int], rows: int, behind: bool) -> None:
        """As many as the link can bring while it would idle, and one more, whose pieces that came are kept if it was right; they
        come when nothing else is to be copied. `behind` some of this layer.
        """
        absent = [k for k in keys if self.slots.where[k] < 0 and k not in self.coming]
        idle = self._prefill.idle_seconds(rows) if behind else self._prefill.layer_seconds(rows)
        if idle is not None and self.rates is not None:
            absent = absent[: 1 + int(idle / self.copy_seconds(1))]
        fetched = self.fetch(absent, behind=True)
        self._guesses.open.update(fetched)
        self._guesses.fetched += len(fetched)

    def expect(self, asked: Sequence[int]) -> None:
        """A layer needs these: what was predicted for it in vain makes way, the others of them hurry."""
        for key in self.link.cancel(self._guesses.settle(asked) & self.coming):
            self.coming.discard(key)
            self.slots.lost(key)
        self.link.hurry(k for k in asked if k in self.coming)
        self.collect()

    def preload(self, progress: Callable[[int], None]) -> None:
        """Fill free slots, layers evenly, before anybody waits for them. `progress` gets the bytes of each step.

        An expert that cannot be read is left out, aloud; who needs it is told then.
        """
        count = min(self.slots.capacity, self.pool.layers * self.experts)
        order = [layer * self.experts + e for e in range(self.experts) for layer in range(self.pool.layers)]
        for at in range(0, count, PRELOAD):
            for key in self.fetch(order[at : min(at + PRELOAD, count)]):
                progress(self.slot_bytes if self.receive(key) is not None else 0)

    # --- safe points

    def settle(self) -> None:
        """Nothing is being copied after it: what has not begun is taken back, the rest awaited."""
        for key in self.link.cancel(self.coming):
            self.coming.discard(key)
            self.slots.lost(key)
        for key in list(self.coming):
            self.receive(key)

    def resize(self, slots: int) -> None:
        """Change the number of slots between steps; the best experts stay. Raises MemoryError with everything as it was.

        In host memory no change needs memory for two of them: slots stay where they are, and what goes returns to the system at
        once. On a device what lay in them is lost where both do not fit for a moment.
        """
        self.settle()
        capacity, emptied = self.slots.capacity, self.arena.emptied
        try:
            self._resize(slots, capacity)
        finally:
            if self.arena.emptied != emptied:
                self.counts["emptied"] += 1
                self.slots.drop(self.slots.resident)
        self.counts["resized"] += 1

    def _resize(self, slots: int, capacity: int) -> None:
        if slots > capacity:
            self.arena.resize(slots)
        before = {key: int(self.slots.where[key]) for key in self.slots.resident}
        try:
            moves = self.slots.resize(slots)
            if slots < capacity:
                self.arena.resize(slots, [(before[move.key], move.slot) for move in moves])
        except BaseException:
            # Who of those that moved was copied is not known.
            self.slots.drop([key for key in self.slots.resident if self.slots.where[key] != before[key]])
            self.slots.resize(capacity)
            if slots > capacity:
                self.arena.resize(capacity)
            raise

    def evict(self, keys: Iterable[int]) -> None:
        self.settle()
        self.slots.drop(keys)

    def close(self) -> None:
        """End the link and give the slots' memory back."""
        self.settle()
        self.link.close()
        self.arena.resize(0)

    def status(self) -> dict[str, object]:
        c, rates = self.slots.counts, self.rates
        seconds = self.copy_seconds(1)
        crossing = self._prefill.crossing(self.experts, max(1, self.counts["top_k"]), seconds) if rates else None
        return {
            "layers": spans(self.pool.numbers),
            "mode": self.placed,
            "policy": self.slots.policy,
            "slots": self.slots.capacity,
            "resident": len(self.slots.resident),
            "slot_bytes": self.slot_bytes,
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
