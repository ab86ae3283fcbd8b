"""Who computes the routed experts: the interface between the decoder and where expert weights live.

`InPlace` computes on the pool itself, all weights in host memory; `engine.experts` has the executors that use other memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kernels.ops import Guard, Ops, Weight
from engine.lean import torch
from engine.models.spec import ModelSpec, MoeSpec


@dataclass(frozen=True)
class Bank:
    """The experts of one layer: gate_up [E, 2I, H], down [E, H, I], as stored."""

    gate_up: Weight
    down: Weight
    act: str
    guard: Guard | None = None  # `run` asks it, and so must who computes unasked (`in_place`)

    @property
    def experts(self) -> int:
        return self.gate_up.shape[0]


class Experts(Protocol):
    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Routed experts of one step: x [T, H], ids int32 / weights [T, k] -> weighted sum [T, H].

        `layer` counts the layers that have experts, from 0; a step calls them in order. The result is bit for bit that of
        `ops.moe` on the whole bank, wherever the weights were.
        """

    # `in_place(layer)` is optional: the bank on which `run` would do nothing but `ops.moe`, for who wants to compute on it
    # unasked; None while somebody wants to be asked. It is the same bank every time it is one.


class LayerExperts:
    """The experts of one layer."""

    def __init__(self, experts: Experts, layer: int) -> None:
        self._experts, self._layer = experts, layer
        self._in_place = getattr(experts, "in_place", None)

    @property
    def in_place(self) -> Bank | None:
        return self._in_place(self._layer) if self._in_place else None

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._experts.run(self._layer, x, ids, weights)


class InPlace:
    """Computes on the pool, copies nothing."""

    def __init__(self, banks: Sequence[Bank], ops: Ops) -> None:
        self._banks, self._moe = banks, ops.moe

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        bank = self._banks[layer]
        return self._moe(x, ids, weights, bank.gate_up, bank.down, bank.act)

    def in_place(self, layer: int) -> Bank:
        return self._banks[layer]


def expert_banks(spec: ModelSpec, weights: Mapping[str, Weight]) -> list[Bank]:
    """The banks of a loaded model, one for each layer that has experts."""
    return [
        Bank(weights[f"{i}.moe.gate_up"], weights[f"{i}.moe.down"], layer.ffn.act)
        for i, layer in enumerate(spec.layers)
        if isinstance(layer.ffn, MoeSpec)
    ]
