"""Operations of one row: norms, rotations, gates and the router. One program a row (and head), the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.models.spec import MoeSpec


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "gelu_tanh":  # 0.5 x (1 + tanh(y)) = x sigmoid(2 y)
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * y))
    if ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def norm_kernel(
    out, x, added, z, weight, x_stride, z_stride, inner, width, eps,
    ADDED: tl.constexpr, GATED: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows (i, j) of x [.., inner, width] lie at i * stride + j * width. ADDED: x += added first. GATED: times silu(z)."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = c < width
    at = x + i // inner * x_stride + i % inner * width + c
    value = tl.load(at, mask=live, other=0.0)
    if ADDED:
        value += tl.load(added + i * width + c, mask=live, other=0.0)
        tl.store(at, value, mask=live)
    mean = tl.sum(value * value, 0) / width
    scale = tl.load(weight + c, mask=live, other=0.0)
    if PLUS_ONE:
        scale += 1.0
    value = value * (1.0 / tl.sqrt_rn(mean + eps)) * scale
    if GATED:
        value *= activate(tl.load(z + i // inner * z_stride + i % inner * width + c, mask=live, other=0.0), "silu")
    tl.store(out + i * width + c, value, mask=live)


@triton.jit
def heads_kernel(
    out, x, q_norm, k_norm, cos, sin, x_stride, heads, q_heads, turned, width, eps,
    NORMED: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, heads, width]: heads below `turned` normed (those of q by q_norm) and rotated, others copied.

    Element i of a head's first 2 HALF pairs with i + APART; STEP apart are the firsts of two pairs.
    """
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, to = x + t * x_stride + head * width, out + (t * heads + head) * width
    c = tl.arange(0, BLOCK)
    value = tl.load(at + c, mask=c < width, other=0.0)
    if head >= turned:
        tl.store(to + c, value, mask=c < width)
        return
    scale = 1.0
    weight = q_norm
    if NORMED:
        scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / width + eps)
        if head >= q_heads:
            weight = k_norm
        value = value * scale * tl.load(weight + c, mask=c < width, other=0.0)
    tl.store(to + c, value, mask=(c < width) & (c >= 2 * HALF))
    if HALF > 0:
        i = tl.arange(0, BLOCK)
        live = i < HALF
        first, second = i * STEP, i * STEP + APART
        a = tl.load(at + first, mask=live, other=0.0)
        b = tl.load(at + second, mask=live, other=0.0)
        if NORMED:
            a = a * scale * tl.load(weight + first, mask=live, other=0.0)
            b = b * scale * tl.load(weight + second, mask=live, other=0.0)
        turn = tl.load(cos + t * HALF + i, mask=live, other=0.0)
        lift = tl.load(sin + t * HALF + i, mask=live, other=0.0)
        tl.store(to + first, a * turn - b * lift, mask=live)
        tl.store(to + second, b * turn + a * lift, mask=live)


