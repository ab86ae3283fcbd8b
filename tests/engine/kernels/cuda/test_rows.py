"""Norms, rotary embedding and gates."""

import pytest
import torch

from tests.native.helpers import close


@pytest.mark.parametrize("dim", [1, 100, 2048])
@pytest.mark.parametrize("plus_one", [True, False])
def test_rms_norm(ops, truth, rng, dim: int, plus_one: bool) -> None:
    x, w = torch.randn(5, 3, dim, generator=rng), torch.randn(dim, generator=rng)
    got = ops.rms_norm(x, w, 1e-6, plus_one)
    close(got, truth.rms_norm(x, w, 1e-6, plus_one), 1e-6)
    assert torch.equal(got[2:3], ops.rms_norm(x[2:3], w, 1e-6, plus_one))


def test_a_residual_and_its_norm_are_those_of_two_steps(ops, rng) -> None:
    x, added, weight = torch.randn(4, 100, generator=rng), torch.randn(4, 100, generator=rng), torch.randn(100, generator=rng)
    mine = x.clone()
    got = ops.add_norm(mine, added, weight, 1e-6)
    assert torch.equal(mine, x + added) and torch.equal(got, ops.rms_norm(x + added, weight, 1e-6, False))


def test_gated_norm(ops, truth, rng) -> None:
    x, w = torch.randn(5, 4, 33, generator=rng), torch.randn(33, generator=rng)
    z = (20 * torch.randn(5, 200, generator=rng))[:, 7 : 7 + 132].view(5, 4, 33)
    close(ops.gated_norm(x, z, w, 1e-6), truth.gated_norm(x, z, w, 1e-6), 1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dim", "rot"), [(64, 64), (20, 12)])
def test_rope(ops, truth, rng, interleaved: bool, dim: int, rot: int) -> None:
    x, angle = torch.randn(5, 3, dim, generator=rng), 10 * torch.randn(5, rot // 2, generator=rng)
    got = ops.rope(x, angle.cos(), angle.sin(), interleaved)
    close(got, truth.rope(x, angle.cos(), angle.sin(), interleaved), 1e-6)
    assert torch.equal(got[..., rot:], x[..., rot:])


@pytest.mark.parametrize(("dim", "rot"), [(64, 64), (20, 12), (32, 0)])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_heads_are_turned_and_the_rest_stays(ops, truth, rng, dim: int, rot: int, normed: bool, interleaved: bool) -> None:
    x, angle = torch.randn(3, 4 + 2 + 2, dim, generator=rng), 10 * torch.randn(3, rot // 2, generator=rng)
    norms = tuple(torch.randn(2, dim, generator=rng).unbind()) if normed else None
    rope = (angle.cos(), angle.sin()) if rot else None
    got = ops.turn_heads(x.clone(), 4, 2, norms, 1e-6, rope, interleaved)
    close(got, truth.turn_heads(x.clone(), 4, 2, norms, 1e-6, rope, interleaved), 1e-5)
    assert torch.equal(got[:, 6:], x[:, 6:])
    assert torch.equal(
        ops.turn_heads(x[1:2], 4, 2, norms, 1e-6, tuple(p[1:2] for p in rope) if rope else None, interleaved), got[1:2]
    )


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "sigmoid"])
def test_gate_mul(ops, truth, rng, act: str) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 31), torch.tensor([0.0, -0.0, 1e30, -1e30])]).view(-1, 1)
    got, want = ops.gate_mul(gate, torch.ones_like(gate), act), truth.gate_mul(gate, torch.ones_like(gate), act)
    assert torch.isfinite(got).all()
    assert ((got - want).abs() <= 2e-5 * want.abs() + 1e-7).all()
    up = torch.randn(35, 7, generator=rng)
    assert torch.equal(ops.gate_mul(gate, up, act), got * up)
