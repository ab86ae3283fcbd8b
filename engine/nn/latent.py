"""Multi-head latent attention, absorbed: what makes keys and values of the latent is multiplied onto q and onto the output.

One arithmetic for prefill and decode, so that a row's bits do not depend on how its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from engine.kernels.ops import KVLayer, LatentHalf, Ops, Rope, Segments, Weight
from engine.lean import torch
from engine.models.spec import LatentSpec
from engine.tensors import library_of


class Projections(Protocol):
    """x [T, H] -> queries (or the latent they come from) and the latent of keys and values, before its norm."""

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]: ...

    @property
    def stored(self) -> tuple[tuple[Weight, ...], tuple[torch.Tensor | None, ...]]:
        """The matrices a product reads, and their biases."""


class LatentAttention:
    """`weights` holds the layer's `mla.*`."""

    def __init__(self, spec: LatentSpec, weights: Mapping[str, Weight], ops: Ops, project: Projections) -> None:
        self._spec, self._ops, self._project = spec, ops, project
        self._kv_norm, self._k_b, self._v_b, self._o = (weights[name] for name in ("kv_a_norm", "k_b", "v_b", "o"))
        self._queries = (weights["q_a_norm"], weights["q_b"]) if spec.q_rank else None

    def join(self, norm: torch.Tensor, eps: float) -> Callable[..., None]:
        parts, rope = self._project.stored[0], self._spec.rope
        half = LatentHalf(norm, eps, parts, self._spec, self._queries, self._kv_norm, self._k_b, self._v_b, self._o)
        run = self._ops.joined.latent(half)

        def latent(x: torch.Tensor, added: torch.Tensor | None, ropes: dict[object, Rope], kv: KVLayer, seg: Segments) -> None:
            run(x, added, ropes[rope], kv, seg)

        latent.run = run
        return latent

    def __call__(self, x: torch.Tensor, ropes: dict, kv: KVLayer, seg: Segments) -> torch.Tensor:
        spec, ops, rows = self._spec, self._ops, x.shape[0]
        q, latent = self._project(x)
        if self._queries:
            norm, q_b = self._queries
            q = ops.linear(ops.rms_norm(q, norm, spec.norm_eps, False), q_b)
        q = q.view(rows, spec.heads, -1)  # [T, Hq, Dn + Dr]
        turn = (*ropes[spec.rope], spec.rope.interleaved)
        key = ops.rope(latent[:, None, spec.rank :], *turn)[:, 0]  # one head for all
        cat = library_of(q).cat
        latent = cat([ops.rms_norm(latent[:, : spec.rank], self._kv_norm, spec.norm_eps, False), key], 1)
        q = cat([ops.heads_linear(q[..., : spec.nope_dim], self._k_b), ops.rope(q[..., spec.nope_dim :], *turn)], 2)
        out = ops.latent_attention(q, latent, kv, seg, spec.scale, spec.rank)  # [T, Hq, R]
        return ops.linear(ops.heads_linear(out, self._v_b).view(rows, -1), self._o)
