"""The journal's index: it never says anything the journal does not, and no damage to it costs more than reading the journal."""

from __future__ import annotations

import errno
import logging
import os
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prefix import store
from engine.prefix.cache import RadixCache
from engine.prefix.journal import Drop, DropState, Frame, Journal, Put, Spent, Use
from engine.prefix.ledger import condense, read
from tests.engine.prefix.fakes import Sequence_, audit, kill, make, written

NONE = Path("/nowhere/index")
TALKS = {name: list(range(start, start + 70)) for name, start in (("a", 1), ("b", 1001), ("c", 2001))}


def test_with_an_index_a_journal_comes_to_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=25)
    @given(seed=st.integers(0, 1 << 30), lives=st.lists(st.booleans(), min_size=1, max_size=5))
    def check(seed: int, lives: list[bool]) -> None:
        folder, chance = tmp_path_factory.mktemp("j"), random.Random(seed)
        journal, index, known = folder / "journal", folder / "index", [0]
        for indexed in lives:
            out = Journal(journal)
            for _ in range(chance.randrange(20)):
                out.append([any_frame(chance, known)])
            out.close()
            if indexed:
                condense(journal, index)
        assert read(journal, index).scanned < read(journal, NONE).scanned or not any(lives) or known == [0]
        assert meaning(journal, index) == meaning(journal, NONE)

    check()


def any_frame(chance: random.Random, known: list[int]) -> Frame:
    some = chance.sample(known, min(len(known), 2))
    kind = chance.choice([Put, Put, Put, Use, Drop, DropState, Spent])
    if kind is Put:
        known.append(len(known))
        tokens = chance.randbytes(4 * chance.randrange(1, 40))
        sizes = (chance.randrange(1 << 30), chance.choice([0, 66 << 20]))
        return Put(known[-1], some[0], 64, *sizes, "turn-end", chance.choice("aö"), chance.random(), chance.randbytes(16), tokens)
    if kind is Use:
        return Use(some[0], chance.random() * 2, chance.randrange(9), "*")
    return Spent(chance.randrange(5), 1 << 40) if kind is Spent else kind(tuple(some))


def meaning(journal: Path, index: Path) -> object:
    ledger = read(journal, index)
    tokens = [ledger.tokens(r).read().tobytes() for r in ledger.records.values()]
    return msgspec.to_builtins(list(ledger.records.values())), tokens, ledger.spent, ledger.next_id, ledger.frames


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "INDEX_EVERY", 1)


def talks(root: Path, **more: object) -> dict[str, list[int]]:
    """Three conversations in a cache that was stopped in order; what was computed."""
    cache = make(pages=200, root=root, **more)
    found = {name: Sequence_(cache, tokens, session=name).run().decode([9, 9]).close().tokens for name, tokens in TALKS.items()}
    cache.shutdown()
    return found


def all_there(cache: RadixCache, kept: dict[str, list[int]]) -> bool:
    matches = [Sequence_(cache, [*tokens, 7], session=name).run().close().lease.match for name, tokens in kept.items()]
    written(cache)
    audit(cache)
    return all((m.common, m.source) == (len(kept[n]), "disk") for n, m in zip(kept, matches, strict=True))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 16
    path.write_bytes(raw)


DAMAGE = {
    "none": lambda path: None,
    "torn": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped at its begin": lambda path: flip(path, 0),
    "flipped in its checksum": lambda path: flip(path, 9),
    "flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "flipped at its end": lambda path: flip(path, -1),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_costs_nothing_but_time(
    tmp_path: Path, hybrid: bool, damage: str, indexed: None, caplog: pytest.LogCaptureFixture
) -> None:
    kept = talks(tmp_path, hybrid=hybrid)
    (index,) = tmp_path.rglob("index")
    assert index.stat().st_mode & 0o077 == 0
    DAMAGE[damage](index)
    caplog.set_level(logging.INFO)
    cache = make(pages=200, root=tmp_path, hybrid=hybrid)
    assert all_there(cache, kept)
    kill(cache)
    assert "journal damaged" not in caplog.text and "disk damaged" not in caplog.text
    again = make(pages=200, root=tmp_path, hybrid=hybrid)
    assert all_there(again, kept)
    kill(again)


