"""The kernel interface: everything the decoder computes goes through one `Ops` object.

Contract for every implementation:
- Tensors are torch's or, in host memory, of `engine.tensors`; what comes out is of the library that went in.
- Activations cross as float32 tensors on `device`. They may be column slices
  of a wider tensor: an implementation that needs them contiguous copies them. What it returns is fresh and contiguous.
- Batch-invariant: the result of a row depends on that row and its sequence's cache only, never on what else is in the
  batch or how a prompt was chunked. Cache reuse is exact because of this; the tests check it bitwise.
- Weights stay as stored (bf16, f16, f32, or a GGUF block type); only activations are float.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from engine.lean import torch
from engine.models.spec import AttentionSpec, DeltaNetSpec, LatentSpec, MlpSpec, MoeSpec


@dataclass(frozen=True)
class Quant:
    """A block-quantized matrix kept as its bytes.

    `data` uint8 `[..., rows, row_bytes]`, `type` the ggml type name ("Q8_0", "Q4_K", ...) or one of `kernels/blocks.py`, `cols`
    the dequantized row length.
    """

    data: torch.Tensor
    type: str
    cols: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.cols)


Weight: TypeAlias = "torch.Tensor | Quant"  # bf16 / f16 / f32 tensor, or blocks


@dataclass(frozen=True)
class Segments:
    """The sequences of one step, flattened. S sequences, T tokens in total; all int32, contiguous, where `Ops.device` says.

    Sequence s owns rows `cu[s]:cu[s+1]`; its first row stands at absolute position `start[s]`. Its cached tokens live in pages
    `pages[s, :ceil((start+len)/PAGE)]` (unused entries -1) and its recurrent state in slot `slot[s]` of every state tensor.
    With `kept`, the state after the first `kept[s, 0]` of its rows is left in slot `kept[s, 1]` too, unless that is -1.
    """

    cu: torch.Tensor  # [S + 1]
    start: torch.Tensor  # [S]
    pages: torch.Tensor  # [S, P]
    slot: torch.Tensor  # [S]
    kept: torch.Tensor | None = None  # [S, 2]


@dataclass(frozen=True)
class KVLayer:
    """Paged keys and values of one attention layer: `[pages, Hkv, PAGE, D]`, float32 or bfloat16.

    Latent attention has no `v`: `k` is `[pages, 1, PAGE, R + Dr]`, and the first R of a row are its value.
    """

    k: torch.Tensor
    v: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.k,) if self.v is None else (self.k, self.v)


@dataclass(frozen=True)
class StateLayer:
    """Recurrent state of one DeltaNet layer: `conv` `[slots, C, K-1]` (last raw inputs), `s` `[slots, Hv, Dk, Dv]`; float32."""

    conv: torch.Tensor
    s: torch.Tensor


@dataclass(frozen=True)
class Half:
    """A half layer with its weights, from one sum of the residual stream to the next. `norm` float32 [H].

    `parts` are the matrices over the normed rows, in the order of the decoder's steps: one for all where they lie together.
    """

    norm: torch.Tensor
    eps: float
    parts: tuple[Weight, ...]


@dataclass(frozen=True)
class AttentionHalf(Half):
    spec: AttentionSpec
    biases: tuple[torch.Tensor | None, ...]  # of each part
    norms: tuple[torch.Tensor, torch.Tensor] | None  # of the heads of q and k
    out: Weight
    out_bias: torch.Tensor | None


@dataclass(frozen=True)
class LatentHalf(Half):
    spec: LatentSpec
    queries: tuple[torch.Tensor, Weight] | None  # norm of the latent they come from, and what makes them of it
    kv_norm: torch.Tensor
    keys: Weight  # [Hq, R, Dn]
    values: Weight  # [Hq, Dv, R]
    out: Weight


@dataclass(frozen=True)
class DeltaHalf(Half):
    spec: DeltaNetSpec
    rule: dict[str, torch.Tensor]  # as `Ops.delta_net` takes them
    out_norm: torch.Tensor
    out: Weight


@dataclass(frozen=True)
class MlpHalf(Half):
    spec: MlpSpec
    down: Weight


@dataclass(frozen=True)
class Guard:
    """Stands before experts that nothing may be computed with yet: those whose `sound` (uint8 [E]) is 0."""

    sound: torch.Tensor
    check: Callable[[Sequence[int]], None]  # makes these sound, or raises what says why they are not


@dataclass(frozen=True)
class MoeHalf(Half):
    spec: MoeSpec
    bias: torch.Tensor | None
    shared_down: Weight | None
    bank: tuple[Weight, Weight] | None  # gate_up and down of all experts, where they may be computed in place
    guard: Guard | None = None  # of the bank's experts


Added: TypeAlias = "torch.Tensor | None"  # what the half before left to be added, [T, H]
Rope: TypeAlias = "tuple[torch.Tensor, torch.Tensor] | None"  # cos, sin [T, dim/2] at the rows' positions


class JoinedMoe(Protocol):
    def __call__(self, x: torch.Tensor, added: Added) -> None:
        """The whole half, on its `bank`, once the experts it needs are sound."""

    def choose(self, x: torch.Tensor, added: Added) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As far as the routed experts: what they get [T, H], their ids and weights [T, k], and what the shared expert says."""


