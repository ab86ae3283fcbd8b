"""Greedy decoding with key-value and recurrent caches, many prompts at once, in fp32: what evaluation runs on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .delta import delta_step
from .model import FullAttention, LinearAttention, Model, Pack, SparseMLP


@dataclass
class LinearCache:
    """The convolution's last inputs [B, C, taps - 1] and the recurrent state [B, Hv, dk, dv]."""

    tail: torch.Tensor
    state: torch.Tensor


@dataclass
class FullCache:
    """Keys and values [B, kv heads, room, head_dim], filled up to each sequence's own length."""

    k: torch.Tensor
    v: torch.Tensor


def linear_cache(layer: LinearAttention, kept: tuple, lengths: torch.Tensor) -> LinearCache:
    mixed, state = kept
    reach = layer.conv1d.taps - 1
    index = lengths.unsqueeze(1) + torch.arange(-reach, 0)
    tail = mixed.gather(1, index.clamp(min=0).unsqueeze(-1).expand(-1, -1, mixed.shape[-1]))
    tail = torch.where((index >= 0).unsqueeze(-1), tail, 0)
    return LinearCache(tail.transpose(1, 2), state.unflatten(0, (mixed.shape[0], -1)))


def linear_step(layer: LinearAttention, x: torch.Tensor, cache: LinearCache) -> torch.Tensor:
    window = torch.cat((cache.tail, layer.in_proj_qkv(x).unsqueeze(-1)), -1)
    cache.tail = window[..., 1:]
    q, k, v = layer.heads(F.silu((window * layer.conv1d.weight[:, 0]).sum(-1)))
    g, beta = layer.gates(x)
    out, cache.state = delta_step(q, k, v, g, beta, cache.state)
    return layer.finish(x, out)


def full_step(layer: FullAttention, x: torch.Tensor, cache: FullCache, position: torch.Tensor) -> torch.Tensor:
    q, k, v, gate = layer.project(x.unsqueeze(1), position.unsqueeze(1))
    rows = torch.arange(x.shape[0])
    cache.k[rows, :, position], cache.v[rows, :, position] = k[:, :, 0], v[:, :, 0]
    seen = (torch.arange(cache.k.shape[2]) <= position.unsqueeze(1))[:, None, None]
    out = F.scaled_dot_product_attention(q, *layer.widen(cache.k, cache.v), attn_mask=seen)
    return layer.finish(out, gate).squeeze(1)


def sparse_step(mlp: SparseMLP, x: torch.Tensor) -> torch.Tensor:
    """All experts on a handful of tokens, unchosen ones weighted zero: quicker than sorting."""
    top, chosen, p = mlp.gate(x)
    weight = torch.zeros_like(p).scatter_(1, chosen, top)
    gate, up = F.linear(x, mlp.experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (p.shape[1], -1)).chunk(2, -1)
    out = torch.einsum("bei,ehi->bh", F.silu(gate) * up * weight.unsqueeze(-1), mlp.experts.down_proj)
    return out + mlp.shared_expert_gate(x).sigmoid() * mlp.shared_expert(x)


class Decoder:
    def __init__(self, model: Model, stop: set[int]):
        self.model, self.stop = model.eval(), stop

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]], room: int) -> tuple[torch.Tensor, list, torch.Tensor]:
        """First predicted tokens, caches with `room` more places, and lengths."""
        lengths = torch.tensor([len(p) for p in prompts])
        width = int(lengths.max()) + 3
        ids, doc = torch.zeros(len(prompts), width, dtype=torch.long), torch.full((len(prompts), width), -1)
        for i, p in enumerate(prompts):
            ids[i, : len(p)], doc[i, : len(p)] = torch.tensor(p), 0
        kept: list = []
        hidden, _ = self.model(ids, Pack.of(doc), kept)
        caches: list = []
        for layer, item in zip(self.model.model.layers, kept, strict=True):
            if isinstance(layer.mixer, LinearAttention):
                caches.append(linear_cache(layer.mixer, item, lengths))
            else:
                caches.append(FullCache(*(F.pad(x, (0, 0, 0, room)) for x in item)))
        last = hidden[torch.arange(len(prompts)), lengths - 1]
        return self.model.logits(last).argmax(-1), caches, lengths

    @torch.no_grad()
    def step(self, ids: torch.Tensor, caches: list, position: torch.Tensor) -> torch.Tensor:
        x = self.model.model.embed_tokens(ids)
        for layer, cache in zip(self.model.model.layers, caches, strict=True):
            h = layer.input_layernorm(x)
            x = x + (
                linear_step(layer.mixer, h, cache)
                if isinstance(cache, LinearCache)
                else full_step(layer.mixer, h, cache, position)
            )
            x = x + sparse_step(layer.mlp, layer.post_attention_layernorm(x))
        return self.model.logits(self.model.model.norm(x)).argmax(-1)

    def generate(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        """Up to `limit` tokens for each prompt, the stop token left out; an answer that never stops has `limit` tokens."""
        token, caches, position = self.prefill(prompts, limit)
        written: list[list[int]] = [[] for _ in prompts]
        running = [True] * len(prompts)
        for _ in range(limit):
            for i, t in enumerate(token.tolist()):
                if running[i] and t in self.stop:
                    running[i] = False
                if running[i]:
                    written[i].append(t)
            if not any(running):
                break
            token = self.step(token, caches, position)
            position = position + 1
        return written

    def generate_all(self, prompts: list[list[int]], limit: int, batch: int = 24) -> list[list[int]]:
        """`generate` in batches of like length."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        results: list[list[int]] = [[] for _ in prompts]
        for at in range(0, len(order), batch):
            part = order[at : at + batch]
            for i, out in zip(part, self.generate([prompts[i] for i in part], limit), strict=True):
                results[i] = out
        return results
