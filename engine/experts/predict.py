"""Which experts the next layer will ask for, before it is reached: its router applied to what this layer's experts are given.

A layer adds little to the residual stream, so the next router sees nearly the same vector. That of this layer's norm is taken as
it is: on the demo model scaling it by the next layer's norm predicts worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.experts.streams import HERE, Device
from engine.kernels.ops import Ops, Weight
from engine.lean import torch

ROWS = 8  # more tokens touch most experts of a layer anyway


class Predictor(Protocol):
    def predict(self, layer: int, x: torch.Tensor, top_k: int) -> list[int]:
        """Experts of layer + 1 that rows x [T, H] are likely to ask for, the likeliest first; [] for the last layer."""


class NextRouter:
    """`routers` [E, H], one for each layer that has experts."""

    def __init__(self, routers: Sequence[Weight], ops: Ops, device: Device = HERE) -> None:
        self._routers, self._ops, self._device = routers, ops, device

    def predict(self, layer: int, x: torch.Tensor, top_k: int) -> list[int]:
        if layer + 1 >= len(self._routers) or len(x) > ROWS:
            return []
        (scores,) = self._device.to_host(self._ops.linear(x, self._routers[layer + 1]))
        best = scores.topk(min(top_k, scores.shape[1]))
        # by rank first: the second choice of every row is likelier than anybody's third
        return list(dict.fromkeys(best.indices.T.reshape(-1).tolist()))


class Guesses:
    """What was fetched on a prediction and not asked for yet, and how often predictions were right."""

    def __init__(self) -> None:
        self.open: set[int] = set()  # keys of the layer that comes next
        self.made = self.right = self.fetched = self.used = 0
        self._said: set[int] = set()

    def say(self, keys: Iterable[int]) -> None:
        self._said = set(keys)
        self.made += len(self._said)

    def settle(self, asked: Iterable[int]) -> set[int]:
        """The layer asks for these: count, and return what was fetched for it in vain."""
        asked = set(asked)
        self.right += len(self._said & asked)
        self.used += len(self.open & asked)
        vain, self.open, self._said = self.open - asked, set(), set()
        return vain

    def status(self) -> dict[str, int]:
        return {"made": self.made, "right": self.right, "fetched": self.fetched, "used": self.used}
