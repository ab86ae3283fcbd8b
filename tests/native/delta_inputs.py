"""Rows and states for the tests of the gated delta rule, and sequences run over them in chunks."""

from __future__ import annotations

import torch

from engine.kernels.ops import StateLayer
from engine.models.spec import DeltaNetSpec
from tests.native.helpers import segments

SPEC = DeltaNetSpec(key_heads=2, value_heads=4, key_dim=32, value_dim=32, conv_kernel=4)


def inputs(spec: DeltaNetSpec, n: int, seed: int = 0, spread: float = 1.0):
    gen = torch.Generator().manual_seed(seed)
    c, hv = spec.conv_channels, spec.value_heads
    weights = {
        "conv": torch.randn(c, spec.conv_kernel, generator=gen) / 2,
        "dt_bias": torch.randn(hv, generator=gen),
        "a_log": torch.rand(hv, generator=gen),
    }
    return (
        torch.randn(n, c, generator=gen),
        spread * torch.randn(n, hv, generator=gen),
        torch.randn(n, hv, generator=gen),
        weights,
    )


def empty(spec: DeltaNetSpec, slots: int) -> StateLayer:
    conv = torch.zeros(slots, spec.conv_channels, spec.conv_kernel - 1)
    return StateLayer(conv, torch.zeros(slots, spec.value_heads, spec.key_dim, spec.value_dim))


def run(ops, spec, data, cuts: list[int], state: StateLayer, slot: int = 0) -> torch.Tensor:
    qkv, a, b, weights = data
    out, at = [], 0
    for end in cuts:
        seg = segments([0, end - at], [at], [[0]], [slot])
        out.append(ops.delta_net(qkv[at:end], a[at:end], b[at:end], weights, state, seg, spec))
        at = end
    return torch.cat(out)
