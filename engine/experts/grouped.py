"""Layers whose experts are of several kinds or placed in several ways: one executor with slots of its own for each of them, and
memory shared between those that can have more or fewer.

Quantized files mix types by layer, and a slot holds experts of one size only. Layers that memory of one kind is too short for lie
elsewhere (`layers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from engine.experts.executor import TieredExperts
from engine.experts.predict import Predictor
from engine.lean import torch
from engine.memory import gib


class Sized(Protocol):
    """What of a pool decides how many slots it gets."""

    layers: int
    experts: int
    expert_bytes: int


def share_out(pools: Sequence[Sized], size: int) -> list[int]:
    """Slots for each of `pools` in `size` bytes: a layer each, and of the rest shares after their sizes. Never more than experts.

    Raises ValueError when there is no layer for each.
    """
    least = [p.experts * p.expert_bytes for p in pools]
    more = [p.layers * p.experts * p.expert_bytes - low for p, low in zip(pools, least, strict=True)]
    rest = size - sum(least)
    if rest < 0:
        raise ValueError(f"{sum(least)} bytes are needed for a layer of each kind")
    part = min(1.0, rest / sum(more)) if sum(more) else 0.0
    return [int((low + part * room) // p.expert_bytes) for p, low, room in zip(pools, least, more, strict=True)]


def deal_out(pools: Sequence[Sized], size: int) -> list[int]:
    """The same where less than a layer each will do: experts without a slot are computed in host memory."""
    whole = sum(p.layers * p.experts * p.expert_bytes for p in pools)
    if size >= sum(p.experts * p.expert_bytes for p in pools):
        return share_out(pools, size)
    return [int(p.layers * p.experts * size // whole) for p in pools]


class Within:
    """A predictor for the layers `numbers` of a model: only where the next layer is among them."""

    def __init__(self, whole: Predictor, numbers: Sequence[int]) -> None:
        self._whole, self._numbers = whole, numbers

    def predict(self, layer: int, x: torch.Tensor, top_k: int) -> list[int]:
        following = self._numbers[layer + 1 : layer + 2]
        if following and following[0] == self._numbers[layer] + 1:
            return self._whole.predict(self._numbers[layer], x, top_k)
        return []


class GroupedExperts:
    """`nn.experts.Experts` over `parts`; `numbers[i]` are the layers that part i computes. Its memory is counted in bytes."""

    slot_bytes = 1

    def __init__(self, parts: Sequence[TieredExperts], numbers: Sequence[Sequence[int]]) -> None:
        self.parts = tuple(parts)
        self._where = {n: (part, i) for part, own in zip(parts, numbers, strict=True) for i, n in enumerate(own)}
        self._before: dict[int, list[int]] = {}  # bytes -> slots of each part: to go back is to have exactly those

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        part, number = self._where[layer]
        return part.run(number, x, ids, weights)

    @property
    def capacity(self) -> int:
        return sum(part.capacity * part.slot_bytes for part in self.parts)

    @property
    def least(self) -> int:
        return sum(part.least * part.slot_bytes for part in self.parts)

    @property
    def most(self) -> int:
        return sum(part.most * part.slot_bytes for part in self.parts)

    @property
    def on_device(self) -> bool:
        return any(part.on_device for part in self.parts)

    @property
    def what(self) -> str:
        fixed = sum(part.capacity * part.slot_bytes for part in self.parts if part.tier.fixed)
        movable = sum(not part.tier.fixed for part in self.parts)
        own = f" beside {gib(fixed)} of layers that stay" if fixed else ""
        return f"one layer of each of {movable} kinds of experts{own}"

    def resize(self, size: int) -> None:
        """Have `size` bytes of slots. Raises MemoryError with everything as it was."""
        before = [part.capacity for part in self.parts]
        wanted = self._before.get(size) or self._shares(size)
        changes = sorted(zip(self.parts, before, wanted, strict=True), key=lambda change: change[2] > change[1])
        self._before = {self.capacity: before}
        for i, (part, _, slots) in enumerate(changes):
            try:
                if slots != part.capacity:
                    part.resize(slots)
            except BaseException:
                for done, old, _ in reversed(changes[:i]):
                    done.resize(old)
                raise

    def _shares(self, size: int) -> list[int]:
        movable = [part for part in self.parts if not part.tier.fixed]
        rest = size - sum(part.capacity * part.slot_bytes for part in self.parts if part.tier.fixed)
        shares = iter(share_out([part.pool for part in movable], rest))
        return [part.capacity if part.tier.fixed else next(shares) for part in self.parts]

    def preload(self, progress) -> None:
        for part in self.parts:
            part.preload(progress)

    def settle(self) -> None:
        for part in self.parts:
            part.settle()

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def status(self) -> dict[str, object]:
        """Sums, and each part's own under `groups`."""
        groups = [part.status() for part in self.parts]
        sums: Counter[str] = Counter()
        for group in groups:
            sums.update({name: value for name, value in group.items() if isinstance(value, int)})
        for own in ("slot_bytes", "whole_layers_from_rows"):  # say something about one part only
            sums.pop(own, None)
        modes = ", ".join(dict.fromkeys(group["mode"] for group in groups))
        return {"mode": modes, "policy": groups[0]["policy"], **sums, "groups": groups}
