"""Routing and routed experts."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import CpuOps
from engine.kernels.ops import Quant
from engine.kernels.reference import dequantize
from engine.models.spec import MoeSpec
from tests.native.helpers import block_bytes, close


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (7, 3), (16, 16)])
def test_route(ops, truth, rng, score, renorm: bool, experts: int, k: int) -> None:
    spec = MoeSpec(experts=experts, top_k=k, inter=1, score=score, renorm=renorm, scale=2.5)
    logits = torch.randn(50, experts, generator=rng)
    (ids, weights), (want_ids, want) = ops.route(logits, spec), truth.route(logits, spec)
    assert ids.dtype == torch.int32 and torch.equal(ids, want_ids)
    close(weights, want, 1e-6)


@pytest.mark.parametrize(("experts", "k", "groups", "top"), [(256, 8, 8, 4), (12, 3, 3, 1), (64, 6, 1, 1), (8, 8, 4, 4)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_groups_and_bias_choose_but_do_not_weigh(ops, truth, rng, score, experts: int, k: int, groups: int, top: int) -> None:
    spec = MoeSpec(experts, k, inter=1, score=score, scale=2.5, bias=True, groups=groups, top_groups=top)
    logits, bias = torch.randn(50, experts, generator=rng), torch.randn(experts, generator=rng)
    (ids, weights), (want_ids, want) = ops.route(logits, spec, bias), truth.route(logits, spec, bias)
    assert torch.equal(ids, want_ids)
    close(weights, want, 1e-6)
    assert all(len(set(row)) <= top for row in (ids // (experts // groups)).tolist())
    if k < experts:
        assert not torch.equal(ids, ops.route(logits, spec)[0]), "the bias decides nothing"


def test_groups_rank_by_their_best_expert_where_the_model_says_so(ops, truth, rng) -> None:
    spec = MoeSpec(64, 4, inter=1, groups=8, top_groups=2, group_best=1)
    logits = torch.randn(50, 64, generator=rng)
    ids, want = ops.route(logits, spec)[0], truth.route(logits, spec)[0]
    assert torch.equal(ids, want) and not torch.equal(ids, ops.route(logits, replace(spec, group_best=2))[0])
    assert torch.equal(ids[:, 0].long(), logits.argmax(1))


def test_negative_scores_and_equal_groups(ops) -> None:
    spec = MoeSpec(8, 2, inter=1, score="sigmoid", bias=True, groups=4, top_groups=2)
    ids, weights = ops.route(torch.zeros(1, 8), spec, torch.full((8,), -3.0))
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.5, 0.5]]
    ids, _ = ops.route(torch.zeros(1, 8), spec, torch.tensor([-9.0, -9.0, -1.0, -9.0, -9.0, -9.0, -2.0, -9.0]))
    assert ids.tolist() == [[2, 6]]


def test_routing_rules_that_cannot_be(ops) -> None:
    logits = torch.zeros(2, 12)
    for wrong in ({"groups": 5}, {"groups": 12}, {"groups": 3, "top_groups": 4}, {"groups": 3, "top_k": 5}, {"top_k": 13}):
        with pytest.raises(ValueError, match="groups|ids"):
            ops.route(logits, MoeSpec(**{"experts": 12, "top_k": 2, "inter": 1, **wrong}))
    with pytest.raises(ValueError, match="bias"):
        ops.route(logits, MoeSpec(12, 2, inter=1), torch.zeros(11))


def test_ties_go_to_the_lower_expert(ops) -> None:
    spec = MoeSpec(experts=20, top_k=3, inter=1)
    ids, weights = ops.route(torch.zeros(2, 20), spec)
    assert ids.tolist() == [[0, 1, 2]] * 2
    close(weights, torch.full((2, 3), 1 / 3), 1e-6)


def test_a_score_that_is_no_number_comes_last_and_weighs_nothing(ops) -> None:
    spec = MoeSpec(experts=4, top_k=4, inter=1, score="sigmoid")
    ids, weights = ops.route(torch.tensor([[0.0, float("nan"), 0.0, 0.0]]), spec)
    assert ids.tolist() == [[0, 2, 3, 1]] and weights[0, 3] == 0
    close(weights[:, :3], torch.full((1, 3), 1 / 3), 1e-6)


def experts_of(kind: str, e: int, inter: int, hidden: int, rng):
    if kind == "bf16":
        up, down = torch.randn(e, 2 * inter, hidden, generator=rng) / 8, torch.randn(e, hidden, inter, generator=rng) / 8
        up, down = up.bfloat16(), down.bfloat16()
        return up, down, up.float(), down.float()
    up, down = block_bytes(kind, e * 2 * inter, hidden), block_bytes(kind, e * hidden, inter, seed=1)
    up_f, down_f = dequantize(up).view(e, 2 * inter, hidden), dequantize(down).view(e, hidden, inter)
    up = Quant(up.data.view(e, 2 * inter, -1), kind, hidden)
    return up, Quant(down.data.view(e, hidden, -1), kind, inter), up_f, down_f


@pytest.mark.parametrize("kind", ["bf16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_moe(ops, truth, rng, kind: str, rows: int, act: str) -> None:
    up, down, up_f, down_f = experts_of(kind, e=12, inter=96, hidden=160, rng=rng)
    x = torch.randn(rows, 160, generator=rng)
    ids, weights = ops.route(torch.randn(rows, 12, generator=rng), MoeSpec(experts=12, top_k=4, inter=96))
    close(ops.moe(x, ids, weights, up, down, act), truth.moe(x, ids, weights, up_f, down_f, act), 5e-5)


def test_odd_sizes(ops, truth, rng) -> None:
    up, down, up_f, down_f = experts_of("bf16", e=3, inter=41, hidden=27, rng=rng)
    x = torch.randn(9, 27, generator=rng)
    ids, weights = ops.route(torch.randn(9, 3, generator=rng), MoeSpec(experts=3, top_k=2, inter=41))
    close(ops.moe(x, ids, weights, up, down, "silu"), truth.moe(x, ids, weights, up_f, down_f, "silu"), 5e-5)


@settings(max_examples=15)
@given(rows=st.integers(1, 150), cuts=st.lists(st.integers(0, 150), max_size=4), seed=st.integers(0, 99))
def test_a_row_is_the_same_in_any_batch(rows: int, cuts: list[int], seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    up, down, _, _ = experts_of("bf16", e=10, inter=64, hidden=96, rng=gen)
    x = torch.randn(rows, 96, generator=gen)
    ids, weights = BEST.route(torch.randn(rows, 10, generator=gen), MoeSpec(experts=10, top_k=3, inter=64))
    whole = BEST.moe(x, ids, weights, up, down, "silu")
    edges = sorted({0, rows, *(min(c, rows) for c in cuts)})
    parts = [BEST.moe(x[a:b], ids[a:b], weights[a:b], up, down, "silu") for a, b in zip(edges, edges[1:], strict=False)]
    assert torch.equal(whole, torch.cat(parts))


BEST = CpuOps(threads=1)


@pytest.mark.parametrize("kind", ["bf16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_where_an_expert_lies_changes_no_bit(ops, rng, kind: str, rows: int) -> None:
    up, down, _, _ = experts_of(kind, e=12, inter=96, hidden=160, rng=rng)
    x = torch.randn(rows, 160, generator=rng)
    ids, weights = ops.route(torch.randn(rows, 12, generator=rng), MoeSpec(experts=12, top_k=4, inter=96))
    place = torch.randperm(12, generator=rng).int()  # expert e moves to place[e]
    moved_up, moved_down = (moved(w, place) for w in (up, down))
    whole = ops.moe(x, ids, weights, up, down, "silu")
    assert torch.equal(ops.moe(x, ids, weights, moved_up, moved_down, "silu", place), whole)
    parts = ops.expert_rows(x.repeat_interleave(4, 0), ids.reshape(-1), moved_up, moved_down, "silu", place)
    assert torch.equal(ops.moe_merge(parts.view(rows, 4, 160), ids, weights), whole)


def moved(weight, place: torch.Tensor):
    """The bank with expert e at row place[e], and one unused row behind."""
    data = weight.data if isinstance(weight, Quant) else weight
    out = torch.zeros(len(data) + 1, *data.shape[1:], dtype=data.dtype)
    out[place.long()] = data
    return Quant(out, weight.type, weight.cols) if isinstance(weight, Quant) else out


@pytest.mark.parametrize("kind", ["bf16", "Q8_0", "Q4_0"])
def test_experts_and_halves_may_lie_apart_as_in_a_mapped_file(ops, rng, kind: str) -> None:
    up, down, _, _ = experts_of(kind, e=5, inter=96, hidden=160, rng=rng)
    x = torch.randn(9, 160, generator=rng)
    ids, weights = ops.route(torch.randn(9, 5, generator=rng), MoeSpec(experts=5, top_k=2, inter=96))
    whole = ops.moe(x, ids, weights, up, down, "silu")
    records = [apart(w, lambda data: spread(data, 64)) for w in (up, down)]  # one behind the other with something between
    assert torch.equal(ops.moe(x, ids, weights, *records, "silu"), whole)
    halves = apart(up, lambda data: spread(data.unflatten(1, (2, -1)).transpose(0, 1), 32).transpose(0, 1))
    assert not (halves.data if isinstance(halves, Quant) else halves).is_contiguous()
    assert torch.equal(ops.moe(x, ids, weights, halves, down, "silu"), whole)
    with pytest.raises(ValueError, match="gate_up: the rows of an expert are not contiguous"):
        ops.moe(x, ids, weights, apart(up, lambda data: torch.stack([data, data], 2)[:, :, 0]), down, "silu")


def spread(data: torch.Tensor, gap: int) -> torch.Tensor:
    """The same with `gap` elements of rubbish behind each of the first dimension."""
    flat = data.reshape(len(data), -1)
    return torch.cat([flat, torch.ones(len(data), gap, dtype=data.dtype)], 1)[:, : flat.shape[1]].view(data.shape)


def apart(weight, change):
    return Quant(change(weight.data), weight.type, weight.cols) if isinstance(weight, Quant) else change(weight)


def test_a_place_outside_the_bank_is_refused(ops, rng) -> None:
    up, down, _, _ = experts_of("bf16", e=3, inter=32, hidden=32, rng=rng)
    x, ids, weights = torch.zeros(1, 32), torch.tensor([[1]], dtype=torch.int32), torch.ones(1, 1)
    for at in (-1, 3):
        with pytest.raises(ValueError, match=f"place: expert 1 lies at {at} of 3"):
            ops.moe(x, ids, weights, up, down, "silu", torch.tensor([0, at, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="ids: 1 is not in 0..0"):
        ops.moe(x, ids, weights, up, down, "silu", torch.tensor([0], dtype=torch.int32))


def test_a_merge_of_mismatched_shapes_is_refused(ops) -> None:
    with pytest.raises(ValueError, match="ids"):
        ops.moe_merge(torch.zeros(2, 3, 8), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2))