def test_a_torn_journal_beside_a_whole_index_is_read_as_far_as_it_goes(
    tmp_path: Path, indexed: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The index is not believed about tokens that are not there any more."""
    kept = talks(tmp_path)
    (journal,) = tmp_path.rglob("journal")
    journal.write_bytes(journal.read_bytes()[:-600])
    caplog.set_level(logging.INFO)
    cache = make(pages=200, root=tmp_path)
    assert not all_there(cache, kept) and "journal damaged" in caplog.text
    kill(cache)
    assert all_there(make(pages=200, root=tmp_path), kept)  # what was prefilled again was written again


def test_the_index_of_a_journal_that_was_rewritten_is_not_believed(tmp_path: Path, indexed: None) -> None:
    kept = talks(tmp_path)
    (index,), (journal,) = tmp_path.rglob("index"), tmp_path.rglob("journal")
    old = index.read_bytes()
    cache = make(pages=200, root=tmp_path)
    for n in range(80):  # enough that goes again: the next start rewrites the journal
        Sequence_(cache, range(3000 + 100 * n, 3030 + 100 * n), session="gone").run().close()
        written(cache)
        cache.delete_session("gone")
    kill(cache)
    inode = journal.stat().st_ino
    kill(make(pages=200, root=tmp_path))
    assert journal.stat().st_ino != inode
    index.write_bytes(old)  # a crash between the two
    assert all_there(make(pages=200, root=tmp_path), kept)


@pytest.mark.parametrize("change", ["overwritten", "cut"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
def test_a_journal_changed_under_the_server_costs_a_prefill_and_a_log_line(
    tmp_path: Path, hybrid: bool, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens are read when they are asked for: Sequence_ checks that none of another prefix is taken for them."""
    kept = talks(tmp_path, hybrid=hybrid)
    (journal,) = tmp_path.rglob("journal")
    cache = make(pages=200, root=tmp_path, hybrid=hybrid)
    raw = journal.read_bytes()
    with journal.open("r+b") as out:
        out.truncate(10) if change == "cut" else out.write(bytes(len(raw)))
    caplog.set_level(logging.INFO)
    assert not all_there(cache, kept) and "journal damaged" in caplog.text
    for name, tokens in kept.items():
        match = Sequence_(cache, [*tokens, 7, 8], session=name).run().close().lease.match
        assert match.common == len(tokens) + 1
        audit(cache)
    cache.shutdown()


def test_the_index_is_written_at_a_stop_and_at_a_start_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "INDEX_EVERY", 3)

    def life(frames: int) -> list[Path]:
        cache = make(pages=200, root=tmp_path)
        for _ in range(frames):
            cache.disk._store.note(Use(999, 1.0, 1, "nobody"))
        kill(cache)
        return list(tmp_path.rglob("index"))

    assert not life(1) and not life(1)  # so few are read in no time
    (index,) = life(1)
    first = index.read_bytes()
    monkeypatch.setattr(store, "INDEX_EVERY", 100)
    life(3)  # a kill before it was written
    assert index.read_bytes() == first
    monkeypatch.setattr(store, "INDEX_EVERY", 3)
    life(0)
    assert index.read_bytes() != first and not list(tmp_path.rglob("*.new"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_an_index_that_cannot_be_written_stops_nothing(
    tmp_path: Path, code: int, indexed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    real = os.open

    def fail(path: object, *args: object, **more: object) -> int:
        if str(path).endswith("index.new"):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **more)

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", fail)
        kept = talks(tmp_path)
        cache = make(pages=200, root=tmp_path)  # asks for one at its start
        kept["a"] = Sequence_(cache, [*kept["a"], 5], session="a").run().close().tokens
        written(cache)
        assert cache.disk.counters["stored"] == 1 and not cache.disk.counters["errors"]
        kill(cache)
    assert "index not written" in caplog.text and not list(tmp_path.rglob("index*"))
    assert all_there(make(pages=200, root=tmp_path), kept)
