"""Gated DeltaNet: the truth's numbers; chunk borders and neighbours leave no trace."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.models.spec import DeltaNetSpec
from tests.native import delta_inputs
from tests.native.delta_inputs import SPEC, empty, run
from tests.native.helpers import close, segments

ODD = DeltaNetSpec(key_heads=1, value_heads=3, key_dim=13, value_dim=40, conv_kernel=3)
inputs = partial(delta_inputs.inputs, spread=6.0)  # gates of all sizes


@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("n", [1, 9])
def test_against_the_truth_in_any_chunks(ops, truth, spec, n: int) -> None:
    data, mine, parts, theirs = inputs(spec, n), empty(spec, 3), empty(spec, 3), empty(spec, 3)
    for state in (mine, parts, theirs):
        state.s[2] = torch.randn(state.s.shape[1:], generator=torch.Generator().manual_seed(3)) / 4
        state.conv[2] = 0.5
    whole = run(ops, spec, data, [n], mine, slot=2)
    close(whole, run(truth, spec, data, [n], theirs, slot=2), 2e-5)
    close(mine.s, theirs.s, 2e-5)
    assert torch.equal(mine.conv, theirs.conv)
    cuts = sorted({min(c, n) for c in (1, 2, 5)} | {n})
    assert torch.equal(run(ops, spec, data, cuts, parts, slot=2), whole)
    assert torch.equal(mine.s, parts.s) and torch.equal(mine.conv, parts.conv)


def test_neighbours_do_not_matter(ops) -> None:
    parts = [inputs(SPEC, n, seed=5) for n in (1, 7, 2)]
    alone, together = empty(SPEC, 4), empty(SPEC, 4)
    want = torch.cat([run(ops, SPEC, p, [len(p[0])], alone, slot) for p, slot in zip(parts, (3, 0, 2), strict=True)])
    seg = segments([0, 1, 8, 10], [0, 0, 0], [[0]] * 3, [3, 0, 2])
    qkv, a, b = (torch.cat([p[i] for p in parts]) for i in range(3))
    assert torch.equal(ops.delta_net(qkv, a, b, parts[0][3], together, seg, SPEC), want)
    assert torch.equal(alone.s, together.s) and torch.equal(alone.conv, together.conv)
    assert not together.s[1].any()


def test_a_state_on_the_way_is_that_of_a_pause(ops) -> None:
    first, second = inputs(SPEC, 7, seed=5), inputs(SPEC, 2, seed=6)
    paused, through = empty(SPEC, 3), empty(SPEC, 3)
    middle = run(ops, SPEC, tuple(t[:4] for t in first[:3]) + first[3:], [4], paused)
    seg = replace(segments([0, 7, 9], [0, 0], [[0]] * 2, [0, 1]), kept=torch.tensor([[4, 2], [0, -1]], dtype=torch.int32))
    out = ops.delta_net(*(torch.cat([x, y]) for x, y in zip(first[:3], second[:3], strict=True)), first[3], through, seg, SPEC)
    assert torch.equal(out[:4], middle)
    assert torch.equal(through.s[2], paused.s[0]) and torch.equal(through.conv[2], paused.conv[0])
    rest = run(ops, SPEC, tuple(t[4:] for t in first[:3]) + first[3:], [3], paused)
    assert torch.equal(out[4:7], rest) and torch.equal(through.s[0], paused.s[0])
