"""The one decoder: runs any `ModelSpec` on any `Ops`. It knows no model names and computes nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engine.kernels.ops import (
    AttentionHalf,
    Chain,
    ChainParts,
    DeltaHalf,
    JoinedMoe,
    KVLayer,
    MlpHalf,
    MoeHalf,
    Ops,
    Rope,
    Segments,
    StateLayer,
    Weight,
)
from engine.lean import inference, torch
from engine.models.spec import AttentionSpec, DeltaNetSpec, LatentSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from engine.nn.batch import Batch, Cache, Flat
from engine.nn.experts import Experts, InPlace, LayerExperts, expert_banks
from engine.nn.latent import LatentAttention
from engine.nn.rope import RopeTable
from engine.tensors import library_of


class Decoder:
    """`forward` is one step of a continuous batch: prefill chunks and decode rows together, in any mixture.

    `weights` maps the canonical names of `models.spec` to what `ops.prepare` returned; norms and biases are float32. `experts`
    computes the routed experts; None computes them on the pool in `weights`.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], ops: Ops, experts: Experts | None = None) -> None:
        self.spec = spec
        self._ops = ops
        self._embed = weights["embed"]
        self._head = weights["embed"] if spec.tie_embeddings else weights["head"]
        self._final_norm = _norm_weight(spec, weights["final_norm"])
        experts = experts or InPlace(expert_banks(spec, weights), ops)
        moe = [i for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoeSpec)]
        routed = {i: LayerExperts(experts, number) for number, i in enumerate(moe)}
        self._layers = [_Layer(spec, layer, _Scope(weights, f"{i}."), ops, routed.get(i)) for i, layer in enumerate(spec.layers)]
        ropes = {getattr(layer.mixer, "rope", None) for layer in spec.layers}
        library = library_of(self._final_norm)
        self._ropes = {rope: RopeTable(rope, ops.device, library) for rope in ropes if rope}
        self._chains = _Chains(self)

    def forward(self, batch: Batch | Flat, cache: Cache) -> torch.Tensor | np.ndarray:
        """Logits float32 [R, V] of the rows that want them; the cache then holds every row of the batch.

        They are a tensor on the kernels' device, or an array that the next step overwrites where the whole step was one call.
        """
        if isinstance(batch, Flat):
            chain = self._chains.get(batch.end, cache)
            return self._half_by_half(batch.batch, cache) if chain is None else chain(batch.pieces)
        return self._half_by_half(batch, cache)

    def _half_by_half(self, batch: Batch, cache: Cache) -> torch.Tensor:
        with inference():
            return self._run(batch, cache)

    def _run(self, batch: Batch, cache: Cache) -> torch.Tensor:
        ops, spec = self._ops, self.spec
        end = int(batch.positions.max()) + 1
        batch = batch.on(ops.device)
        seg = batch.segments
        ropes = {rope: table.at(batch.positions, end) for rope, table in self._ropes.items()}
        x = ops.embed(self._embed, batch.tokens)
        if spec.embed_scale != 1.0:
            x = x * spec.embed_scale
        out = None  # of the last half layer: the next one adds it to x
        for layer, kv, state in zip(self._layers, cache.kv, cache.states, strict=True):
            out = layer.mix(x, out, ropes, kv, state, seg)
            if layer is self._layers[-1]:  # no later token reads what follows: only the rows whose logits are wanted go on
                x, out = x.index_select(0, batch.logit_rows), out if out is None else out.index_select(0, batch.logit_rows)
                if x.shape[0] == 0:
                    return x.new_empty(0, spec.vocab)
            out = layer.feed(x, out)
        return ops.linear(_sum_norm(ops, x, out, self._final_norm, spec.norm_eps), self._head)


