"""Traces, their file, their locality, and what replaying them says about policies."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.policies import POLICIES
from engine.experts.replay import belady, capacities, replay
from engine.experts.split import Rates
from engine.experts.trace import Recorder, Trace, TraceError, load_trace, measure_locality, synthesize


def trace_of(calls: list[tuple[int, list[list[int]]]], layers: int, experts: int) -> Trace:
    recorder = Recorder(layers, experts)
    for layer, ids in calls:
        recorder.add(layer, torch.tensor(ids, dtype=torch.int32))
    return recorder.trace()


def test_recorded_calls_come_back_from_the_file(tmp_path) -> None:
    trace = trace_of([(0, [[1, 2], [2, 3]]), (1, [[0, 3]]), (0, [[0, 1]]), (1, [[2, 1]])], layers=2, experts=4)
    (tmp_path / "t.npz").write_bytes(trace.to_bytes())
    back = load_trace(tmp_path / "t.npz")
    assert list(back.calls()) == [[1, 2, 3], [4, 7], [0, 1], [5, 6]]
    assert back.tokens == 3 and back.keys == 8 and back.step.tolist() == [0, 0, 1, 1]
    assert list(back.decode_only(1).calls()) == [[0, 1], [5, 6]], "the step of two rows is gone, its last layer too"


def test_recording_begins_with_a_whole_step_and_ends_when_full() -> None:
    recorder = Recorder(2, 4, limit=3 * 2 * 2 * 2)  # three tokens of two layers of two experts of two bytes
    recorder.add(1, torch.tensor([[0, 1]], dtype=torch.int32))
    for _ in range(5):
        for layer in (0, 1):
            recorder.add(layer, torch.tensor([[0, 1]], dtype=torch.int32))
    assert recorder.full and recorder.tokens == 3
    assert recorder.trace().layer.tolist() == [0, 1] * 3


def test_nothing_recorded_is_still_a_file(tmp_path) -> None:
    (tmp_path / "t.npz").write_bytes(Recorder(2, 4).trace().to_bytes())
    assert load_trace(tmp_path / "t.npz").tokens == 0


BROKEN = {
    "ids": lambda t: {"ids": t.ids.astype(float)},
    "negative ids": lambda t: {"ids": t.ids.astype(np.int64) - 1},
    "flat ids": lambda t: {"ids": t.ids.ravel()},
    "steps far apart": lambda t: {"step": t.step * (1 << 20)},
    "steps out of order": lambda t: {"step": t.step[::-1].copy()},
    "rows less than none": lambda t: {"rows": np.array([-1, 3, *t.rows[2:]], np.int32)},
    "one step": lambda t: {"step": np.array(0)},
    "endless layers": lambda t: {"shape": np.array([1 << 40, 8, 2])},
    "no experts": lambda t: {"shape": np.array([2, 0, 2])},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_trace_with_one_broken_part_is_refused_in_one_line(tmp_path, what: str) -> None:
    path, good = tmp_path / "t.npz", synthesize(2, 8, 2, 5, zipf=1, stick=0)
    parts = {name: getattr(good, name) for name in ("step", "layer", "rows", "ids")}
    np.savez(path, **{**parts, "shape": np.array([2, 8, 2]), **BROKEN[what](good)})
    with pytest.raises(TraceError, match=r"is a damaged routing trace.*record it again$"):
        load_trace(path)


@pytest.mark.parametrize("what", ["missing", "text", "torn", "other arrays", "ids out of range", "rows do not add up"])
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path, what: str) -> None:
    path, good = tmp_path / "t.npz", synthesize(2, 8, 2, 5, zipf=1, stick=0)
    match what:
        case "text":
            path.write_text("hello")
        case "torn":
            path.write_bytes(good.to_bytes()[:-40])
        case "other arrays":
            np.savez(path, a=np.zeros(3))
        case "ids out of range":
            path.write_bytes(Trace(2, 4, good.step, good.layer, good.rows, good.ids + 4).to_bytes())
        case "rows do not add up":
            path.write_bytes(Trace(2, 8, good.step, good.layer, good.rows + 1, good.ids).to_bytes())
    with pytest.raises(TraceError) as refused:
        load_trace(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("stick", [0.0, 0.4, 0.8])
def test_made_to_order_locality_is_the_measured_one(stick: float) -> None:
    even = measure_locality(synthesize(3, 32, 4, 400, zipf=0.0, stick=stick))
    assert even.repeat == pytest.approx(stick + (1 - stick) * 4 / 32, abs=0.06), "kept ones, and chance repeats"
    assert even.drift < 0.1 or stick, "what sticks drifts"


def test_skew_and_topics_show() -> None:
    skews = [measure_locality(synthesize(2, 32, 4, 400, zipf=z, stick=0)).skew for z in (0.0, 0.7, 1.4)]
    assert skews[0] < 0.16 < skews[1] < skews[2]
    moving = measure_locality(synthesize(2, 32, 4, 400, zipf=1.2, stick=0, topic=200))
    assert moving.drift > 0.2 > measure_locality(synthesize(2, 32, 4, 400, zipf=1.2, stick=0)).drift


def test_locality_needs_single_token_steps() -> None:
    with pytest.raises(TraceError, match="single token"):
        measure_locality(trace_of([(0, [[1, 2], [2, 3]])], 1, 4))


@settings(max_examples=30)
@given(keys=st.lists(st.integers(0, 4), min_size=1, max_size=9), capacity=st.integers(1, 3))
def test_belady_is_the_optimum_over_all_choices(keys: list[int], capacity: int) -> None:
    """Against every way to evict or bypass, in a trace of single uses."""
    trace = trace_of([(0, [[key]]) for key in keys], 1, 5)
    states = {frozenset(): 0}  # what is held -> fewest misses so far
    for key in keys:
        after: dict[frozenset, int] = {}
        for held, misses in states.items():
            options = (
                [held] if key in held else [held, *(frozenset(c) | {key} for c in itertools.combinations(held, capacity - 1))]
            )
            if key not in held and len(held) < capacity:
                options.append(held | {key})
            for option in options:
                after[option] = min(after.get(option, 99), misses + (key not in held))
        states = after
    assert belady(trace, capacity).misses == min(states.values())


@pytest.mark.parametrize(("zipf", "stick", "topic"), [(0.6, 0.3, 0), (1.0, 0.0, 0), (0.3, 0.5, 0), (1.0, 0.3, 60)])
def test_the_rate_policy_beats_lru_and_nothing_beats_belady(zipf: float, stick: float, topic: int) -> None:
    trace = synthesize(6, 32, 4, 120, zipf=zipf, stick=stick, topic=topic)
    total = dict.fromkeys(POLICIES, 0.0)
    for capacity in capacities(trace, 5):
        bound = belady(trace, capacity).miss_rate
        for policy in POLICIES:
            rate = replay(trace, policy, capacity).miss_rate
            assert rate >= bound
            total[policy] += rate
    assert total["rate"] < 0.95 * total["lru"], total


def test_with_every_expert_resident_only_first_uses_miss() -> None:
    trace = synthesize(2, 16, 2, 60, zipf=1.0, stick=0.2)
    used = len({key for keys in trace.calls() for key in keys})
    for policy in POLICIES:
        assert replay(trace, policy, trace.keys).misses == used == belady(trace, trace.keys).misses


def test_fetching_only_the_split_fetches_less_and_takes_less_time() -> None:
    trace = synthesize(4, 32, 4, 100, zipf=0.8, stick=0.3)
    slow_link = Rates(link=2e9, host=20e9, shared=17e9)
    all_of_them = replay(trace, "lru", 40)
    split = replay(trace, "lru", 40, slow_link, expert_bytes=4 << 20)
    assert split.fetched < all_of_them.fetched
    assert 0 < split.seconds < all_of_them.fetched / 100 * (4 << 20) / slow_link.link


DEMO = (
    Path(__file__).parents[2] / "data" / "demo_routing.npz"
)  # single-token steps of the demo model, `moorage engine experts trace`


def test_on_the_demo_models_own_routing_the_rate_policy_is_best() -> None:
    trace = load_trace(DEMO)
    assert measure_locality(trace).repeat > 0.25, "far above the 12.5 % of chance"
    for capacity in (24, 44, 79, 142):
        rates = {policy: replay(trace, policy, capacity).miss_rate for policy in POLICIES}
        assert min(rates, key=rates.__getitem__) == "rate" and rates["rate"] < 0.9 * rates["lru"], (capacity, rates)
        assert belady(trace, capacity).miss_rate < rates["rate"]
