"""The end of a very long dialogue, with gradients, behind a beginning that was read without.

Reading sixteen thousand tokens forward is cheap; keeping what their gradient needs takes gigabytes and most of the time. Long
prompts are therefore read once without gradients, and only the last part, where the assistant speaks, is learned from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .delta import gated_delta
from .model import FullAttention, LinearAttention, Model, Pack, balance


def read(model: Model, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each layer keeps of a beginning `ids` [1, P]: the convolution's last inputs and the state, or keys and values."""
    kept: list = []
    with torch.no_grad():
        model(ids, Pack.of(torch.zeros_like(ids)), kept)
    reach = model.shape.conv - 1
    pairs = zip(model.model.layers, kept, strict=True)
    return [(a[:, -reach:].clone(), b) if isinstance(layer.mixer, LinearAttention) else (a, b) for layer, (a, b) in pairs]


def linear_tail(layer: LinearAttention, x: torch.Tensor, past: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    mixed = torch.cat((past, layer.in_proj_qkv(x)), 1)
    q, k, v = layer.heads(layer.conv1d(mixed)[:, past.shape[1] :])
    g, beta = layer.gates(x)
    with torch.autocast("cpu", enabled=False):
        out, _ = gated_delta(q, k, v, g, beta, state)
    return layer.finish(x, out)


def full_tail(layer: FullAttention, x: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor) -> torch.Tensor:
    start, count = past_k.shape[2], x.shape[1]
    position = torch.arange(start, start + count).unsqueeze(0)
    q, k, v, gate = layer.project(x, position)
    k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
    seen = torch.ones(count, start + count, dtype=torch.bool).tril(start)
    return layer.finish(F.scaled_dot_product_attention(q, *layer.widen(k, v), attn_mask=seen), gate)


def forward_tail(
    model: Model, ids: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final hidden states [1, S, H] of `ids` [1, S] behind `past`, and the mean balance loss."""
    x, loads, real = model.model.embed_tokens(ids), [], torch.ones(ids.numel(), dtype=torch.bool)
    for layer, kept in zip(model.model.layers, past, strict=True):
        mix = linear_tail if isinstance(layer.mixer, LinearAttention) else full_tail
        x = x + mix(layer.mixer, layer.input_layernorm(x), *kept)
        out, chosen, p = layer.mlp(layer.post_attention_layernorm(x))
        x = x + out
        loads.append(balance(chosen, p, real))
    return model.model.norm(x), torch.stack(loads).mean()