@triton.jit
def gate_kernel(out, gate, up, g_stride, g_step, u_stride, width, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """out [R, width] = act(gate) * up; `g_step` 0: a gate a row."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < width
    value = tl.load(gate + row * g_stride + c * g_step, mask=live, other=0.0)
    out_value = activate(value, ACT) * tl.load(up + row * u_stride + c, mask=live, other=0.0)
    tl.store(out + row * width + c, out_value, mask=live)


@triton.jit
def route_kernel(
    ids, weights, logits, bias, stride, scale,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, SOFTMAX: tl.constexpr, RENORM: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr, TOP_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
):  # fmt: skip
    """The best `TOP` of a row, best first, ties to the lower expert; groups as in DeepSeek-V3 (arXiv 2412.19437, 2.1.2)."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    live = e < EXPERTS
    logit = tl.load(logits + t * stride + e, mask=live, other=float("-inf"))
    if SOFTMAX:
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score
    if BIASED:
        choice += tl.load(bias + e, mask=live, other=0.0)
    choice = tl.where(live, choice, float("-inf"))
    if GROUPS > 1:
        choice = _best_groups(choice, e, live, EXPERTS // GROUPS, GROUPS, TOP_GROUPS, GROUP_BEST, GROUP_BLOCK)
    r = tl.arange(0, TOP_BLOCK)
    chosen = tl.zeros((TOP_BLOCK,), tl.int32)
    weight = tl.zeros((TOP_BLOCK,), tl.float32)
    for i in range(TOP):
        best = tl.argmax(choice, 0, tie_break_left=True)
        chosen = tl.where(r == i, best, chosen)
        weight = tl.where(r == i, tl.sum(tl.where(e == best, score, 0.0), 0), weight)
        choice = tl.where(e == best, float("-inf"), choice)
    if RENORM:
        weight = weight / tl.sum(weight, 0)
    tl.store(ids + t * TOP + r, chosen, mask=r < TOP)
    tl.store(weights + t * TOP + r, weight * scale, mask=r < TOP)


@triton.jit
def _best_groups(
    choice, e, live,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Experts outside the groups whose `BEST` best sum highest become -inf."""
    g = tl.arange(0, BLOCK)
    rank = tl.full((BLOCK,), float("-inf"), tl.float32)
    for group in range(GROUPS):
        inside = tl.where(live & (e // SIZE == group), choice, float("-inf"))
        total = tl.max(inside, 0)
        for _ in range(1, BEST):
            inside = tl.where(e == tl.argmax(inside, 0, tie_break_left=True), float("-inf"), inside)
            total += tl.max(inside, 0)
        rank = tl.where(g == group, total, rank)
    kept = e < 0
    for _ in range(TOP_GROUPS):
        best = tl.argmax(rank, 0, tie_break_left=True)
        kept = kept | (e // SIZE == best)
        rank = tl.where(g == best, float("-inf"), rank)
    return tl.where(kept, choice, float("-inf"))


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    added: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS norm over the last dimension of x [T, .., width]; `added` goes into x first, in place; `z` gates the result."""
    width = x.shape[-1]
    if added is None and not (x.shape[0] == 0 or x[0].is_contiguous()):
        x = x.contiguous()
    if z is not None and not z[0].is_contiguous():
        z = z.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    inner = x[0].numel() // width
    norm_kernel[(x.shape[0] * inner,)](
        out, x, added, z, weight, x.stride(0), 0 if z is None else z.stride(0), inner, width, eps,
        ADDED=added is not None, GATED=z is not None, PLUS_ONE=plus_one, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


def turn(
    x: torch.Tensor,
    q_heads: int,
    turned: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    interleaved: bool,
) -> torch.Tensor:
    """The first `turned` heads of x [T, heads, width] normed and rotated, the others as they are."""
    count, heads, width = x.shape
    cos, sin = (part.contiguous() for part in rope) if rope else (x, x)
    half = cos.shape[1] if rope else 0
    out = torch.empty(count, heads, width, dtype=torch.float32, device=x.device)
    heads_kernel[(count, heads)](
        out, x, *(norms or (x, x)), cos, sin, x.stride(0), heads, q_heads, turned, width, eps,
        NORMED=norms is not None, HALF=half, STEP=2 if interleaved else 1, APART=1 if interleaved else half,
        BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


def gate_mul(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up of the shape of `up`; a gate [T, 1] applies to its whole row."""
    width = up[0].numel()
    step = int(gate.shape == up.shape)
    gate, up = (part if part[0].is_contiguous() else part.contiguous() for part in (gate, up))
    out = torch.empty(up.shape, dtype=torch.float32, device=up.device)
    gate_kernel[(up.shape[0], triton.cdiv(width, 1024))](
        out, gate, up, gate.stride(0), step, up.stride(0), width, ACT=act, BLOCK=1024
    )
    return out


def route(logits: torch.Tensor, spec: MoeSpec, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    count, experts = logits.shape
    ids = torch.empty(count, spec.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(count, spec.top_k, dtype=torch.float32, device=logits.device)
    route_kernel[(count,)](
        ids, weights, logits, bias, logits.stride(0), spec.scale,
        EXPERTS=experts, TOP=spec.top_k, SOFTMAX=spec.score == "softmax", RENORM=spec.renorm, BIASED=bias is not None,
        GROUPS=spec.groups, TOP_GROUPS=spec.top_groups, GROUP_BEST=spec.group_best, BLOCK=triton.next_power_of_2(experts),
        TOP_BLOCK=triton.next_power_of_2(spec.top_k), GROUP_BLOCK=triton.next_power_of_2(spec.groups),
    )  # fmt: skip
    return ids, weights
