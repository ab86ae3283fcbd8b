"""The training model: Qwen3.5-MoE text, mathematically what transformers computes, written for a few CPU cores.

Parameter names are transformers' own, so a state dict is a checkpoint. Rows are packed with several dialogues, three
padding tokens apart; `Pack` tells where each begins, and convolution, delta rule, positions and attention restart there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .delta import gated_delta
from .shape import Shape

SHORTEST = 16  # tokens; no packed dialogue is shorter
FORGET = -40.0  # log decay at a dialogue's first token: e^-40 of the last dialogue is nothing


@dataclass(frozen=True)
class Pack:
    """Where dialogues lie in a batch of rows."""

    position: torch.Tensor  # [B, T] inside the dialogue
    real: torch.Tensor  # [B, T] bool: not padding
    spans: torch.Tensor  # [N, 3] row, start, end of every dialogue; then empty spans, for one shape to compile

    @classmethod
    def of(cls, doc: torch.Tensor) -> Pack:
        """`doc` [B, T] numbers the dialogues in each row; -1 is padding."""
        b, t = doc.shape
        index = torch.arange(t).expand(b, t)
        first = torch.ones_like(doc, dtype=torch.bool)
        first[:, 1:] = doc[:, 1:] != doc[:, :-1]
        start = torch.where(first, index, 0).cummax(1).values
        last = first.roll(-1, 1)
        last[:, -1] = True
        row, end = (last & (doc >= 0)).nonzero().unbind(1)
        spans = torch.zeros(max(b * t // SHORTEST, len(row)), 3, dtype=torch.long)
        spans[: len(row)] = torch.stack((row, start[row, end], end + 1), 1)
        return cls(index - start, doc >= 0, spans)


class Norm(nn.Module):
    """RMS norm whose weight is stored as an offset from one."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide * self.weight * F.silu(gate.float())


class Conv(nn.Module):
    """Depthwise causal convolution. Rows keep `taps - 1` padding tokens (zeros here) between dialogues, so none sees another."""

    def __init__(self, width: int, taps: int):
        super().__init__()
        self.weight, self.taps = nn.Parameter(torch.zeros(width, 1, taps)), taps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.conv1d(F.pad(x.transpose(1, 2), (self.taps - 1, 0)), self.weight.to(x.dtype), groups=self.weight.shape[0])
        return F.silu(out.transpose(1, 2))


class LinearAttention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.dt_bias = nn.Parameter(torch.zeros(s.lin_v_heads))
        self.A_log = nn.Parameter(torch.zeros(s.lin_v_heads))
        self.conv1d = Conv(s.conv_width, s.conv)
        self.norm = GatedNorm(s.lin_v_dim, s.eps)
        self.in_proj_qkv = nn.Linear(s.hidden, s.conv_width, bias=False)
        self.in_proj_z = nn.Linear(s.hidden, s.value_width, bias=False)
        self.in_proj_b = nn.Linear(s.hidden, s.lin_v_heads, bias=False)
        self.in_proj_a = nn.Linear(s.hidden, s.lin_v_heads, bias=False)
        self.out_proj = nn.Linear(s.value_width, s.hidden, bias=False)

    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s = self.s
        key = s.lin_k_heads * s.lin_k_dim
        q, k, v = mixed.float().split((key, key, s.value_width), -1)
        return q.unflatten(-1, (-1, s.lin_k_dim)), k.unflatten(-1, (-1, s.lin_k_dim)), v.unflatten(-1, (-1, s.lin_v_dim))

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return g, self.in_proj_b(x).float().sigmoid()

    def finish(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        z = self.in_proj_z(x).unflatten(-1, (-1, self.s.lin_v_dim))
        return self.out_proj(self.norm(out, z).flatten(-2))

    def forward(self, x: torch.Tensor, pack: Pack, keep: list | None = None) -> torch.Tensor:
        real = pack.real.unsqueeze(-1)
        mixed = self.in_proj_qkv(x)
        mixed = mixed * real.to(mixed.dtype)
        q, k, v = self.heads(self.conv1d(mixed))
        g, beta = self.gates(x)
        g = torch.where((pack.position == 0).unsqueeze(-1), FORGET, g) * real
        with torch.autocast("cpu", enabled=False):  # sums over a whole dialogue: fp32
            out, state = gated_delta(q, k, v, g, beta * real)
        if keep is not None:
            keep.append((mixed, state))
        return self.finish(x, out)


def rotate(x: torch.Tensor, position: torch.Tensor, s: Shape) -> torch.Tensor:
    """Rotary embedding on the first `rotary` channels; x [B, heads, T, head_dim]."""
    half = s.rotary // 2
    freq = s.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position.float().unsqueeze(-1) * freq
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), -1)


