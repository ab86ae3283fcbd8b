"""The policy simulator drives the engine's own cache: on traces small enough to know the answer by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench.prefix_rivals import snapshots
from ops.bench.prefix_sim import run
from ops.bench.prefix_traffic import GIB, SHAPES, interleave, sessions


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Three sessions of twelve turns, two new blocks each, over ten blocks of tools and system; one sub-agent in each."""
    for n in range(3):
        turns = [{"t": 10.0 * i, "type": "n", "in": 64 * (12 + 2 * i), "hash_ids": list(range(1, 13 + 2 * i))} for i in range(12)]
        agent = {
            "t": 35.0,
            "type": "subagent",
            "agent_id": "a1",
            "tool_tokens": 64,
            "system_tokens": 64,
            "requests": [{"t": 1.0, "type": "n", "in": 320, "hash_ids": [900, 901, 902, 903, 904]}],
        }
        trace = {"id": f"t{n}", "tool_tokens": 512, "system_tokens": 128, "requests": [*turns, agent]}
        (tmp_path / f"t{n}.json").write_text(json.dumps(trace))
    return tmp_path


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("users", [1, 3])
def test_with_room_only_new_tokens_are_prefilled_and_written_once(traces: Path, kind: str, users: int) -> None:
    requests = interleave(sessions(traces), users)
    assert len(requests) == 39
    result = run(requests, users, SHAPES[kind], ram_gib=4, disk_gib=64)
    new = 3 * (12 + 11 * 2 + 5) * 64
    assert abs(result.ideal_mtok * 1e6 - new) <= 12 * 39  # hybrids stop before the generation prompt
    assert result.prefill_ratio == pytest.approx(1.0, abs=0.12) and result.thrash == 0
    assert result.written_ratio <= 1.3


@pytest.mark.timeout(60)
def test_turns_of_more_records_than_the_writer_queues_end(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is done at once is never behind: a replay waited for ever for a queue that nothing emptied."""
    monkeypatch.setattr("engine.prefix.disk.RECORD_BYTES", 1)
    monkeypatch.setattr("engine.prefix.disk.MAX_JOBS", 3)
    result = run(interleave(sessions(traces), 1), 1, SHAPES["attention"], ram_gib=4, disk_gib=64)
    assert result.written_ratio == pytest.approx(1.0, abs=0.12)


def test_without_room_the_alarm_fires_and_the_loss_is_named(traces: Path) -> None:
    requests = interleave(sessions(traces), 3)
    shape = SHAPES["attention"]
    result = run(requests, 3, shape, ram_gib=40 * 64 * shape.row_bytes / GIB, disk_gib=0)
    assert result.thrash >= 1 and result.lost_by_reason["ram-full"] > 0


def test_snapshots_write_whole_prompts_again_and_again(traces: Path) -> None:
    requests = interleave(sessions(traces), 1)
    assert snapshots(requests, 1, SHAPES["attention"], disk_gib=64).written_ratio > 5


def test_a_folder_without_traces_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no traces in"):
        sessions(tmp_path)
