"""`ops.Joined` on the native module: a half layer is bound to its weights at load and is one native call in a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.kernels.ops import (
    Added,
    AttentionHalf,
    ChainParts,
    DeltaHalf,
    Half,
    KVLayer,
    LatentHalf,
    MlpHalf,
    MoeHalf,
    Piece,
    Quant,
    Rope,
    Segments,
    StateLayer,
    Weight,
)
from engine.lean import torch
from engine.tensors import library_of

NOTHING = (None, "")
NEITHER = (None, None)


class CpuJoined:
    """`native` is the module's `Ops`."""

    def __init__(self, native: object) -> None:
        self._native = native

    def attention(self, half: AttentionHalf) -> Callable[[torch.Tensor, Added, Rope, KVLayer, Segments], None]:
        spec, norms, rope = half.spec, half.norms or (None, None), half.spec.rope
        run = self._native.attention_half(
            *_start(half),
            [floats(bias) for bias in half.biases],
            *norms,
            stored(half.out),
            floats(half.out_bias),
            *(spec.heads, spec.kv_heads, spec.head_dim, spec.scale, spec.window or 0, spec.output_gate),
            bool(rope and rope.interleaved),
        )

        def attention(x: torch.Tensor, added: Added, rope: Rope, kv: KVLayer, seg: Segments) -> None:
            cos, sin = rope or (None, None)
            run(x, added, cos, sin, kv.k, kv.v, seg.cu, seg.start, seg.pages)

        attention.native = run
        return attention

    def latent(self, half: LatentHalf) -> Callable[[torch.Tensor, Added, Rope, KVLayer, Segments], None]:
        spec = half.spec
        norm, q = half.queries or (None, None)
        run = self._native.latent_half(
            *_start(half),
            floats(norm),
            NOTHING if q is None else stored(q),
            floats(half.kv_norm),
            spec.norm_eps,
            *(stored(weight) for weight in (half.keys, half.values, half.out)),
            *(spec.heads, spec.rank, spec.nope_dim, spec.rope_dim, spec.scale, spec.rope.interleaved),
        )

        def latent(x: torch.Tensor, added: Added, rope: Rope, kv: KVLayer, seg: Segments) -> None:
            run(x, added, *rope, kv.k, seg.cu, seg.start, seg.pages)

        latent.native = run
        return latent

    def delta_net(self, half: DeltaHalf) -> Callable[[torch.Tensor, Added, StateLayer, Segments], None]:
        spec, rule = half.spec, (floats(half.rule[name]) for name in ("conv", "dt_bias", "a_log"))
        sizes = (spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.o_tiled)
        run = self._native.delta_half(*_start(half), *rule, floats(half.out_norm), stored(half.out), *sizes)

        def delta_net(x: torch.Tensor, added: Added, state: StateLayer, seg: Segments) -> None:
            run(x, added, state.conv, state.s, seg.cu, seg.slot, seg.kept)

        delta_net.native = run
        return delta_net

    def mlp(self, half: MlpHalf) -> Callable[[torch.Tensor, Added], None]:
        run = self._native.mlp_half(*_start(half), stored(half.down), half.down.shape[1], half.spec.act)

        def mlp(x: torch.Tensor, added: Added) -> None:
            run(x, added)

        mlp.native = run
        return mlp

    def moe(self, half: MoeHalf) -> CpuMoe:
        return CpuMoe(self._native, half)

    def chain(self, parts: ChainParts) -> CpuChain | None:
        if not hasattr(self._native, "chain"):
            return None  # a module that was built from other sources
        halves = [(native_of(half), cache, number) for half, cache, number in parts.halves]
        return None if any(half is None for half, _, _ in halves) else CpuChain(self._native, parts, halves)


class CpuChain:
    """`ops.Chain`."""

    def __init__(self, native: object, parts: ChainParts, halves: list[tuple[object, object, int]]) -> None:
        bound = [(half, *cached(cache), number) for half, cache, number in halves]
        ends = (floats(parts.norm), parts.eps, stored(parts.head))
        self._run = native.chain(stored(parts.table), parts.scale, bound, list(parts.angles), *ends)
        self.angles = self._run.angles
        self._logits = np.empty((0, parts.head.shape[0]), np.float32)

    def __call__(self, pieces: list[Piece]) -> np.ndarray:
        rows = sum(len(piece[5]) for piece in pieces)
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._logits.shape[1]), np.float32)
        out = self._logits[:rows]
        self._run(pieces, out)
        return out


def native_of(half: Callable) -> object | None:
    """The module's object behind a half of `CpuJoined`; None where it is anything else."""
    return getattr(half, "native", None)


def cached(cache: KVLayer | StateLayer | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if cache is None:
        return NEITHER
    return (cache.k, cache.v) if isinstance(cache, KVLayer) else (cache.conv, cache.s)


class CpuMoe:
    """`ops.JoinedMoe`."""

    def __init__(self, native: object, half: MoeHalf) -> None:
        spec = half.spec
        scores = (spec.score == "sigmoid", spec.renorm, spec.scale, spec.groups, spec.top_groups, spec.group_best)
        shared_down = stored(half.shared_down) if spec.shared_inter else NOTHING
        shared = (spec.shared_inter, bool(spec.shared_inter and spec.shared_switch), shared_down)
        self._top_k, self._shared = spec.top_k, bool(spec.shared_inter)
        self.native = self._run = native.moe_half(
            *_start(half), spec.experts, spec.top_k, *scores, floats(half.bias), *shared, spec.act
        )
        if half.bank:
            guard = (half.guard.sound, half.guard.check) if half.guard else ()
            self._run.bank(*map(stored, half.bank), *guard)

    def __call__(self, x: torch.Tensor, added: Added) -> None:
        self._run(x, added)

    def choose(self, x: torch.Tensor, added: Added) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        rows = x.shape[0]
        out, always = x.new_empty(x.shape), x.new_empty(x.shape) if self._shared else None
        ids, weights = x.new_empty(rows, self._top_k, dtype=library_of(x).int32), x.new_empty(rows, self._top_k)
        self._run.choose(x, added, out, ids, weights, always)
        return out, ids, weights, always


def _start(half: Half) -> tuple[torch.Tensor, float, list[tuple[torch.Tensor, str]]]:
    return half.norm, half.eps, [stored(part) for part in half.parts]


def stored(weight: Weight) -> tuple[torch.Tensor, str]:
    """The tensor that holds a weight and its block type ("" for a float tensor)."""
    return (weight.data, weight.type) if isinstance(weight, Quant) else (weight, "")


def floats(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Small vectors a checkpoint keeps in bf16; `prepare` has already converted the ones that matter for speed."""
    return None if weight is None else weight.float()
