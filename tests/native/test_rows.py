"""Norms, rotary embedding and gates."""

import pytest
import torch

from tests.native.helpers import close


@pytest.mark.parametrize("dim", [1, 16, 100, 2048])
@pytest.mark.parametrize("plus_one", [True, False])
def test_rms_norm(ops, truth, rng, dim: int, plus_one: bool) -> None:
    x, w = torch.randn(7, 3, dim, generator=rng), torch.randn(dim, generator=rng)
    close(ops.rms_norm(x, w, 1e-6, plus_one), truth.rms_norm(x, w, 1e-6, plus_one), 1e-6)
    assert torch.equal(ops.rms_norm(x, w, 1e-6, plus_one)[2:3], ops.rms_norm(x[2:3], w, 1e-6, plus_one))


@pytest.mark.parametrize("dim", [8, 128, 33])
def test_gated_norm(ops, truth, rng, dim: int) -> None:
    x, z, w = torch.randn(5, 4, dim, generator=rng), 20 * torch.randn(5, 4, dim, generator=rng), torch.randn(dim, generator=rng)
    close(ops.gated_norm(x, z, w, 1e-6), truth.gated_norm(x, z, w, 1e-6), 1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dim", "rot"), [(64, 64), (256, 64), (20, 12), (40, 36)])
def test_rope(ops, truth, rng, interleaved: bool, dim: int, rot: int) -> None:
    x, angle = torch.randn(9, 3, dim, generator=rng), 10 * torch.randn(9, rot // 2, generator=rng)
    got = ops.rope(x, angle.cos(), angle.sin(), interleaved)
    close(got, truth.rope(x, angle.cos(), angle.sin(), interleaved), 1e-6)
    assert torch.equal(got[..., rot:], x[..., rot:])


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "sigmoid"])
def test_gate_mul(ops, truth, act: str) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e30, -1e30])]).view(-1, 1)
    up = torch.ones_like(gate)
    got, want = ops.gate_mul(gate, up, act), truth.gate_mul(gate, up, act)
    assert torch.isfinite(got).all()
    # exp's relative error grows with its argument; the truth's 1 + tanh loses what is below 1e-16 of the input
    assert ((got - want).abs() <= 2e-5 * want.abs() + 1e-12).all()
