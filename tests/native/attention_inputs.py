"""Queries, keys and pages for the tests of attention, and sequences run over them in chunks."""

from __future__ import annotations

import torch

from engine.kernels.ops import KVLayer
from tests.native.helpers import PAGE, segments


def fresh(pages: int, heads: int, dim: int, dtype=torch.bfloat16) -> KVLayer:
    return KVLayer(*(torch.zeros(pages, heads, PAGE, dim, dtype=dtype) for _ in range(2)))


def run(ops, qkv, kv, cuts: list[int], table: list[int], window) -> torch.Tensor:
    """One sequence from position 0, prefilled in the chunks that end at `cuts`."""
    q, k, v = qkv
    out, at = [], 0
    for end in cuts:
        seg = segments([0, end - at], [at], [table], [0])
        out.append(ops.attention(q[at:end], k[at:end], v[at:end], kv, seg, q.shape[2] ** -0.5, window))
        at = end
    return torch.cat(out)


def random_qkv(n: int, hq: int, hkv: int, dim: int, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, h, dim, generator=gen) for h in (hq, hkv, hkv))
    return q, k.bfloat16().float(), v.bfloat16().float()  # what the pages can hold, so that the truth sees the same keys