class _Chains:
    """The decoder's halves as one call, where that is possible; bound to the cache it was last asked for."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._chain: Chain | None = None
        self._cache: Cache | None = None
        self._tables: list[RopeTable] = []
        self._rows: list[int] = []  # positions that the chain knows of each table
        self._routed = next((layer.routed for layer in decoder._layers if layer.routed is not None), None)

    def get(self, end: int, cache: Cache) -> Chain | None:
        """For a step whose positions are all below `end`. None as well while experts want to be asked."""
        if cache is not self._cache:
            self._chain, self._cache = self._bind(cache), cache
        if self._chain is None or (self._routed is not None and self._routed.in_place is None):
            return None
        for number, table in enumerate(self._tables):
            if end > self._rows[number]:
                self._chain.angles(number, *table.upto(end))
                self._rows[number] = table.rows
        return self._chain

    def _bind(self, cache: Cache) -> Chain | None:
        own, spec = self._decoder, self._decoder.spec
        joined = getattr(own._ops, "joined", None)
        if joined is None or not hasattr(joined, "chain") or any(layer.apart for layer in own._layers):
            return None
        numbers = {rope: number for number, rope in enumerate(own._ropes)}
        self._tables = list(own._ropes.values())
        self._rows = [table.rows for table in self._tables]
        halves = []
        for layer, spec_, kv, state in zip(own._layers, spec.layers, cache.kv, cache.states, strict=True):
            mixer, ffn = layer.joined
            halves += [(mixer, kv or state, numbers.get(getattr(spec_.mixer, "rope", None), -1)), (ffn, None, -1)]
        angles = [table.upto(0) for table in self._tables]
        return joined.chain(ChainParts(own._embed, spec.embed_scale, halves, angles, own._final_norm, spec.norm_eps, own._head))


class _Layer:
    """x + mixer(norm(x)), then x + ffn(norm(x)).

    A half that `ops` has joined adds its own result to x and leaves nothing; one that goes step by step leaves its result to the
    next, whose norm adds it.
    """

    def __init__(self, spec: ModelSpec, layer: LayerSpec, weights: _Scope, ops: Ops, routed: LayerExperts | None) -> None:
        self._ops, self._eps, self.routed = ops, spec.norm_eps, routed
        self._mixer_norm = _norm_weight(spec, weights["mixer_norm"])
        self._ffn_norm = _norm_weight(spec, weights["ffn_norm"])
        if isinstance(layer.mixer, AttentionSpec):
            self._mixer = _Attention(spec, layer.mixer, weights.inner("attn."), ops)
        elif isinstance(layer.mixer, LatentSpec):
            scope = weights.inner("mla.")
            queries = "q_a" if layer.mixer.q_rank else "q"
            self._mixer = LatentAttention(layer.mixer, scope, ops, _Fan(scope, "in", (queries, "kv_a"), ops))
        else:
            self._mixer = _DeltaNet(spec, layer.mixer, weights.inner("delta."), ops)
        if isinstance(layer.ffn, MoeSpec):
            self._ffn: _Moe | _Mlp = _Moe(layer.ffn, weights.inner("moe."), ops, routed)
        else:
            self._ffn = _Mlp(layer.ffn, weights.inner("mlp."), ops)
        self._joined_mixer = _joined(ops, self._mixer, self._mixer_norm, spec.norm_eps)
        self._joined_ffn = _joined(ops, self._ffn, self._ffn_norm, spec.norm_eps)

    @property
    def joined(self) -> tuple[Callable | None, Callable | None]:
        """Mixer and feed-forward as the kernels' own calls; None for one that goes step by step."""
        return _own_call(self._joined_mixer), _own_call(self._joined_ffn)

    @property
    def apart(self) -> bool:
        """Does a part of it go step by step, or may want to be asked for experts for good?"""
        return None in self.joined or (self.routed is not None and self.routed.in_place is None)

    def mix(
        self,
        x: torch.Tensor,
        before: torch.Tensor | None,
        ropes: dict,
        kv: KVLayer | None,
        state: StateLayer | None,
        seg: Segments,
    ) -> torch.Tensor | None:
        """Adds what the half before this one left to `x`, in place; returns what the next one is to add, if anything."""
        if self._joined_mixer is not None:
            return self._joined_mixer(x, before, ropes, kv or state, seg)
        return self._mixer(_sum_norm(self._ops, x, before, self._mixer_norm, self._eps), ropes, kv or state, seg)

    def feed(self, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor | None:
        """As `mix`."""
        if self._joined_ffn is not None:
            return self._joined_ffn(x, before)
        return self._ffn(_sum_norm(self._ops, x, before, self._ffn_norm, self._eps))


class _Fan:
    """Several matrices over the same rows: one product where `models.load` could join them.

    With `head_dim` what comes out is cut into heads.
    """

    def __init__(
        self, weights: _Scope, whole: str, parts: tuple[str, ...], ops: Ops, biased: bool = False, head_dim: int | None = None
    ) -> None:
        self._linear = ops.linear
        self._parts = [weights[name] for name in parts]
        self._biases = [weights[f"{name}_bias"] if biased else None for name in parts]
        self._whole = weights.get(whole)
        self._bias = library_of(self._biases[0]).cat(self._biases) if biased else None
        self._head_dim = head_dim
        self._sizes = [part.shape[0] // (head_dim or 1) for part in self._parts]

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x [T, K] -> [T, N_i], or [T, heads, head_dim], of every part."""
        if self._whole is not None:
            return self.cut(self.joined(x))
        return [self._cut(self._linear(x, part, bias)) for part, bias in zip(self._parts, self._biases, strict=True)]

    @property
    def is_joined(self) -> bool:
        return self._whole is not None

    @property
    def stored(self) -> tuple[tuple[Weight, ...], tuple[torch.Tensor | None, ...]]:
        """The matrices a product reads, and their biases."""
        if self._whole is not None:
            return (self._whole,), (self._bias,)
        return tuple(self._parts), tuple(self._biases)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """All parts in one tensor, one behind the other."""
        return self._cut(self._linear(x, self._whole, self._bias))

    def cut(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        return whole.split_with_sizes(self._sizes, 1)

    def _cut(self, out: torch.Tensor) -> torch.Tensor:
        return out if self._head_dim is None else out.view(out.shape[0], -1, self._head_dim)


class _Attention:
    """Grouped-query attention with optional bias, per-head q/k norm, rotary positions and output gate."""

    def __init__(self, spec: ModelSpec, mixer: AttentionSpec, weights: _Scope, ops: Ops) -> None:
        self._spec, self._ops, self._eps = mixer, ops, spec.norm_eps
        self._qkv = _Fan(weights, "in", ("q", "k", "v"), ops, mixer.bias, mixer.head_dim)
        self._o, self._o_bias = weights["o"], weights.get("o_bias")
        self._norms = None
        if mixer.qk_norm:
            self._norms = _norm_weight(spec, weights["q_norm"]), _norm_weight(spec, weights["k_norm"])

    def join(self, norm: torch.Tensor, eps: float) -> Callable[..., None]:
        parts, biases = self._qkv.stored
        half = AttentionHalf(norm, eps, parts, self._spec, biases, self._norms, self._o, self._o_bias)
        run, rope = self._ops.joined.attention(half), self._spec.rope

        def attention(x: torch.Tensor, added: torch.Tensor | None, ropes: dict[object, Rope], kv: KVLayer, seg: Segments) -> None:
            run(x, added, ropes[rope] if rope else None, kv, seg)

        attention.run = run
        return attention

    def __call__(self, x: torch.Tensor, ropes: dict, kv: KVLayer, seg: Segments) -> torch.Tensor:
        spec, ops, rows = self._spec, self._ops, x.shape[0]
        turn = (
            (self._norms, self._eps, ropes[spec.rope], spec.rope.interleaved)
            if spec.rope
            else (self._norms, self._eps, None, False)
        )
        if self._qkv.is_joined and not spec.output_gate:
            q, k, v = self._qkv.cut(ops.turn_heads(self._qkv.joined(x), spec.heads, spec.kv_heads, *turn))  # [T, heads, D]
        else:
            q, k, v = self._qkv(x)
            if spec.output_gate:  # each head of q is followed by one of the gate
                q, gate = q.view(rows, spec.heads, -1).split(spec.head_dim, -1)
            q, k = ops.turn_heads(library_of(q).cat([q, k], 1), spec.heads, spec.kv_heads, *turn).split_with_sizes(
                (spec.heads, spec.kv_heads), 1
            )
        out = ops.attention(q, k, v, kv, seg, spec.scale, spec.window)
        if spec.output_gate:
            out = ops.gate_mul(gate, out, "sigmoid")
        return ops.linear(out.view(rows, -1), self._o, self._o_bias)


class _DeltaNet:
    """Gated DeltaNet: projections, convolution and delta rule, gated norm, output projection."""

    def __init__(self, spec: ModelSpec, mixer: DeltaNetSpec, weights: _Scope, ops: Ops) -> None:
        self._spec, self._ops, self._eps = mixer, ops, spec.norm_eps
        self._in = _Fan(weights, "in", ("qkv", "z", "b", "a"), ops)
        self._o, self._norm = weights["o"], weights["norm"]
        self._rule = {name: weights[name] for name in ("conv", "dt_bias", "a_log")}

    def join(self, norm: torch.Tensor, eps: float) -> Callable[..., None]:
        half = DeltaHalf(norm, eps, self._in.stored[0], self._spec, self._rule, self._norm, self._o)
        run = self._ops.joined.delta_net(half)

        def delta_net(x: torch.Tensor, added: torch.Tensor | None, ropes: dict, state: StateLayer, seg: Segments) -> None:
            run(x, added, state, seg)

        delta_net.run = run
        return delta_net

    def __call__(self, x: torch.Tensor, ropes: dict, state: StateLayer, seg: Segments) -> torch.Tensor:
        spec, ops, rows = self._spec, self._ops, x.shape[0]
        qkv, z, b, a = self._in(x)
        out = ops.delta_net(qkv, a, b, self._rule, state, seg, spec)
        out = ops.gated_norm(out, z.view(rows, spec.value_heads, -1), self._norm, self._eps)
        if spec.o_tiled:
            out = out.view(rows, spec.key_heads, -1, spec.value_dim).transpose(1, 2)
        return ops.linear(out.reshape(rows, -1), self._o)


class _Mlp:
    """down(act(gate(x)) * up(x)): the gated feed-forward (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, spec: MlpSpec, weights: _Scope, ops: Ops) -> None:
        self._ops, self._spec = ops, spec
        self._in = _Fan(weights, "in", ("gate", "up"), ops)
        self._down = weights["down"]

    def join(self, norm: torch.Tensor, eps: float) -> Callable[..., None]:
        return self._ops.joined.mlp(MlpHalf(norm, eps, self._in.stored[0], self._spec, self._down))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._in(x)
        return self._ops.linear(self._ops.gate_mul(gate, up, self._spec.act), self._down)


class _Moe:
    """Router, top-k experts, and the shared expert every token passes."""

    def __init__(self, spec: MoeSpec, weights: _Scope, ops: Ops, routed: LayerExperts) -> None:
        self._spec, self._ops, self._routed = spec, ops, routed
        shared = (("shared.switch",) if spec.shared_switch else ()) + (("shared.gate", "shared.up") if spec.shared_inter else ())
        self._in = _Fan(weights, "in", ("router", *shared), ops)
        self._shared_down, self._router_bias = weights.get("shared.down"), weights.get("router_bias")

    def join(self, norm: torch.Tensor, eps: float) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]:
        routed, bank = self._routed, self._routed.in_place
        banks, guard = ((bank.gate_up, bank.down), bank.guard) if bank else (None, None)
        half = MoeHalf(norm, eps, self._in.stored[0], self._spec, self._router_bias, self._shared_down, banks, guard)
        run: JoinedMoe = self._ops.joined.moe(half)

        def moe(x: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor | None:
            if routed.in_place:
                return run(x, added)
            x, ids, scores, always = run.choose(x, added)
            out = routed.run(x, ids, scores)
            return out if always is None else out + always

        moe.run = run
        return moe

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        spec, ops = self._spec, self._ops
        router, *shared = self._in(x)
        ids, scores = ops.route(router, spec, self._router_bias)
        out = self._routed.run(x, ids, scores)
        if not shared:
            return out
        *switch, gate, up = shared
        always = ops.linear(ops.gate_mul(gate, up, spec.act), self._shared_down)
        if switch:
            always = ops.gate_mul(switch[0], always, "sigmoid")
        return out + always


class _Scope:
    """The weights under a common prefix."""

    def __init__(self, weights: Mapping[str, Weight], prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> Weight:
        return self._weights[self._prefix + name]

    def get(self, name: str) -> Weight | None:
        return self._weights.get(self._prefix + name)

    def inner(self, prefix: str) -> _Scope:
        return _Scope(self._weights, self._prefix + prefix)


def _joined(ops: Ops, part: object, norm: torch.Tensor, eps: float) -> Callable[..., torch.Tensor | None] | None:
    """The half layer of `part` in one call; None where `ops` or `part` knows no such thing."""
    join = getattr(part, "join", None)
    return join(norm, eps) if join and getattr(ops, "joined", None) is not None else None


def _own_call(half: Callable | None) -> Callable | None:
    """What `Ops.joined` made, without the decoder's own function around it."""
    return getattr(half, "run", half)


def _sum_norm(ops: Ops, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x, after `added` was added to it in place."""
    return ops.rms_norm(x, weight, eps, False) if added is None else ops.add_norm(x, added, weight, eps)


def _norm_weight(spec: ModelSpec, weight: torch.Tensor) -> torch.Tensor:
    """What the norm multiplies by; the 1 of (1 + w) is added once here, not in every step."""
    return 1.0 + weight if spec.norm_plus_one else weight
