"""The gated delta rule in chunks, as batched matrix products.

State S [dk, dv] per value head; one token does  S <- e^g S;  S <- S + k (beta (v - k^T S))^T;  o = S^T q.
Inside a chunk the updates are condensed by one unit-triangular solve (the "UT transform"); between chunks the state obeys
S' = M S + N with M, N known before the scan, so the scan itself is one small product per chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 32


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class UnitLowerInverse(torch.autograd.Function):
    """(I + low)^-1 for strictly lower `low`: one triangular solve forward, two products backward."""

    @staticmethod
    def forward(ctx, low: torch.Tensor) -> torch.Tensor:
        eye = torch.eye(low.shape[-1], dtype=low.dtype).expand_as(low)
        inverse = torch.linalg.solve_triangular(low, eye, upper=False, unitriangular=True).contiguous()
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(1, 2)
        return -(turned @ grad @ turned).tril(-1)


def scan_states(step: torch.Tensor, add: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States before each chunk [N, C, dk, dv], and the state after the last."""
    before = []
    for m, a in zip(step.unbind(1), add.unbind(1), strict=True):
        before.append(state)
        state = torch.baddbmm(a, m, state)
    return torch.stack(before, 1), state


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [B, T, Hk, dk], v [B, T, Hv, dv], g, beta [B, T, Hv] in fp32 -> o [B, T, Hv, dv], last state [B*Hv, dk, dv]."""
    b, t, hv, dv = v.shape
    dk, group, pad = q.shape[-1], hv // k.shape[2], -t % CHUNK

    def chunks(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad))
        return x.transpose(1, 2).reshape(b * x.shape[2], (t + pad) // CHUNK, CHUNK, *x.shape[3:])

    q, k = chunks(l2norm(q) * dk**-0.5), chunks(l2norm(k))
    q, k = (x.repeat_interleave(group, 0) for x in (q, k))
    v, g, beta = chunks(v), chunks(g).cumsum(-1), chunks(beta).unsqueeze(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    kb = k * beta
    inverse = UnitLowerInverse.apply(((kb @ k.transpose(-1, -2)) * decay).tril(-1).flatten(0, 1)).unflatten(0, k.shape[:2])
    u = inverse @ (v * beta)
    w = inverse @ (kb * g.exp().unsqueeze(-1))
    last = g[..., -1:].unsqueeze(-1)
    k_out = k * (last - g.unsqueeze(-1)).exp()
    step = last.exp() * torch.eye(dk, dtype=q.dtype) - k_out.transpose(-1, -2) @ w
    if state is None:
        state = q.new_zeros(b * hv, dk, dv)
    before, state = scan_states(step, k_out.transpose(-1, -2) @ u, state)
    fresh = u - w @ before
    out = (q * g.exp().unsqueeze(-1)) @ before + ((q @ k.transpose(-1, -2)) * decay) @ fresh
    return out.reshape(b, hv, t + pad, dv)[:, :, :t].transpose(1, 2), state


def delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: q, k [B, Hk, dk], v [B, Hv, dv], g, beta [B, Hv], state [B, Hv, dk, dv]."""
    group = v.shape[1] // k.shape[1]
    q, k = (l2norm(x).repeat_interleave(group, 1) for x in (q, k))
    state = state * g.exp()[..., None, None]
    seen = torch.einsum("bhkv,bhk->bhv", state, k)
    state = state + torch.einsum("bhk,bhv->bhkv", k, beta.unsqueeze(-1) * (v - seen))
    return torch.einsum("bhkv,bhk->bhv", state, q * q.shape[-1] ** -0.5), state
