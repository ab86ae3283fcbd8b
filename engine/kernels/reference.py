"""The truth: every operation of `ops.Ops` in plain torch, float32, written as the papers write it.

Slow on purpose. Other kernels are proven against this file, so it owns what an operation means, not how to make it fast.

Batch invariance is kept by construction: a matrix product always runs on blocks of `ROWS` rows (a BLAS picks another
summation order for another shape), attention and the delta rule take one row at a time, and transcendental functions go
through float64, because torch evaluates the tail of a vector with another `exp` than its body (they differ by one ulp in
float32; rounding a float64 result hides it).
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
import torch.nn.functional as F

from engine.kernels import blocks
from engine.kernels.ops import KVLayer, Quant, Segments, StateLayer, Weight
from engine.models.spec import DeltaNetSpec, MoeSpec

ROWS = 16  # rows of one matrix product: a single row is padded to it, so keep it small; larger saves calls in prefill
NARROW = 16  # with fewer outputs than this, MKL on AMD sums a row in an order that depends on the row's place in the block

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


def dequantize(weight: Quant) -> torch.Tensor:
    """Blocks -> float32 `weight.shape`: GGUF's by the `gguf` package's reference code. Raises NotImplementedError."""
    ours = blocks.dequantize(weight)
    if ours is not None:
        return ours
    kind = gguf.GGMLQuantizationType[weight.type]
    return torch.from_numpy(gguf.quants.dequantize(weight.data.numpy(), kind).astype(np.float32, copy=False)).view(weight.shape)


class ReferenceOps:
    """`ops.Ops` in torch. Weights are held in float32: four bytes an element, whatever the checkpoint stores."""

    name = "reference"
    device = torch.device("cpu")
    kv_dtype = torch.float32
    quant_types = None
    weight_bytes = 4
    maps = False

    def prepare(self, weight: Weight) -> torch.Tensor:
        return dequantize(weight) if isinstance(weight, Quant) else weight.to(torch.float32).contiguous()

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return table[ids.long()]

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        outer = weight.shape[0]
        if outer < NARROW:
            weight = F.pad(weight, (0, 0, 0, NARROW - outer))
        out = torch.empty(x.shape[0], outer)
        block = torch.zeros(ROWS, x.shape[1])
        for start in range(0, x.shape[0], ROWS):
            rows = x[start : start + ROWS]
            block[: len(rows)] = rows
            out[start : start + ROWS] = F.linear(block, weight)[: len(rows), :outer]
        return out if bias is None else out + bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
        return _rms(x, eps) * (1.0 + weight if plus_one else weight)

    def add_norm(self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(x.add_(added), weight, eps, False)

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
        q, k, rest = x.split_with_sizes([q_heads, k_heads, x.shape[1] - q_heads - k_heads], 1)
        if norms:
            q, k = (self.rms_norm(heads, weight, eps, False) for heads, weight in zip((q, k), norms, strict=True))
        if rope:
            q, k = (self.rope(heads, *rope, interleaved) for heads in (q, k))
        return torch.cat([q, k, rest], 1)

    def gated_norm(self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _rms(x, eps) * weight * _exactly(F.silu, z)

    def gate_mul(self, gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
        return _exactly(ACTIVATIONS[act], gate) * up

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        half = cos.shape[1]
        cos, sin = cos[:, None], sin[:, None]  # [T, 1, dim/2], the same for every head
        out = x.clone()
        if interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

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
        """A query at position p sees keys `max(0, p + 1 - window) .. p`, its own included."""
        out = torch.empty_like(q)
        for rows, start, pages, _ in _sequences(seg):
            end = start + len(q[rows])
            _write_pages(kv.k, pages, start, k[rows])
            _write_pages(kv.v, pages, start, v[rows])
            keys, values = _read_pages(kv.k, pages, end), _read_pages(kv.v, pages, end)  # [Hkv, L, D]
            for row, position in enumerate(range(start, end), rows.start):
                first = max(0, position + 1 - window) if window else 0
                out[row] = _attend(q[row], keys[:, first : position + 1], values[:, first : position + 1], scale)
        return out

    def heads_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.linear(x[:, head], matrix) for head, matrix in enumerate(weight)], 1)

    def latent_attention(
        self, q: torch.Tensor, latent: torch.Tensor, kv: KVLayer, seg: Segments, scale: float, rank: int
    ) -> torch.Tensor:
        """DeepSeek-V2 (arXiv 2405.04434), section 2.1, the products that make keys and values of the latent absorbed."""
        out = torch.empty(*q.shape[:2], rank)
        for rows, start, pages, _ in _sequences(seg):
            end = start + len(q[rows])
            _write_pages(kv.k, pages, start, latent[rows, None])
            keys = _read_pages(kv.k, pages, end)  # [1, L, R + Dr]
            for row, position in enumerate(range(start, end), rows.start):
                seen = keys[:, : position + 1]
                out[row] = _attend(q[row], seen, seen[..., :rank], scale)
        return out

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
        out = torch.empty(len(qkv), spec.value_heads, spec.value_dim)
        decay = _exactly(lambda x: torch.exp(-weights["a_log"].double().exp() * F.softplus(x + weights["dt_bias"].double())), a)
        beta = _exactly(torch.sigmoid, b)
        for rows, slot in _delta_runs(seg, state):
            mixed = _causal_conv(qkv[rows], weights["conv"], state.conv[slot])
            q, k, v = mixed.split([spec.key_heads * spec.key_dim] * 2 + [spec.value_heads * spec.value_dim], dim=1)
            q = _l2_norm(q.reshape(-1, spec.key_heads, spec.key_dim)) * spec.key_dim**-0.5
            k = _l2_norm(k.reshape(-1, spec.key_heads, spec.key_dim))
            v = v.reshape(-1, spec.value_heads, spec.value_dim)
            repeat = spec.value_heads // spec.key_heads  # each key head serves this many consecutive value heads
            q, k = q.repeat_interleave(repeat, dim=1), k.repeat_interleave(repeat, dim=1)
            out[rows] = _delta_rule(q, k, v, decay[rows], beta[rows], state.s[slot])
        return out

    def route(self, logits: torch.Tensor, spec: MoeSpec, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Groups and bias as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""
        logits = logits.double()
        scores = (torch.softmax(logits, dim=-1) if spec.score == "softmax" else torch.sigmoid(logits)).float()
        choice = scores if bias is None else scores + bias
        if spec.groups > 1:
            grouped = choice.unflatten(1, (spec.groups, -1))  # [T, G, E / G]
            left_out = _ranked(grouped.topk(spec.group_best).values.sum(-1))[:, spec.top_groups :]
            choice = grouped.scatter(1, left_out[..., None].expand(-1, -1, grouped.shape[2]), -torch.inf).flatten(1)
        ids = _ranked(choice)[:, : spec.top_k]
        weights = scores.gather(1, ids)
        if spec.renorm:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids.int(), weights * spec.scale

    def moe(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        act: str,
        place: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = x.repeat_interleave(ids.shape[1], 0)  # a row for each token's expert
        parts = self.expert_rows(rows, ids.reshape(-1), gate_up, down, act, place)
        return self.moe_merge(parts.view(*ids.shape, -1), ids, weights)

    def expert_rows(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        act: str,
        place: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        for expert in ids.unique().tolist():
            at = expert if place is None else int(place[expert])
            rows = torch.where(ids == expert)[0]
            gate, up = self.linear(x[rows], gate_up[at]).chunk(2, dim=1)
            out[rows] = self.linear(self.gate_mul(gate, up, act), down[at])
        return out

    def moe_merge(self, parts: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(parts.shape[0], parts.shape[2])
        for rank in range(ids.shape[1]):  # best expert first, so the order of summation is the row's own
            out += weights[:, rank, None] * parts[:, rank]
        return out


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """Indices of each row's scores, best first, ties to the lower index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


