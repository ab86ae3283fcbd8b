import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.experts.split import Rates, best_split, fill_seconds, host_seconds, miss_seconds

GB = 1e9
rate = st.floats(0.1 * GB, 200 * GB)


def brute_force(misses: int, rates: Rates, room: int) -> float:
    return min(miss_seconds(misses, q, 1 << 20, rates) for q in range(1, room + 1))


@given(misses=st.integers(1, 300), link=rate, host=rate, loss=st.floats(0, 1), room=st.integers(1, 300))
@example(misses=8, link=25 * GB, host=25 * GB, loss=1.0, room=8)
def test_no_other_split_is_faster(misses: int, link: float, host: float, loss: float, room: int) -> None:
    rates, room = Rates(link, host, host * (1 - loss)), min(room, misses)
    q = best_split(misses, rates, room)
    assert 1 <= q <= room
    assert miss_seconds(misses, q, 1 << 20, rates) <= brute_force(misses, rates, room) * (1 + 1e-9)


@pytest.mark.parametrize("misses", [1, 2, 3, 7, 8, 30, 128])
@pytest.mark.parametrize("link", [1, 3, 6, 12, 25, 50, 64])
@pytest.mark.parametrize("host", [2, 10, 22, 80, 200])
def test_within_one_expert_of_the_design_rule_where_both_branches_share_one_memory(misses: int, link: int, host: int) -> None:
    """q = round(m * B_P / B_H), at least 1, at most m."""
    q = best_split(misses, Rates.of_one_memory(link * GB, host * GB))
    assert abs(q - min(misses, max(1, round(misses * link / host)))) <= 1


@given(misses=st.integers(0, 50), link=rate, host=rate, room=st.integers(0, 50))
def test_a_layer_with_misses_fetches_at_least_one_if_there_is_room(misses: int, link: float, host: float, room: int) -> None:
    q = best_split(misses, Rates.of_one_memory(link, host), room)
    assert (q >= 1) == (misses > 0 and room > 0)


def test_a_fast_link_takes_everything_and_a_useless_overlap_nothing_more_than_it_must() -> None:
    assert best_split(8, Rates(100 * GB, 10 * GB, 0.0)) == 8
    assert best_split(8, Rates(1 * GB, 20 * GB, 2 * GB)) == 1


def test_the_processor_speeds_up_when_the_link_falls_silent() -> None:
    rates = Rates(link=1.0, host=4.0, shared=2.0)
    assert fill_seconds(2, 1, rates) == 2.0
    assert host_seconds(6, 2, 1, rates) == 2.0  # 4 experts at the shared rate
    assert host_seconds(10, 2, 1, rates) == 3.0  # 4 at the shared rate, the other 4 alone
    assert miss_seconds(10, 10, 1, rates) == 10.0


@pytest.mark.parametrize("rates", [(0, 1, 1), (1, 0, 1), (1, 1, -1), (float("inf"), 1, 1), (1, float("nan"), 1)])
def test_impossible_rates_are_refused(rates: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="rates must be positive"):
        Rates(*rates)
