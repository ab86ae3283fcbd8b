"""The disk tier: what a restart brings back, and what every kind of damage costs (time, never an answer)."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ipc import Anchor
from engine.prefix import store
from engine.prefix.files import Busy, identity
from engine.protocol import parse_log_line
from tests.engine.prefix.fakes import Sequence_, audit, failing, kill, make, written

BOTH = pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
TALK = list(range(1, 63))


def talk(cache, tokens=TALK, session="s") -> list[int]:
    """One turn: a prompt and an answer of three tokens; what was computed."""
    sequence = Sequence_(cache, tokens, session=session).run().decode([501, 502, 503]).close()
    written(cache)
    audit(cache)
    return sequence.tokens


def resumed(cache, tokens, session="s"):
    match = Sequence_(cache, [*tokens, 999], session=session).run().close().lease.match
    written(cache)
    audit(cache)
    return match


@BOTH
@pytest.mark.parametrize("clean", [True, False], ids=["sigterm", "kill"])
def test_the_next_turn_after_a_restart_comes_from_disk(tmp_path: Path, hybrid: bool, clean: bool) -> None:
    cache = make(hybrid=hybrid, root=tmp_path)
    tokens = talk(cache)
    tokens = talk(cache, [*tokens, 7, 8, 9])
    cache.shutdown() if clean else kill(cache)
    fresh = make(hybrid=hybrid, root=tmp_path)
    match = resumed(fresh, tokens)
    assert (match.common, match.source, match.lost, match.reason) == (len(tokens), "disk", 0, "")
    assert match.restore_ms > 0
    match = resumed(fresh, [*tokens, 999])
    assert match.source == "ram"  # read once, in memory since


@BOTH
def test_what_memory_evicted_comes_back_from_disk(tmp_path: Path, hybrid: bool) -> None:
    cache = make(pages=24, hybrid=hybrid, root=tmp_path)
    tokens = talk(cache)
    talk(cache, list(range(2000, 2070)), session="other")
    match = resumed(cache, tokens)
    assert (match.common, match.source, match.lost) == (len(tokens), "disk", 0)


@BOTH
def test_a_branch_inside_a_record_reads_its_part_only_and_stores_its_own(tmp_path: Path, hybrid: bool) -> None:
    cache = make(pages=128, hybrid=hybrid, root=tmp_path)
    anchors = [Anchor(offset=21, kind="system")]
    one = Sequence_(cache, TALK, anchors=anchors).run().close().tokens
    two = Sequence_(cache, [*TALK[:21], *range(300, 340)], anchors=anchors).run().close().tokens
    three = Sequence_(cache, [*one, *range(400, 440)]).run().close().tokens
    kill(cache)
    fresh = make(pages=128, hybrid=hybrid, root=tmp_path)
    for tokens in (two, three, one):
        assert resumed(fresh, tokens).common == len(tokens)


@BOTH
def test_a_path_that_leaves_a_record_early_is_not_given_its_other_branch(tmp_path: Path, hybrid: bool) -> None:
    """A turn's record runs on into an answer the next prompt did not keep."""
    cache = make(pages=200, hybrid=hybrid, states=50, root=tmp_path)
    lengths = (21, 22, 23, 40, 41, 62)
    for n in lengths:
        talk(cache, TALK[:n])  # its answer is another than TALK goes on with
    grown = talk(cache, [*TALK, 7])
    kill(cache)
    fresh = make(pages=200, hybrid=hybrid, states=50, root=tmp_path)
    assert resumed(fresh, grown).common == len(grown)


@BOTH
def test_nothing_is_written_twice(tmp_path: Path, hybrid: bool) -> None:
    cache = make(pages=128, hybrid=hybrid, root=tmp_path)
    tokens = talk(cache)
    before = cache.disk.counters["stored_bytes"]
    talk(cache, TALK, session="another user")
    assert cache.disk.counters["stored_bytes"] == before
    tokens = talk(cache, [*tokens, 1, 2])
    grown = cache.disk.counters["stored_bytes"] - before
    assert grown == 5 * cache.storage.row_bytes + cache.storage.state_bytes


def test_files_are_for_the_owner_only(tmp_path: Path) -> None:
    cache = make(root=tmp_path / "kv")
    talk(cache)
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    cache = make(root=tmp_path)
    with pytest.raises(Busy, match="another server"):
        make(root=tmp_path)
    cache.shutdown()
    make(root=tmp_path).shutdown()


