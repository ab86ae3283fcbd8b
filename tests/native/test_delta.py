"""Gated DeltaNet: the truth's numbers; chunk borders, neighbours and threads leave no trace."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import CpuOps
from engine.kernels.reference import ReferenceOps
from engine.models.spec import DeltaNetSpec
from tests.native.delta_inputs import SPEC, empty, inputs, run
from tests.native.helpers import close, segments

ODD = DeltaNetSpec(key_heads=1, value_heads=3, key_dim=13, value_dim=70, conv_kernel=3)
REAL = DeltaNetSpec(key_heads=2, value_heads=4, key_dim=128, value_dim=128, conv_kernel=4)


@pytest.mark.parametrize("spec", [SPEC, ODD, REAL], ids=["small", "odd", "real"])
@pytest.mark.parametrize("n", [1, 2, 60])
def test_against_the_truth(ops, truth, spec, n: int) -> None:
    data, mine, theirs = inputs(spec, n), empty(spec, 3), empty(spec, 3)
    for state in (mine, theirs):
        state.s[2] = torch.randn(state.s.shape[1:], generator=torch.Generator().manual_seed(3)) / 4
        state.conv[2] = 0.5
    close(run(ops, spec, data, [n], mine, slot=2), run(truth, spec, data, [n], theirs, slot=2), 2e-5)
    close(mine.s, theirs.s, 2e-5)
    assert torch.equal(mine.conv, theirs.conv)


@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["small", "odd"])
def test_keys_near_zero_and_gates_far_from_it(ops, truth, spec) -> None:
    qkv, a, b, weights = inputs(spec, 7)
    data = (qkv * 1e-3, a + 40, b, weights | {"a_log": weights["a_log"] - 6})  # epsilon counts; softplus is its argument
    mine, theirs = empty(spec, 1), empty(spec, 1)
    for state in (mine, theirs):
        state.s[0] = torch.randn(state.s.shape[1:], generator=torch.Generator().manual_seed(3)) / 4
    close(run(ops, spec, data, [7], mine), run(truth, spec, data, [7], theirs), 2e-5)
    close(mine.s, theirs.s, 2e-5)


@settings(max_examples=20)
@given(n=st.integers(1, 90), cuts=st.lists(st.integers(1, 89), max_size=6), spec=st.sampled_from([SPEC, ODD]))
def test_any_chunking_gives_the_same_bits(n: int, cuts: list[int], spec) -> None:
    data, one, many = inputs(spec, n), empty(spec, 1), empty(spec, 1)
    cuts = sorted({min(c, n) for c in cuts} | {n})
    assert torch.equal(run(BEST, spec, data, [n], one), run(BEST, spec, data, cuts, many))
    assert torch.equal(one.s, many.s) and torch.equal(one.conv, many.conv)


def test_neighbours_do_not_matter(ops) -> None:
    parts = [inputs(SPEC, n, seed=5) for n in (1, 40, 2)]
    alone, together = empty(SPEC, 4), empty(SPEC, 4)
    want = torch.cat([run(ops, SPEC, p, [len(p[0])], alone, slot) for p, slot in zip(parts, (3, 0, 2), strict=True)])
    seg = segments([0, 1, 41, 43], [0, 0, 0], [[0]] * 3, [3, 0, 2])
    qkv, a, b = (torch.cat([p[i] for p in parts]) for i in range(3))
    assert torch.equal(ops.delta_net(qkv, a, b, parts[0][3], together, seg, SPEC), want)
    assert torch.equal(alone.s, together.s) and torch.equal(alone.conv, together.conv)
    assert not together.s[1].any()


BEST = CpuOps(threads=1)


@settings(max_examples=20)
@given(n=st.integers(1, 90), at=st.integers(0, 89), spec=st.sampled_from([SPEC, ODD]))
def test_a_state_on_the_way_is_that_of_a_pause(n: int, at: int, spec) -> None:
    at = min(at, n - 1)
    (qkv, a, b, weights), paused, through = inputs(spec, n), empty(spec, 3), empty(spec, 3)
    for state in (paused, through):
        state.s[1] = torch.randn(state.s.shape[1:], generator=torch.Generator().manual_seed(3)) / 4
        state.conv[1] = 0.5
    if at:
        run(BEST, spec, (qkv[:at], a[:at], b[:at], weights), [at], paused, slot=1)
    middle = [t[1].clone() for t in (paused.conv, paused.s)]
    rest = run(BEST, spec, (qkv[at:], a[at:], b[at:], weights), [n - at], paused, slot=1)
    for ops in (BEST, ReferenceOps()):
        seg = replace(segments([0, n], [0], [[0]], [1]), kept=torch.tensor([[at, 2]], dtype=torch.int32))
        out = ops.delta_net(qkv, a, b, weights, through, seg, spec)
        if ops is BEST:
            assert torch.equal(out[at:], rest)
            assert torch.equal(through.conv[2], middle[0]) and torch.equal(through.s[2], middle[1])
            assert torch.equal(through.conv[1], paused.conv[1]) and torch.equal(through.s[1], paused.s[1])
            through = empty(spec, 3)
            through.s[1] = torch.randn(through.s.shape[1:], generator=torch.Generator().manual_seed(3)) / 4
            through.conv[1] = 0.5
        else:
            close(through.s[2], middle[1], 2e-5)
            assert torch.equal(through.conv[2], middle[0])


@pytest.mark.parametrize("kept", [[[4, 1]], [[-1, 1]], [[0, 3]], [[0, -2]]])
def test_a_state_that_cannot_be_kept_is_refused(kept: list) -> None:
    qkv, a, b, weights = inputs(SPEC, 4)
    seg = replace(segments([0, 4], [0], [[0]], [0]), kept=torch.tensor(kept, dtype=torch.int32))
    with pytest.raises(ValueError, match="kept"):
        BEST.delta_net(qkv, a, b, weights, empty(SPEC, 3), seg, SPEC)
