"""The alarm: silent while work is new, loud when a whole cache full of work repeats what was evicted."""

from __future__ import annotations

import logging

import pytest

from engine.prefix.thrash import REQUESTS, SILENCE_S, TURNOVERS, WINDOW_S, ThrashAlarm
from engine.protocol import parse_log_line
from tests.engine.prefix.fakes import Sequence_, make

CAPACITY = 20_000
TURN = CAPACITY // 20  # tokens a turn of a storm prefills: ten of them are half a cache full
STORM = {"prefilled": TURN, "lost": TURN * 9 // 10, "reason": "ram-full"}


def fires(alarm: ThrashAlarm, times: int, *, start: float = 0.0, pace: float = 5.0, **request: object) -> list[int]:
    """Indices of the requests, one every `pace` seconds, at which it fired."""
    said = {"session": "s", "prefilled": TURN, "lost": 0, "reason": "", "capacity": CAPACITY, **request}
    return [n for n in range(times) if alarm.request(start + pace * n, unread=n, **said) is not None]


def test_it_fires_when_one_cache_full_was_repeated_and_again_after_a_silence() -> None:
    turns = -(-CAPACITY // STORM["lost"])
    per_silence = int(SILENCE_S / 5)
    assert fires(ThrashAlarm(), 3 * per_silence, **STORM) == [turns - 1 + per_silence * n for n in range(3)]


@pytest.mark.parametrize("scale", [0.01, 1000])
def test_the_rule_is_the_same_for_caches_of_all_sizes(scale: float) -> None:
    sizes = {"prefilled": int(TURN * scale), "lost": int(TURN * 0.9 * scale), "capacity": int(CAPACITY * scale)}
    assert len(fires(ThrashAlarm(), 100, **{**STORM, **sizes})) == 1


def test_a_slow_machine_is_told_as_well() -> None:
    assert fires(ThrashAlarm(), 60, pace=WINDOW_S / 30, **STORM) != []


def test_it_says_what_would_have_been_enough() -> None:
    alarm, seen = ThrashAlarm(), None
    for n in range(100):
        storm = {**STORM, "lost": TURN - n % 2}
        seen = seen or alarm.request(5.0 * n, "ab"[n % 2], **storm, unread=2 * n, capacity=CAPACITY)
    assert seen is not None and seen.sessions == 2 and seen.missing_tokens == TURN + TURN - 1
    assert seen.evicted_unread == 2 * (CAPACITY // TURN)


@pytest.mark.parametrize(
    "calm",
    [
        {"lost": 0},
        {"lost": TURN, "reason": "no-checkpoint"},  # an edit: more room would not help
        {"lost": TURN, "reason": "token-mismatch"},
        {"lost": TURN // 2 - 1, "reason": "ram-full"},  # less than half of the work
    ],
)
def test_new_work_edits_and_small_losses_are_no_storm(calm: dict) -> None:
    assert fires(ThrashAlarm(), 500, **calm) == []


def test_a_short_squeeze_by_an_oversized_prompt_is_no_storm() -> None:
    """One conversation outgrows the cache and pushes a neighbour out for a few turns; both repeat 60 % of a cache full."""
    alarm = ThrashAlarm()
    assert fires(alarm, 1, prefilled=CAPACITY * 3 // 4) == []
    assert fires(alarm, 12, start=10.0, **STORM) == []
    assert fires(alarm, 100, start=100.0) == []


def test_one_resumed_conversation_is_no_storm() -> None:
    alarm = ThrashAlarm()
    most = {"prefilled": CAPACITY, "lost": CAPACITY - 1, "reason": "ram-full"}
    assert fires(alarm, REQUESTS - 1, **most) == [] and fires(alarm, 100, start=60.0, prefilled=TURN // 10) == []


def test_losses_far_apart_are_no_storm() -> None:
    assert fires(ThrashAlarm(), 200, pace=WINDOW_S / (CAPACITY // TURN // TURNOVERS), **STORM) == []


def test_a_clock_that_jumps_back_neither_brings_old_requests_back_nor_silences() -> None:
    alarm = ThrashAlarm()
    assert len(fires(alarm, 30, start=1e6, **STORM)) == 1
    assert len(fires(alarm, 5, start=0.0, **STORM)) == 0
    assert len(fires(alarm, 30, start=30.0, **STORM)) == 1


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
def test_conversations_that_do_not_fit_together_raise_it(hybrid: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cache = make(pages=20, hybrid=hybrid, states=100)
    talks = {name: list(range(base, base + 60)) for name, base in (("a", 1000), ("b", 2000), ("c", 3000))}
    for n in range(6):
        for name, tokens in talks.items():
            talks[name] = Sequence_(cache, [*tokens, n + 1], session=name).run().close().tokens
    lines = [parse_log_line(r.getMessage()) for r in caplog.records]
    storms = [fields for event, fields in lines if event == "kv cache thrash"]
    assert len(storms) == 1 and int(storms[0]["evicted_unread"]) > 0 and "--kv-memory" in storms[0]["hint"]
    assert int(storms[0]["need_mb"]) >= int(storms[0]["budget_mb"]) and int(storms[0]["sessions"]) > 1
    assert cache.counters["thrash"] == 1


def test_conversations_that_fit_raise_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cache = make(pages=60)
    talks = {name: list(range(base, base + 60)) for name, base in (("a", 1000), ("b", 2000), ("c", 3000))}
    for n in range(12):
        for name, tokens in talks.items():
            talks[name] = Sequence_(cache, [*tokens, n + 1], session=name).run().close().tokens
    assert cache.counters["thrash"] == 0
