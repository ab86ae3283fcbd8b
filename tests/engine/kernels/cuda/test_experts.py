"""Routing and routed experts."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.cuda import experts
from engine.kernels.cuda.formats import FORMATS
from engine.kernels.ops import Quant
from engine.kernels.reference import dequantize
from engine.models.spec import MoeSpec
from tests.native.helpers import block_bytes, close

EXACT = 1e-4  # two products and an activation between them


def bank(kind: str, count: int, rows: int, cols: int, rng):
    """Experts as stored and in float32."""
    if kind == "BF16":
        weight = (torch.randn(count, rows, cols, generator=rng) / cols**0.5).bfloat16()
        return weight, weight.float()
    data = block_bytes(kind, count * rows, cols).data.view(count, rows, -1)
    return Quant(data, kind, cols), dequantize(Quant(data, kind, cols))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("count", "top"), [(128, 8), (7, 3), (4, 4)])
def test_route(ops, truth, rng, score, count: int, top: int) -> None:
    logits, bias = torch.randn(6, count, generator=rng), torch.randn(count, generator=rng)
    for renorm in (True, False):
        spec = MoeSpec(experts=count, top_k=top, inter=1, score=score, renorm=renorm, scale=2.5)
        for given in (None, bias):
            (ids, weights), (want, shares) = ops.route(logits, spec, given), truth.route(logits, spec, given)
            assert torch.equal(ids, want)
            close(weights, shares, 1e-5)


def test_groups_and_ties(ops, truth, rng) -> None:
    spec = MoeSpec(experts=16, top_k=4, inter=1, score="sigmoid", groups=4, top_groups=2)
    logits = torch.randn(9, 16, generator=rng)
    assert torch.equal(ops.route(logits, spec)[0], truth.route(logits, spec)[0])
    one = replace(spec, group_best=1)
    assert torch.equal(ops.route(logits, one)[0], truth.route(logits, one)[0])
    flat = torch.zeros(1, 16)
    assert torch.equal(ops.route(flat, spec)[0], torch.tensor([[0, 1, 2, 3]], dtype=torch.int32))


@pytest.mark.parametrize("kind", ["BF16", "Q4_0", pytest.param("Q4_K", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, 6])
def test_experts_and_where_they_lie(ops, truth, rng, kind: str, rows: int) -> None:
    """The truth's numbers; few rows and many, moved experts, and one by one have the same bits."""
    count, top, inter, hidden = 4, 2, *((256, 256) if kind == "Q4_K" else (64, 96))
    (up, up_values), (down, down_values) = bank(kind, count, 2 * inter, hidden, rng), bank(kind, count, hidden, inter, rng)
    x = torch.randn(rows, hidden, generator=rng)
    ids, weights = ops.route(torch.randn(rows, count, generator=rng), MoeSpec(experts=count, top_k=top, inter=inter))
    whole = ops.moe(x, ids, weights, up, down, "silu")
    close(whole, truth.moe(x, ids, weights, up_values, down_values, "silu"), EXACT)
    assert torch.equal(ops.moe(x[-1:], ids[-1:], weights[-1:], up, down, "silu"), whole[-1:])
    place = torch.randperm(count, generator=rng).int()
    parts = ops.expert_rows(x.repeat_interleave(top, 0), ids.reshape(-1), moved(up, place), moved(down, place), "silu", place)
    assert torch.equal(ops.moe_merge(parts.view(rows, top, hidden), ids, weights), whole)


def moved(weight, place: torch.Tensor):
    """The bank with expert e at row place[e], and one unused row behind."""
    data = weight.data if isinstance(weight, Quant) else weight
    out = torch.zeros(len(data) + 1, *data.shape[1:], dtype=data.dtype)
    out[place.long()] = data
    return Quant(out, weight.type, weight.cols) if isinstance(weight, Quant) else out


def test_many_rows_of_an_expert_have_the_bits_of_few(ops, rng, monkeypatch) -> None:
    up, down = torch.randn(2, 64, 64, generator=rng).bfloat16(), torch.randn(2, 64, 32, generator=rng).bfloat16()
    x, ids = torch.randn(70, 64, generator=rng), torch.randint(0, 2, (70,), generator=rng).int()
    many = ops.expert_rows(x, ids, up, down, "gelu_tanh")
    monkeypatch.setattr(experts, "MANY", experts.FEW)
    assert torch.equal(ops.expert_rows(x, ids, up, down, "gelu_tanh"), many)


def test_an_expert_without_a_place_is_not_a_number(ops, rng) -> None:
    up, down = torch.randn(2, 64, 64, generator=rng).bfloat16(), torch.randn(2, 64, 32, generator=rng).bfloat16()
    x, ids = torch.randn(3, 64, generator=rng), torch.tensor([0, 1, 2], dtype=torch.int32)
    out = ops.expert_rows(x, ids, up, down, "silu", torch.tensor([1, -1, 2], dtype=torch.int32))
    assert torch.isfinite(out[0]).all() and out[1:].isnan().all()


def test_rows_are_grouped_by_expert_in_their_order(there, rng) -> None:
    ids = torch.randint(0, 6, (1500,), generator=rng).int()
    order, starts = torch.empty(1500, dtype=torch.int32), torch.empty(7, dtype=torch.int32)
    there(experts.group_kernel[(6,)])(order, starts, ids, 1500, EXPERTS=6, CHUNK=experts.CHUNK)
    assert torch.equal(order.long(), torch.sort(ids, stable=True).indices)
    assert torch.equal(starts[1:].long(), torch.bincount(ids, minlength=6).cumsum(0)) and starts[0] == 0


def test_every_block_format_has_a_kernel(ops) -> None:
    assert {"Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "NVFP4_SCALED", "F8_E4M3"} == ops.quant_types
    assert all(found.half >= 16 for found in FORMATS.values())  # the tensor unit's k
