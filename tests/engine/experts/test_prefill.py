"""Whole layers ahead or experts on demand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.prefill import Prefill, expected_distinct
from engine.experts.rates import Watched
from engine.experts.split import Rates
from engine.kernels.reference import ReferenceOps
from tests.engine.experts.tiers import EXPERTS, LAYERS, banks, step, tiered


def test_expected_distinct_is_what_an_even_router_touches() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 3, 10, 40):
        touched = [
            torch.stack([torch.randperm(32, generator=generator)[:4] for _ in range(rows)]).unique().numel() for _ in range(300)
        ]
        assert abs(expected_distinct(rows, 32, 4) - sum(touched) / 300) < 0.5


@given(rows=st.integers(1, 4096), experts=st.integers(8, 256), absent=st.integers(0, 256), seconds=st.floats(1e-5, 1e-2))
def test_ahead_exactly_when_it_is_expected_to_be_faster(rows: int, experts: int, absent: int, seconds: float) -> None:
    prefill, own = Prefill(), 4e-3
    assert not prefill.copy_ahead(rows, absent, experts, 8, seconds), "nothing is decided before a layer was timed"
    prefill.observe(rows, own)
    on_demand = own + max(1.0, absent * expected_distinct(rows, experts, 8) / experts) * seconds
    assert prefill.copy_ahead(rows, absent, experts, 8, seconds) == (absent > 0 and max(own, absent * seconds) < on_demand)


def test_a_tool_result_is_fetched_on_demand_and_a_chunk_streams() -> None:
    """Shape of a 128-expert model: 20 ms a layer for a chunk of 512, 1 ms for 20 rows, 0.4 ms to copy an expert."""
    prefill = Prefill()
    for rows, seconds in ((1, 0.3e-3), (20, 1e-3), (64, 3e-3), (512, 20e-3)):
        prefill.observe(rows, seconds)
    assert [prefill.copy_ahead(rows, 128, 128, 8, 0.4e-3) for rows in (1, 20, 64, 512)] == [False, False, True, True]
    assert prefill.crossing(128, 8, 0.4e-3) == 64


def test_a_link_that_hardly_idles_needs_no_copying_ahead() -> None:
    """On demand the experts are computed while others come: what is left to hide is the time in which none comes."""
    prefill = Prefill()
    prefill.observe(20, 4e-3)
    assert prefill.idle_seconds(20) == 4e-3 and prefill.copy_ahead(20, 64, 64, 8, 0.1e-3)
    for _ in range(60):
        prefill.observe_idle(20, 0.2e-3)
    assert prefill.idle_seconds(20) < 0.21e-3 and not prefill.copy_ahead(20, 64, 64, 8, 0.1e-3)


def test_times_are_averaged_by_size() -> None:
    prefill = Prefill()
    for _ in range(40):
        prefill.observe(100, 2e-3)
    prefill.observe(100, 12e-3)
    assert 2e-3 < prefill.layer_seconds(70) < 6e-3 and prefill.layer_seconds(300) is None


def test_the_executor_copies_the_next_layer_while_it_computes_this_one() -> None:
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(0)
    pool = banks(ops, "f32")
    with tiered(pool, ops, 2 * EXPERTS, rates=Rates(link=1e12, host=1e9, shared=1e9)) as experts:
        experts._prefill.observe(40, 1.0)  # so slow that any copy hides behind it
        for layer in range(LAYERS):
            x, ids, weights = step(generator, 40)
            want = ops.moe(x, ids, weights, pool[layer].gate_up, pool[layer].down, "silu")
            assert torch.equal(experts.run(layer, x, ids, weights), want)
            experts.slots.check()
        assert experts.counts["layers_ahead"] == LAYERS - 1 and experts.counts["ahead"] == (LAYERS - 1) * EXPERTS
        assert experts.status()["whole_layers_from_rows"] == 32


def test_one_layer_of_slots_is_too_few_to_copy_ahead() -> None:
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(0)
    with tiered(banks(ops, "f32"), ops, EXPERTS + 2, rates=Rates(link=1e12, host=1e9, shared=1e9)) as experts:
        experts._prefill.observe(40, 1.0)
        for layer in range(LAYERS):
            experts.run(layer, *step(generator, 40))
        assert experts.counts["layers_ahead"] == 0


def test_a_step_that_breaks_leaves_nothing_on_its_way() -> None:
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(0)
    with tiered(banks(ops, "f32"), ops, 2 * EXPERTS, link_rate=1e6) as experts:
        experts._prefill.observe(40, 1e3)
        ops.moe = lambda *a: 1 / 0
        for _ in range(2):
            try:
                experts.run(0, *step(generator, 40))
            except ZeroDivisionError:
                pass
            else:
                raise AssertionError("the failure was swallowed")
            assert not experts.coming and experts.slots.room() == 2 * EXPERTS


def test_rates_follow_slowly_and_only_from_what_was_overlapped() -> None:
    rates = Watched(Rates(link=10.0, host=20.0, shared=12.0))
    for _ in range(200):
        rates.observe(host_bytes=60, host_s=10.0, link_bytes=50, link_s=10.0, overlapped=True)
    assert abs(rates.now.shared - 6.0) < 0.2 and abs(rates.now.link - 5.0) < 0.2 and rates.now.host == 20.0
    rates.observe(host_bytes=600, host_s=10.0, link_bytes=5, link_s=1.0, overlapped=True)
    assert abs(rates.now.shared - 6.0) < 0.2, "mostly alone: not a shared rate"
    rates.observe(host_bytes=400, host_s=10.0, link_bytes=0, link_s=0.0, overlapped=False)
    assert 20.0 < rates.now.host < 21.0 and rates.calibrated.host == 20.0
