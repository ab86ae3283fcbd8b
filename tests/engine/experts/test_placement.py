"""Which placement, how fast, and why not the others: arithmetic on machines we do not have."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.budget import Hardware, Impossible, Load
from engine.experts.placement import place, would_fit
from engine.experts.split import Rates

GB, GIB = 1e9, 1 << 30
# Qwen3-30B-A3B in bfloat16: 48 layers of 128 experts of 9 MiB, 8 a token
A3B = Load(dense=3 * GIB, cache=2 * GIB, layers=48, experts=128, top_k=8, expert_bytes=9 << 20, cache_read=GIB // 4)
SPARK = Hardware(host=115 * GIB, host_rate=100 * GB, fast=115 * GIB, fast_rate=250 * GB, unified=True)
DESKTOP = Hardware(
    host=90 * GIB, host_rate=60 * GB, fast=22 * GIB, fast_rate=900 * GB, rates=Rates(link=25 * GB, host=55 * GB, shared=32 * GB)
)
LAPTOP = Hardware(host=90 * GIB, host_rate=60 * GB, expert_rate=50 * GB)


def test_unified_memory_copies_nothing() -> None:
    found = place(A3B, SPARK)
    assert found.mode == "in_place" and found.slots == 0
    assert found.decode_seconds == pytest.approx((A3B.read + A3B.routed) / (250 * GB))
    assert "one" in found.refused["offload"]


def test_a_machine_without_a_gpu_computes_on_the_pool() -> None:
    found = place(A3B, LAPTOP)
    assert found.mode == "in_place"
    assert found.decode_seconds == pytest.approx(A3B.read / (60 * GB) + A3B.routed / (50 * GB))
    assert "no fast memory" in found.refused["hybrid"] and "no fast memory" in found.refused["host"]


def test_a_gpu_that_holds_some_experts_splits_the_misses() -> None:
    found = place(A3B, DESKTOP)
    slots = (22 * GIB - 5 * GIB) // (9 << 20)
    assert found.mode == "hybrid" and found.slots == slots
    offload, host = place(A3B, DESKTOP, "offload"), place(A3B, DESKTOP, "host")
    assert found.decode_seconds < min(offload.decode_seconds, host.decode_seconds)
    misses = 8 * (1 - slots / (48 * 128))
    base = (A3B.read + A3B.routed) / (900 * GB)
    assert offload.decode_seconds == pytest.approx(base + 48 * misses * (9 << 20) / (25 * GB))
    assert "misses a layer" in found.reason


def test_where_two_arithmetics_would_meet_all_misses_are_fetched() -> None:
    gpu = replace(DESKTOP, one_arithmetic=False)
    found = place(A3B, gpu)
    assert found.mode == "offload" and "an answer would depend on which experts lay in fast memory" in found.refused["hybrid"]
    for mode in ("hybrid", "host"):
        with pytest.raises(Impossible, match="do not add in the same order"):
            place(A3B, gpu, mode)


def test_what_cannot_be_page_locked_is_not_computed_in_host_memory_then() -> None:
    short = replace(DESKTOP, one_arithmetic=False, pin=45 * GIB)
    found = {group.mode: len(group.layers) for group in place(A3B, short).groups}
    assert found == {"offload": 40, "resident": 8}
    with pytest.raises(Impossible, match=r"18.00 GiB of experts are beyond the 36.00 GiB that may be page-locked"):
        place(A3B, replace(short, pin=36 * GIB), "offload")


def test_fewer_misses_measured_means_faster() -> None:
    assert place(A3B, DESKTOP, miss_rate=0.1).decode_seconds < place(A3B, DESKTOP).decode_seconds


def test_a_gpu_that_holds_everything_keeps_everything() -> None:
    small = Load(dense=GIB, cache=GIB, layers=24, experts=60, top_k=4, expert_bytes=8 << 20)
    assert place(small, DESKTOP).mode == "resident"


@pytest.mark.parametrize(
    ("mode", "hardware", "arithmetic"),
    [
        ("resident", DESKTOP, r"everything need 59.00 GiB, fast memory has 22.00 GiB: 37.00 GiB short"),
        ("in_place", DESKTOP, "memory of its own"),
        ("offload", LAPTOP, "no fast memory"),
        ("host", SPARK, "one memory"),
        ("hybrid", Hardware(host=90 * GIB, host_rate=60 * GB, fast=22 * GIB, fast_rate=900 * GB), "bench bw"),
        ("offload", Hardware(host=40 * GIB, host_rate=60 * GB, fast=22 * GIB, fast_rate=900 * GB), "14.00 GiB short"),
        ("in_place", Hardware(host=32 * GIB, host_rate=60 * GB), r"need 59.00 GiB, memory has 32.00 GiB: 27.00 GiB short"),
        ("stream", LAPTOP, "no packed file: `moorage engine pack` writes one of 54.00 GiB"),
        ("stream", Hardware(host=5 * GIB, host_rate=60 * GB, packed=True), "one layer .* needs 6.12 GiB of 5.00 GiB"),
    ],
)
def test_a_forced_mode_that_cannot_run_is_refused_with_the_arithmetic(mode, hardware, arithmetic) -> None:
    with pytest.raises(Impossible, match=f"^{mode} is impossible here: .*{arithmetic}"):
        place(A3B, hardware, mode)


def test_too_little_of_everything_names_what_would_help() -> None:
    small = Hardware(host=32 * GIB, host_rate=60 * GB)
    with pytest.raises(Impossible, match="no placement fits"):
        place(A3B, small)
    packed = "or the experts packed into a file (`moorage engine pack`, 50% of them in memory at a time)"
    assert would_fit(A3B, small) == f"27.00 GiB more memory, or experts stored in 50% of their present size, {packed}"
    assert would_fit(A3B, LAPTOP) == ""
    tiny = Hardware(host=4 * GIB, host_rate=60 * GB)
    assert would_fit(A3B, tiny) == "55.00 GiB more memory"


@pytest.mark.parametrize("disk_rate", [0.0, 2 * GB])
def test_a_packed_pool_larger_than_memory_is_streamed(disk_rate: float) -> None:
    small = Hardware(host=32 * GIB, host_rate=60 * GB, packed=True, disk_rate=disk_rate)
    found = place(A3B, small)
    assert found.mode == "stream" and found.slots * A3B.expert_bytes <= 27 * GIB
    assert "read from the packed file when needed" in found.reason and ("not measured" in found.reason) == (not disk_rate)
    assert place(A3B, Hardware(host=90 * GIB, host_rate=60 * GB, packed=True, disk_rate=disk_rate)).mode == "in_place"


def test_reading_and_computing_go_on_at_once() -> None:
    """A token of a packed model takes what its dense weights take, and the longer of computing experts and reading the missed."""
    wide = place(A3B, Hardware(host=32 * GIB, host_rate=60 * GB, expert_rate=30 * GB, packed=True, disk_rate=1 << 50))
    assert wide.decode_seconds == pytest.approx(A3B.read / (60 * GB) + A3B.routed / (30 * GB))
    narrow = place(A3B, Hardware(host=32 * GIB, host_rate=60 * GB, expert_rate=30 * GB, packed=True, disk_rate=2 * GB))
    misses = 1 - narrow.slots / (A3B.layers * A3B.experts)
    assert narrow.decode_seconds == pytest.approx(A3B.read / (60 * GB) + misses * A3B.routed / (2 * GB))


sizes = st.integers(1, 200).map(lambda n: n * GIB)


@given(host=sizes, fast=st.integers(0, 200).map(lambda n: n * GIB), unified=st.booleans(), dense=sizes, cache=sizes)
def test_what_is_chosen_fits_and_is_the_fastest(host: int, fast: int, unified: bool, dense: int, cache: int) -> None:
    load = Load(dense, cache, 48, 128, 8, 9 << 20)
    hardware = Hardware(host, 60 * GB, 0.0, fast, 900 * GB, unified and fast > 0, True, 1 * GB, Rates(25 * GB, 55 * GB, 30 * GB))
    try:
        found = place(load, hardware)
    except Impossible:
        return
    total = host if unified or not fast else host + fast
    streamed = min(load.pool, found.slots * load.expert_bytes) if found.mode == "stream" else load.pool
    assert dense + cache + streamed <= total
    for mode in found.refused:
        try:
            assert place(load, hardware, mode).decode_seconds >= found.decode_seconds
        except Impossible as problem:
            assert str(problem).startswith(f"{mode} is impossible")