class FullAttention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(s.head_dim, s.eps), Norm(s.head_dim, s.eps)

    def project(self, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key, value as [B, heads, T, head_dim], and the output gate."""
        s = self.s
        q, gate = self.q_proj(x).unflatten(-1, (s.heads, 2 * s.head_dim)).chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (s.kv_heads, s.head_dim))
        v = self.v_proj(x).unflatten(-1, (s.kv_heads, s.head_dim)).transpose(1, 2)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        return rotate(q, position, s), rotate(k, position, s), v, gate.flatten(-2)

    def widen(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.s.heads // self.s.kv_heads
        return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def finish(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(-2) * gate.sigmoid())

    def forward(self, x: torch.Tensor, pack: Pack, keep: list | None = None) -> torch.Tensor:
        q, k, v, gate = self.project(x, pack.position)
        if keep is not None:
            keep.append((k, v))
        return self.finish(attend_spans(q, *self.widen(k, v), pack.spans), gate)


@torch.compiler.disable
def attend_spans(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """Causal attention inside each dialogue alone: a quarter of the work of one masked product over whole rows."""
    pieces, where = [], []
    for row, start, end in (s for s in spans.tolist() if s[2]):
        part = (x[row : row + 1, :, start:end] for x in (q, k, v))
        pieces.append(F.scaled_dot_product_attention(*part, is_causal=True)[0])
        where.append(torch.arange(start, end) + row * q.shape[2])
    flat = q.new_zeros(q.shape[0] * q.shape[2], q.shape[1], q.shape[3])
    flat = flat.index_copy(0, torch.cat(where), torch.cat(pieces, 1).transpose(0, 1))
    return flat.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


class Gate(nn.Module):
    """The router: softmax over all experts, the best few, their weights renormalised."""

    def __init__(self, s: Shape):
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.zeros(s.experts, s.hidden)), s.top_k

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", enabled=False):  # near ties must not depend on bf16
            p = (x.float() @ self.weight.t().float()).softmax(-1)
        top, chosen = p.topk(self.top_k, -1)
        return top / top.sum(-1, keepdim=True), chosen, p


BLOCK = 128  # rows per block of the expert product


class BlockProduct(torch.autograd.Function):
    """Each block of rows times the transposed matrix of its expert. Every call has the same shape: oneDNN compiles a kernel
    per shape, and with one product per expert (sizes change every batch) compiling took most of the step."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, weight: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        mine = weight.index_select(0, owner)
        ctx.save_for_backward(rows, mine, owner)
        ctx.experts = weight.shape[0]
        return torch.bmm(rows, mine.transpose(1, 2))

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        rows, mine, owner = ctx.saved_tensors
        to_weight = torch.bmm(grad.transpose(1, 2), rows)
        total = to_weight.new_zeros(ctx.experts, *to_weight.shape[1:]).index_add_(0, owner, to_weight)
        return torch.bmm(grad, mine), total, None


class Experts(nn.Module):
    """Tokens sorted by expert into padded blocks, two block products, and a weighted sum back in token order."""

    def __init__(self, s: Shape):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(s.experts, 2 * s.expert_width, s.hidden))
        self.down_proj = nn.Parameter(torch.zeros(s.experts, s.hidden, s.expert_width))

    def places(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The row each (token, choice) takes in the padded blocks, and the expert that owns each block."""
        experts, flat = self.gate_up_proj.shape[0], chosen.flatten()
        count = torch.zeros(experts, dtype=torch.long).scatter_add_(0, flat, torch.ones_like(flat))
        blocks = (count + BLOCK - 1) // BLOCK
        last = blocks.cumsum(0)
        order = flat.argsort(stable=True)
        shift = (last - blocks) * BLOCK - (count.cumsum(0) - count)
        place = torch.empty_like(flat).scatter_(0, order, torch.arange(flat.shape[0]) + shift[flat[order]])
        owner = torch.searchsorted(last, torch.arange(flat.shape[0] // BLOCK + experts), right=True)
        return place, owner.clamp(max=experts - 1)

    def forward(self, x: torch.Tensor, top: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        k = chosen.shape[1]
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        place, owner = self.places(chosen)
        rows = SpreadRows.apply(x.to(dtype), place, owner.shape[0] * BLOCK, k).unflatten(0, (-1, BLOCK))
        gate, up = BlockProduct.apply(rows, self.gate_up_proj.to(dtype), owner).chunk(2, -1)
        out = BlockProduct.apply(F.silu(gate) * up, self.down_proj.to(dtype), owner).flatten(0, 1)
        return (TakeRows.apply(out, place).unflatten(0, (-1, k)) * top.to(dtype).unsqueeze(-1)).sum(1)


class SpreadRows(torch.autograd.Function):
    """Token rows copied to their places; places nobody takes stay zero. Backward is a gather, not a scatter."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, place: torch.Tensor, size: int, k: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return x.new_zeros(size, x.shape[1]).index_copy_(0, place, x.repeat_interleave(k, 0))

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class TakeRows(torch.autograd.Function):
    """The rows at `place`; each is taken once, so backward is a copy."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.size = x.shape[0]
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (place,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size, grad.shape[1]).index_copy_(0, place, grad), None


class Shared(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.shared_width, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.shared_width, bias=False)
        self.down_proj = nn.Linear(s.shared_width, s.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMLP(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.gate, self.experts, self.shared_expert = Gate(s), Experts(s), Shared(s)
        self.shared_expert_gate = nn.Linear(s.hidden, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = x.flatten(0, -2)
        top, chosen, p = self.gate(flat)
        out = self.experts(flat, top, chosen) + self.shared_expert_gate(flat).sigmoid() * self.shared_expert(flat)
        return out.view_as(x), chosen, p


class Layer(nn.Module):
    def __init__(self, s: Shape, index: int):
        super().__init__()
        if s.is_full(index):
            self.self_attn = FullAttention(s)
        else:
            self.linear_attn = LinearAttention(s)
        self.mlp = SparseMLP(s)
        self.input_layernorm, self.post_attention_layernorm = Norm(s.hidden, s.eps), Norm(s.hidden, s.eps)

    @property
    def mixer(self) -> nn.Module:
        return self.self_attn if hasattr(self, "self_attn") else self.linear_attn

    def forward(self, x: torch.Tensor, pack: Pack, keep: list | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output, and its load-balance loss (1 when every expert is used alike)."""
        x = x + self.mixer(self.input_layernorm(x), pack, keep)
        out, chosen, p = self.mlp(self.post_attention_layernorm(x))
        return x + out, balance(chosen, p, pack.real.flatten())


def balance(chosen: torch.Tensor, p: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Experts x sum of (share of choices x mean probability), over real tokens."""
    experts = p.shape[-1]
    weight = real.to(p.dtype) / real.sum()
    share = (
        torch.zeros(experts, dtype=p.dtype).scatter_add_(0, chosen.flatten(), weight.repeat_interleave(chosen.shape[1]))
        / chosen.shape[1]
    )
    return experts * (share * (p * weight.unsqueeze(-1)).sum(0)).sum()


class Body(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s, i) for i in range(s.layers))
        self.norm = Norm(s.hidden, s.eps)


class Model(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.shape, self.model = s, Body(s)

    def forward(self, ids: torch.Tensor, pack: Pack, keep: list | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states [B, T, H] and the mean balance loss."""
        x, loads = self.model.embed_tokens(ids), []
        for layer in self.model.layers:
            x, load = layer(x, pack, keep)
            loads.append(load)
        return self.model.norm(x), torch.stack(loads).mean()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)