class Joined(Protocol):
    """Optional, `Ops.joined`: half layers in one call, with the bits of their steps one by one.

    Such a call adds `added` to x and then its own result, in place. The weights are checked when it is made (ValueError).
    """

    def attention(self, half: AttentionHalf) -> Callable[[torch.Tensor, Added, Rope, KVLayer, Segments], None]: ...

    def latent(self, half: LatentHalf) -> Callable[[torch.Tensor, Added, Rope, KVLayer, Segments], None]: ...

    def delta_net(self, half: DeltaHalf) -> Callable[[torch.Tensor, Added, StateLayer, Segments], None]: ...

    def mlp(self, half: MlpHalf) -> Callable[[torch.Tensor, Added], None]: ...

    def moe(self, half: MoeHalf) -> JoinedMoe: ...

    def chain(self, parts: ChainParts) -> Chain | None:
        """All of a step in one call, with the bits of its halves one by one; None where one of them cannot be part of it."""


# Rows `tokens[start:end]` (int32) of one sequence as the scheduler has them: its slot, at least the pages it uses, the positions
# whose logits are wanted, and where its state is left on the way: (position, slot).
Piece = tuple[array, int, int, int, Sequence[int], Sequence[int], tuple[int, int] | None]


@dataclass(frozen=True)
class ChainParts:
    """What a decoder is made of. `halves` are what `Joined` made; each with its cache and its number in `angles`, -1 = none.

    `angles` are cos and sin [positions, dim/2] of all positions so far; longer ones may follow (`Chain.angles`).
    """

    table: Weight
    scale: float  # of what the table says
    halves: Sequence[tuple[Callable, KVLayer | StateLayer | None, int]]
    angles: Sequence[tuple[torch.Tensor, torch.Tensor]]
    norm: torch.Tensor
    eps: float
    head: Weight


class Chain(Protocol):
    def __call__(self, pieces: list[Piece]) -> np.ndarray:
        """Logits float32 [R, V] of the wanted rows, overwritten by the next call."""

    def angles(self, number: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Longer tables in the place of `angles[number]`."""


class Ops(Protocol):
    name: str
    device: torch.device  # of activations, weights, caches and segments
    kv_dtype: torch.dtype  # the dtype this implementation wants its KV pages in
    quant_types: frozenset[str] | None  # block types it computes on, None = all; others reach it as float32 matrices
    weight_bytes: int | None  # of one element after `prepare`, None = as stored
    maps: bool  # computes on weights as they lie in a mapped file: experts apart, gate_up as [B, 2, I, H] with its halves apart

    def prepare(self, weight: Weight) -> Weight:
        """Convert a weight once at load into the layout this implementation likes (may return it unchanged)."""

    def embed(self, table: Weight, ids: torch.Tensor) -> torch.Tensor:
        """ids int32 [T] -> [T, H]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
        """Over the last dimension; x [..., H]."""

    def add_norm(self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds `added` [T, H] to `x` [T, H] in place; returns `rms_norm(x)`, a new tensor, with a float32 weight [H]."""

    def turn_heads(
        self,
        x: torch.Tensor,
        q_heads: int,
        k_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        interleaved: bool,
    ) -> torch.Tensor:
        """x [T, heads, D], heads of q, then of k, then others (v), which stay. Norms each head of q and k (`norms`: their float32
        weights [D]) and rotates it (`rope`: cos, sin as in `rope`). May change `x`, and returns it or a new tensor.
        """

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K], weight [N, K] -> [T, N]."""

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """x [T, heads, D]; cos, sin [T, dim/2] already gathered at each row's position; rotates the first `dim` elements."""

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: KVLayer,
        seg: Segments,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write k, v [T, Hkv, D] into their pages, then causal attention of q [T, Hq, D] over the pages -> [T, Hq, D]."""

    def heads_linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """A matrix for each head: x [T, heads, K], weight [heads, N, K] -> [T, heads, N]."""

    def latent_attention(
        self, q: torch.Tensor, latent: torch.Tensor, kv: KVLayer, seg: Segments, scale: float, rank: int
    ) -> torch.Tensor:
        """Write latent [T, R + Dr] into its pages, then causal attention of q [T, Hq, R + Dr] over them; a key's value is its
        first `rank` = R elements -> [T, Hq, R].
        """

    def delta_net(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        weights: dict[str, torch.Tensor],
        state: StateLayer,
        seg: Segments,
        spec: DeltaNetSpec,
    ) -> torch.Tensor:
        """Causal conv + SiLU over qkv [T, C], l2-normed q/k, gated delta rule; updates `state` in its slots -> [T, Hv, Dv].

        `weights`: conv [C, K], dt_bias [Hv], a_log [Hv] (float32). a, b [T, Hv] are the raw projections. Gated norm with z and
        the output projection are the decoder's.
        """

    def gated_norm(self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """rms_norm(x) * weight * silu(z); x, z [T, Hv, Dv]."""

    def gate_mul(self, gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
        """act(gate) * up, elementwise; act in silu | gelu_tanh | sigmoid; a gate [T, 1] applies to the whole row of up [T, H]."""

    def route(self, logits: torch.Tensor, spec: MoeSpec, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E] -> expert ids int32 [T, k] (best first, ties to the lower id) and weights float32 [T, k].

        `bias` [E] float32 and the groups of `spec` decide who may be chosen; weights come from the scores alone.
        """

    def moe(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        act: str,
        place: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed experts: x [T, H], ids/weights [T, k], gate_up [B, 2I, H], down [B, H, I] -> weighted sum [T, H].

        Expert e is row `place[e]` of the banks (int32 [E]; None: row e). Where it lies never changes a bit of the result.
        """

    def expert_rows(
        self, x: torch.Tensor, ids: torch.Tensor, gate_up: Weight, down: Weight, act: str, place: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Row p of x [P, H] through expert ids[p], unweighted -> [P, H]."""

    def moe_merge(self, parts: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What `expert_rows` gave for a token's experts, parts [T, k, H] -> weighted sum [T, H], bit for bit that of `moe`."""