def _exactly(function, x: torch.Tensor) -> torch.Tensor:
    """`function(x)` evaluated in float64 and rounded once."""
    return function(x.double()).float()


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _l2_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)  # 1e-6: the value DeltaNet models are trained with


def _sequences(seg: Segments):
    """(rows, start, pages, slot) of every sequence of the step; rows a slice, pages int64."""
    cu, starts, slots = seg.cu.tolist(), seg.start.tolist(), seg.slot.tolist()
    for i, (start, slot) in enumerate(zip(starts, slots, strict=True)):
        yield slice(cu[i], cu[i + 1]), start, seg.pages[i].long(), slot


def _delta_runs(seg: Segments, state: StateLayer):
    """(rows, slot) of every sequence of the step, in two parts where its state between them is kept."""
    kept = [(0, -1)] * len(seg.slot) if seg.kept is None else seg.kept.tolist()
    for (rows, _, _, slot), (count, to) in zip(_sequences(seg), kept, strict=True):
        middle = rows.start + count
        if to >= 0:
            yield slice(rows.start, middle), slot
            state.conv[to], state.s[to] = state.conv[slot], state.s[slot]
        yield slice(middle if to >= 0 else rows.start, rows.stop), slot


def _write_pages(cache: torch.Tensor, pages: torch.Tensor, start: int, new: torch.Tensor) -> None:
    position = torch.arange(start, start + len(new))
    size = cache.shape[2]
    cache[pages[position // size], :, position % size] = new.to(cache.dtype)


def _read_pages(cache: torch.Tensor, pages: torch.Tensor, end: int) -> torch.Tensor:
    """The first `end` cached vectors of a sequence, [Hkv, end, D]."""
    _, heads, size, dim = cache.shape
    held = cache[pages[: -(-end // size)]]  # [P, Hkv, PAGE, D]
    return held.transpose(0, 1).reshape(heads, -1, dim)[:, :end].float()


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(q k^T * scale) v for one query [Hq, D] over keys, values [Hkv, L, D] (Vaswani et al. 2017)."""
    heads, dim = q.shape
    grouped = q.view(len(keys), -1, dim)  # [Hkv, G, D]: query heads sharing a key head stand together
    scores = torch.softmax(grouped @ keys.transpose(1, 2) * scale, dim=-1)
    return (scores @ values).view(heads, -1)


def _causal_conv(x: torch.Tensor, weight: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """SiLU of the depthwise causal convolution of x [T, C] with weight [C, K]; `past` [C, K-1] is read, then advanced."""
    taps = weight.shape[1]
    padded = torch.cat([past.T, x])  # [K-1+T, C]
    out = torch.zeros_like(x)
    for tap in range(taps):
        out += padded[tap : tap + len(x)] * weight[:, tap]
    past.copy_(padded[len(x) :].T)
    return _exactly(F.silu, out)


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """S_t = decay_t S_(t-1) + k_t (beta_t (v_t - k_t^T decay_t S_(t-1))); o_t = q_t^T S_t (arXiv 2412.06464, eq. 10).

    q, k [T, Hv, Dk], v [T, Hv, Dv], decay, beta [T, Hv]; `state` [Hv, Dk, Dv] is read, then left at the last token's value.
    """
    out = torch.empty_like(v)
    s = state.clone()
    for t in range(len(q)):
        s = s * decay[t, :, None, None]
        recalled = (s * k[t, :, :, None]).sum(1)  # [Hv, Dv]
        change = beta[t, :, None] * (v[t] - recalled)
        s = s + k[t, :, :, None] * change[:, None]
        out[t] = (s * q[t, :, :, None]).sum(1)
    state.copy_(s)
    return out