def test_identity_names_everything_values_depend_on() -> None:
    parts = {"weights": "a", "quantization": "q", "tokenizer": "t", "template": "x", "layout": "l"}
    others = [identity({**parts, key: "other"}) for key in parts]
    assert len({identity(parts), *others}) == len(parts) + 1
    assert identity(dict(reversed(parts.items()))) == identity(parts)


def test_other_weights_find_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache = make(root=tmp_path)
    tokens = talk(cache)
    kill(cache)
    other = make(root=tmp_path, identity=b"other weights 16")
    assert resumed(other, tokens).source == "none"
    other.shutdown()
    (tmp_path / b"other weights 16".hex()).rename(tmp_path / "kept")
    (tmp_path / (b"i" * 16).hex()).rename(tmp_path / b"other weights 16".hex())  # files moved by hand
    forged = make(root=tmp_path, identity=b"other weights 16")
    assert resumed(forged, tokens).source == "none"
    assert "file belongs to other weights" in caplog.text


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), hybrid=st.booleans(), indexed=st.integers(0, 3))
def test_any_damage_costs_a_prefill_and_no_wrong_row(tmp_path: Path, data: st.DataObject, hybrid: bool, indexed: int) -> None:
    """Flip a bit in, cut, empty or remove any file: what comes back is a true prefix, and a log line says so.

    The journal has an index of its first `indexed` turns.
    """
    root = tmp_path / str(time.monotonic_ns())
    tokens = list(TALK[:30])
    for n in range(3):
        with patch.object(store, "INDEX_EVERY", 1 if n < indexed else 1000):
            cache = make(pages=128, hybrid=hybrid, root=root)
            tokens = talk(cache, [*tokens, *range(100 * n + 100, 100 * n + 120)])
            kill(cache)
    victim = data.draw(st.sampled_from(sorted(p for p in root.rglob("*") if p.is_file() and p.name != "lock")))
    raw = victim.read_bytes()
    how = data.draw(st.sampled_from(["flip", "cut", "empty", "remove"]))
    if how == "flip":
        at = data.draw(st.integers(0, len(raw) * 8 - 1))
        victim.write_bytes(raw[: at // 8] + bytes([raw[at // 8] ^ (1 << at % 8)]) + raw[at // 8 + 1 :])
    elif how == "cut":
        victim.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    elif how == "empty":
        victim.write_bytes(b"")
    else:
        victim.unlink()
    fresh = make(pages=128, hybrid=hybrid, root=root)
    match = resumed(fresh, tokens)  # Sequence_ checks every row and the state against a cold run
    assert match.common <= len(tokens)
    assert resumed(fresh, [*tokens, 999]).common == len(tokens) + 1
    kill(fresh)
    again = make(pages=128, hybrid=hybrid, root=root)
    assert resumed(again, [*tokens, 999]).common > 0  # and what was prefilled was stored anew
    kill(again)
    shutil.rmtree(root)


@pytest.mark.parametrize("code,call", [(errno.ENOSPC, "write"), (errno.EROFS, "open"), (errno.EIO, "fsync")])
@BOTH
def test_a_disk_that_cannot_be_written_is_said_and_left_alone(
    tmp_path: Path, hybrid: bool, code: int, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [1000.0]
    cache = make(hybrid=hybrid, root=tmp_path, clock=lambda: now[0])
    first = talk(cache)
    with monkeypatch.context() as broken:
        failing(broken, code, call)
        second = talk(cache, [*first, 4, 5])
        assert resumed(cache, second).common == len(second)  # memory serves on
    errors = [parse_log_line(r.getMessage()) for r in caplog.records if "disk error" in r.getMessage()]
    assert errors and errors[0][1]["error"] == os.strerror(code) and "hint" in errors[0][1]
    assert not list(tmp_path.rglob("*.new"))
    talk(cache, [*second, 999, 6])  # within the pause: refused, counted
    assert cache.disk.counters["refused_disk-error"] > 0
    now[0] += 61
    third = talk(cache, [*second, 999, 6, 7])
    kill(cache)
    assert resumed(make(hybrid=hybrid, root=tmp_path, clock=lambda: now[0]), third).common == len(third)


@BOTH
def test_the_directory_deleted_under_the_server(tmp_path: Path, hybrid: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache = make(pages=24, hybrid=hybrid, root=tmp_path / "kv")
    tokens = talk(cache)
    shutil.rmtree(tmp_path / "kv")
    talk(cache, list(range(2000, 2070)), session="other")  # pushes the first out of memory
    match = resumed(cache, tokens)
    assert match.common < len(tokens) and "file is gone" in caplog.text
    kept = talk(cache, [*tokens, 999, 3])
    kill(cache)
    assert resumed(make(pages=24, hybrid=hybrid, root=tmp_path / "kv"), kept).common == len(kept)


def test_the_clock_set_back_expires_nothing_and_blocks_nothing(tmp_path: Path) -> None:
    now = [10_000_000.0]
    cache = make(root=tmp_path, clock=lambda: now[0], ttl_s=3600, daily_bytes=1 << 20)
    tokens = talk(cache)
    now[0] -= 5_000_000
    grown = talk(cache, [*tokens, 5, 6])
    assert cache.disk.counters["evicted"] == 0 and cache.disk.counters["stored"] == 2
    kill(cache)
    assert resumed(make(root=tmp_path, clock=lambda: now[0], ttl_s=3600), grown).common == len(grown)


def test_records_live_as_long_as_they_are_used(tmp_path: Path) -> None:
    now = [1000.0]
    cache = make(pages=24, root=tmp_path, clock=lambda: now[0], ttl_s=3600)
    used, idle = talk(cache), talk(cache, list(range(2000, 2070)), session="idle")
    for _ in range(4):
        now[0] += 1200
        used = talk(cache, [*used, 5])
    assert resumed(cache, idle, "idle").reason == "ttl"
    assert resumed(cache, used).lost == 0


@BOTH
def test_the_budget_holds_and_the_used_conversation_stays(tmp_path: Path, hybrid: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache = make(pages=40, hybrid=hybrid, states=4, root=tmp_path, budget=1500)
    tokens = talk(cache)
    for n in range(12):
        tokens = talk(cache, [*tokens, n + 1])
        talk(cache, list(range(1000 * n + 2000, 1000 * n + 2030)), session=f"side {n}")
    kill(cache)
    fresh = make(pages=40, hybrid=hybrid, states=4, root=tmp_path, budget=1500)
    assert resumed(fresh, tokens).common == len(tokens)
    gone = [parse_log_line(r.getMessage())[1] for r in caplog.records if "kv cache evicted" in r.getMessage()]
    assert {e["reason"] for e in gone if e.get("tier") == "disk"} == {"disk-cache-full"}
    files = {p.name.split(".")[0] for p in tmp_path.rglob("*.kv")}
    assert len(files) == len(fresh.disk.index.records)


def test_the_daily_cap_holds_across_a_restart(tmp_path: Path) -> None:
    now = [1_000_000.0]
    cap = {"daily_bytes": 700, "clock": lambda: now[0]}
    cache = make(root=tmp_path, **cap)
    tokens = talk(cache)
    cache.shutdown()
    cache = make(root=tmp_path, **cap)
    tokens = talk(cache, [*tokens, *range(100, 130)])
    assert cache.disk.counters["refused_daily-cap"] == 1
    now[0] += 90_000
    talk(cache, [*tokens, 5])
    assert cache.disk.counters["stored"] == 1


def test_a_session_is_purged_and_shared_text_is_not(tmp_path: Path) -> None:
    cache = make(pages=128, root=tmp_path)
    anchors = [Anchor(offset=20, kind="system")]
    a = Sequence_(cache, TALK, session="a", anchors=anchors).run().close().tokens
    b = Sequence_(cache, [*TALK[:20], *range(300, 340)], session="b", anchors=anchors).run().close().tokens
    written(cache)
    gone = cache.delete_session("a")
    assert gone["disk_records"] == 1 and gone["ram_tokens"] == len(a) - 20
    audit(cache)
    assert resumed(cache, a, "x").common == 20
    kill(cache)
    fresh = make(pages=128, root=tmp_path)
    assert resumed(fresh, b, "y").common == len(b)


def test_orphan_files_of_a_crash_are_swept(tmp_path: Path) -> None:
    cache = make(root=tmp_path)
    talk(cache)
    kill(cache)
    stray = tmp_path / (b"i" * 16).hex() / "07" / "707.kv"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"half")
    fresh = make(root=tmp_path)
    fresh.shutdown()
    assert not stray.exists() and len(list(tmp_path.rglob("*.kv"))) == 1


@BOTH
def test_a_conversation_larger_than_the_budget_keeps_its_beginning(tmp_path: Path, hybrid: bool) -> None:
    """What a run continues is never given up to make room for it."""
    cache = make(pages=128, hybrid=hybrid, root=tmp_path, budget=700)
    tokens = TALK[:20]
    for n in range(10):
        tokens = talk(cache, [*tokens, *range(100 * n + 100, 100 * n + 110)])
    assert cache.disk.counters["refused_larger-than-budget"] > 0
    kill(cache)
    match = resumed(make(pages=128, hybrid=hybrid, root=tmp_path, budget=700), tokens)
    assert 40 < match.common < len(tokens)


@BOTH
def test_conversations_that_do_not_fit_together_do_not_push_each_other_out(tmp_path: Path, hybrid: bool) -> None:
    cache = make(pages=200, hybrid=hybrid, states=50, root=tmp_path, budget=900)
    talks = {"a": TALK, "b": list(range(2001, 2063))}
    for n in range(8):
        for name, tokens in talks.items():
            talks[name] = talk(cache, [*tokens, n + 1], session=name)
    assert cache.disk.counters["refused_others-are-active"] > 0
    written_once = sum(len(t) for t in talks.values()) * cache.storage.row_bytes + 32 * cache.storage.state_bytes
    assert cache.disk.counters["stored_bytes"] <= written_once
    kill(cache)
    fresh = make(pages=200, hybrid=hybrid, states=50, root=tmp_path, budget=900)
    assert max(resumed(fresh, tokens, name).common for name, tokens in talks.items()) > len(TALK)


def test_what_another_model_left_goes_after_its_lifetime(tmp_path: Path) -> None:
    now = [time.time()]
    old = make(root=tmp_path, identity=b"an older model 1", ttl_s=3600, clock=lambda: now[0])
    talk(old)
    held = make(root=tmp_path, identity=b"a running model1", ttl_s=3600, clock=lambda: now[0])
    talk(held)
    kill(old)
    (tmp_path / "notes").mkdir()
    make(root=tmp_path, clock=lambda: now[0], ttl_s=3600).shutdown()
    assert len(list(tmp_path.iterdir())) == 4  # young
    now[0] += 7200
    make(root=tmp_path, clock=lambda: now[0], ttl_s=3600).shutdown()
    assert {p.name for p in tmp_path.iterdir()} == {(b"i" * 16).hex(), b"a running model1".hex(), "notes"}
    kill(held)


@BOTH
@pytest.mark.parametrize("clean", [True, False], ids=["sigterm", "kill"])
def test_a_conversation_that_fills_the_memory_is_written_whole(
    tmp_path: Path, hybrid: bool, clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only half of the pages may wait for the writer: the rest of a long turn follows when they are written."""
    monkeypatch.setattr("engine.prefix.disk.RECORD_BYTES", 4 * 4 * 8)  # four pages a record
    cache = make(pages=24, hybrid=hybrid, root=tmp_path)
    tokens = list(range(1, 89))
    Sequence_(cache, tokens).run().close()
    if clean:
        cache.shutdown()
    else:
        kill(cache)
    assert cache.disk.counters["stored"] >= 5 and not cache.disk.counters["refused_write-queue-full"]
    fresh = make(pages=24, hybrid=hybrid, root=tmp_path)
    assert resumed(fresh, tokens).common == len(tokens)


def test_what_memory_gave_up_before_it_could_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.prefix.disk.RECORD_BYTES", 4 * 4 * 8)
    cache = make(pages=24, root=tmp_path)
    tokens = list(range(1, 89))
    Sequence_(cache, tokens).run().close()
    assert cache.disk.pending
    while cache.disk._store.pending:
        cache.disk.collect(wait_s=10)  # the pages are free to go
    cache.flush("ram")
    written(cache)
    audit(cache)
    assert cache.disk.counters["refused_write-queue-full"] == 1
    assert 32 <= resumed(cache, tokens).common < len(tokens)


def test_the_journal_is_rewritten_when_half_of_it_is_of_no_use_and_not_before(tmp_path: Path) -> None:
    """Rewriting costs more than reading: a large index opens in the time of the latter."""
    cache = make(pages=128, root=tmp_path)
    tokens = talk(cache)
    for n in range(3):
        tokens = talk(cache, [*tokens, n])
    kill(cache)
    (journal,) = tmp_path.rglob("journal")
    before = journal.stat()
    cache = make(pages=128, root=tmp_path)
    assert resumed(cache, tokens).common == len(tokens)
    assert journal.stat().st_ino == before.st_ino
    for n in range(60):
        talk(cache, list(range(1000 * n + 2000, 1000 * n + 2030)), session=f"gone {n}")
        cache.delete_session(f"gone {n}")
    kill(cache)
    grown = journal.stat().st_size
    cache = make(pages=128, root=tmp_path)
    assert journal.stat().st_ino != before.st_ino and journal.stat().st_size < grown / 2
    assert resumed(cache, tokens).common >= len(tokens)
