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


def test_epsilon_bounds_what_becomes_of_small_rows(ops, truth, rng) -> None:
    x, z, w = 1e-3 * torch.randn(5, 33, generator=rng), torch.randn(5, 33, generator=rng), torch.randn(33, generator=rng)
    for eps in (1e-6, 1e-5):
        close(ops.rms_norm(x, w, eps, True), truth.rms_norm(x, w, eps, True), 1e-6)
        close(ops.gated_norm(x, z, w, eps), truth.gated_norm(x, z, w, eps), 1e-6)
        close(ops.add_norm(x.clone(), x, w, eps), truth.add_norm(x.clone(), x, w, eps), 1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dim", "rot"), [(64, 64), (256, 64), (20, 12), (40, 36)])
def test_rope(ops, truth, rng, interleaved: bool, dim: int, rot: int) -> None:
    x, angle = torch.randn(9, 3, dim, generator=rng), 10 * torch.randn(9, rot // 2, generator=rng)
    got = ops.rope(x, angle.cos(), angle.sin(), interleaved)
    close(got, truth.rope(x, angle.cos(), angle.sin(), interleaved), 1e-6)
    assert torch.equal(got[..., rot:], x[..., rot:])


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize(("dim", "rot"), [(64, 64), (256, 64), (20, 12), (128, 0)])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_heads_are_turned_as_one_by_one_and_the_rest_stays(
    ops, truth, rng, rows: int, dim: int, rot: int, normed: bool, interleaved: bool
) -> None:
    x, angle = torch.randn(rows, 4 + 2 + 2, dim, generator=rng), 10 * torch.randn(rows, rot // 2, generator=rng)
    norms = tuple(torch.randn(2, dim, generator=rng).unbind()) if normed else None
    rope = (angle.cos(), angle.sin()) if rot else None
    want = [x[:, :4].contiguous(), x[:, 4:6].contiguous()]
    if norms:
        want = [ops.rms_norm(heads, weight, 1e-6, False) for heads, weight in zip(want, norms, strict=True)]
    if rope:
        want = [ops.rope(heads, *rope, interleaved) for heads in want]
    reference = truth.turn_heads(x.clone(), 4, 2, norms, 1e-6, rope, interleaved)
    got = ops.turn_heads(x.clone(), 4, 2, norms, 1e-6, rope, interleaved)
    assert torch.equal(got, torch.cat([*want, x[:, 6:]], 1))
    close(got, reference, 1e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (9, 100), (70, 16)])
def test_a_residual_and_its_norm_are_those_of_two_steps(ops, truth, rng, rows: int, width: int) -> None:
    x, added, weight = (torch.randn(*shape, generator=rng) for shape in ((rows, width), (rows, width), (width,)))
    mine, theirs = x.clone(), x.clone()
    got = ops.add_norm(mine, added, weight, 1e-6)
    assert torch.equal(mine, x + added) and torch.equal(got, ops.rms_norm(x + added, weight, 1e-6, False))
    close(got, truth.add_norm(theirs, added, weight, 1e-6), 1e-5)
    assert torch.equal(theirs, mine)


def test_exp_at_its_ends(ops) -> None:
    gate = torch.tensor([[float("inf"), -float("inf"), float("nan"), 88.8, -88.8]])
    got = ops.gate_mul(gate, torch.ones_like(gate), "sigmoid")[0]
    assert got[0] == 1 and got[1] == 0 and got[2].isnan() and got[3] == 1 and got[4] == 0


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "sigmoid"])
def test_gate_mul(ops, truth, act: str) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e30, -1e30])]).view(-1, 1)
    up = torch.ones_like(gate)
    got, want = ops.gate_mul(gate, up, act), truth.gate_mul(gate, up, act)
    assert torch.isfinite(got).all()
    # exp's relative error grows with its argument; the truth's 1 + tanh loses what is below 1e-16 of the input
    assert ((got - want).abs() <= 2e-5 * want.abs() + 1e-12).all()
