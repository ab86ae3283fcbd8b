"""Placement by groups of layers where page-locked or host memory is too short for all of them: arithmetic."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.budget import Hardware, Impossible, Load
from engine.experts.layers import spans
from engine.experts.placement import place
from engine.experts.split import Rates

GB, GIB = 1e9, 1 << 30
# 48 layers of 128 experts of 9 MiB: 1.125 GiB a layer, 54 in all
A3B = Load(dense=3 * GIB, cache=2 * GIB, layers=48, experts=128, top_k=8, expert_bytes=9 << 20)
RATES = Rates(link=25 * GB, host=55 * GB, shared=32 * GB)
DESKTOP = Hardware(host=90 * GIB, host_rate=60 * GB, fast=22 * GIB, fast_rate=900 * GB, rates=RATES)


def where(load: Load, hardware: Hardware, mode=None) -> dict[str, str]:
    return {group.mode: spans(group.layers) for group in place(load, hardware, mode).groups}


def test_enough_page_locked_memory_places_all_layers_alike() -> None:
    for pin in (None, 54 * GIB, 90 * GIB):
        found = place(A3B, replace(DESKTOP, pin=pin))
        assert where(A3B, replace(DESKTOP, pin=pin)) == {"hybrid": "0-47"} and found.pin_short == 0
        assert found.reason == found.groups[0].reason


def test_a_short_pin_budget_puts_layers_at_both_ends_elsewhere_and_says_how_much_is_short() -> None:
    """45 GiB lock 40 of 48 layers."""
    short = replace(DESKTOP, pin=45 * GIB)
    found = place(A3B, short, "hybrid")
    assert found.mode == "hybrid" and found.pin_short == 9 * GIB
    assert "45.00 GiB of them page-locked, 9.00 GiB short" in found.reason
    assert "beyond the 45.00 GiB that may be page-locked" in found.reason
    middle = next(group for group in found.groups if group.mode == "hybrid")
    assert middle.layers == tuple(range(4, 44))


def test_layers_beyond_the_pin_budget_lie_where_a_token_is_faster() -> None:
    slow_processor = replace(DESKTOP, pin=45 * GIB, rates=Rates(link=25 * GB, host=2 * GB, shared=1 * GB))
    assert where(A3B, slow_processor, "hybrid")["resident"] == "0-3, 44-47"
    slow_link = replace(DESKTOP, pin=45 * GIB, rates=Rates(link=1 * GB, host=55 * GB, shared=32 * GB))
    assert where(A3B, slow_link, "offload")["host"] == "0-3, 44-47", "slots save more misses than whole layers do"


def test_what_host_memory_cannot_hold_is_read_from_the_file_outermost() -> None:
    """18 GiB hold 16 layers; of the others each end has half."""
    short = replace(DESKTOP, host=18 * GIB, pin=9 * GIB, packed=True, disk_rate=2 * GB)
    found = where(A3B, short, "hybrid")
    assert found["stream"] == "0-15, 32-47" and found["hybrid"] == "20-27"
    assert "host memory holds 16 of 48 layers (36.00 GiB short)" in place(A3B, short, "hybrid").reason
    with pytest.raises(Impossible, match="experts need 54.00 GiB, host memory has 18.00 GiB: 36.00 GiB short"):
        place(A3B, replace(short, packed=False), "hybrid")


def test_no_page_locked_memory_at_all_refuses_what_needs_the_link() -> None:
    none = replace(DESKTOP, pin=GIB)
    with pytest.raises(Impossible, match="one layer of experts needs 1.12 GiB page-locked, 1.00 GiB may be"):
        place(A3B, none, "offload")
    assert place(A3B, none).mode == "host" and "offload" in place(A3B, none).refused


def test_everything_can_be_streamed_into_a_fast_memory_of_its_own() -> None:
    found = place(A3B, replace(DESKTOP, host=GIB, packed=True, disk_rate=2 * GB))
    assert found.mode == "stream" and found.slots == (22 - 5) * GIB // (9 << 20)


def test_layers_are_named_shortly() -> None:
    assert spans([0, 1, 2, 45, 47, 46]) == "0-2, 45-47" and spans([3]) == "3" and spans([]) == ""


amounts = st.integers(0, 70).map(lambda n: n * GIB)


@given(host=amounts, pin=amounts, fast=st.integers(5, 40), packed=st.booleans(), link=st.floats(1, 60), cpu=st.floats(1, 60))
def test_every_layer_is_placed_once_within_every_budget(host, pin, fast, packed, link, cpu) -> None:
    hardware = Hardware(
        host, 60 * GB, 0.0, fast * GIB, 900 * GB, False, packed, 2 * GB, Rates(link * GB, cpu * GB, cpu * GB / 2), pin
    )
    for mode in (None, "offload", "hybrid", "host", "stream"):
        try:
            found = place(A3B, hardware, mode)
        except Impossible:
            continue
        layers = sorted(layer for group in found.groups for layer in group.layers)
        assert layers == list(range(A3B.layers))
        count = {group.mode: len(group.layers) for group in found.groups}
        moved = count.get("hybrid", 0) + count.get("offload", 0)
        assert moved * A3B.layer_bytes <= min(host, pin)
        if found.mode != "resident":
            assert (A3B.layers - count.get("stream", 0)) * A3B.layer_bytes <= host
            assert found.slots * A3B.expert_bytes + A3B.dense + A3B.cache <= hardware.fast
        assert packed or "stream" not in count
        for group in found.groups:
            if group.mode == "resident":
                assert group.slots == len(group.layers) * A3B.experts
        more = place(A3B, replace(hardware, pin=pin + 3 * GIB), mode)
        if more.mode == found.mode:
            assert more.pin_short <= found.pin_short
