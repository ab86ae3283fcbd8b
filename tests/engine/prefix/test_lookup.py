"""What a look-up and a write cost whom: no scan of a directory, no walk over what others keep, no waiting for the disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import engine.prefix.radix as radix
from tests.engine.prefix.fakes import Sequence_, kill, make, written

BOTH = pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])


def others(cache, count: int) -> None:
    for n in range(count):
        Sequence_(cache, range(1000 * n + 1000, 1000 * n + 1020), session=f"other {n}").run().close()


@BOTH
def test_a_lookup_scans_no_directory_and_touches_only_the_files_it_restores(
    tmp_path: Path, hybrid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(pages=400, hybrid=hybrid, states=60, root=tmp_path)
    tokens = Sequence_(cache, range(1, 60)).run().close().tokens
    others(cache, 20)
    kill(cache)
    cache = make(pages=400, hybrid=hybrid, states=60, root=tmp_path)
    scanned, opened = [], []

    def noted(name: str, where: list[str]) -> None:
        real = getattr(os, name)

        def call(*args: object, **more: object) -> object:
            if threading.current_thread().name != "kv-writer":  # the sweep of the start is its, and nobody waits for it
                where.append(str(args[0]))
            return real(*args, **more)

        monkeypatch.setattr(os, name, call)

    for name in ("scandir", "listdir", "stat", "walk"):
        noted(name, scanned)
    noted("open", opened)
    miss = cache.open([7, 8, 9], session="new", anchors=())
    assert not opened
    hit = cache.open([*tokens, 99], session="s", anchors=())
    monkeypatch.undo()
    assert (hit.match.source, hit.match.common) == ("disk", len(tokens)) and miss.match.common == 0
    assert not scanned and len(opened) == 1 + hybrid, (scanned, opened)


@BOTH
def test_a_lookup_costs_as_much_whatever_others_keep(hybrid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of edges and the tokens in them: the same beside 3 conversations and beside 300."""
    seen = []
    for count in (3, 300):
        cache = make(pages=2000, hybrid=hybrid, states=700)
        tokens = Sequence_(cache, range(1, 200)).run().close().tokens
        others(cache, count)
        work: list[int] = []
        real = radix.common_length

        def counted(a, b, real=real, work=work):
            work.append(min(len(a), len(b)))
            return real(a, b)

        monkeypatch.setattr(radix, "common_length", counted)
        lease = cache.open([*tokens, 99], session="s", anchors=())
        monkeypatch.undo()
        assert lease.match.common == len(tokens)
        seen.append(work)
    assert seen[0] == seen[1] and sum(seen[0]) <= 8 * 201


class Stuck:
    """Writes wait until `go` is set."""

    def __init__(self, cache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        files = cache.disk._store._files
        real = files.write
        monkeypatch.setattr(files, "write", lambda *a: (self.go.wait(60), real(*a))[1])


@BOTH
def test_nothing_is_written_before_the_first_token_and_nobody_waits_for_the_disk(
    tmp_path: Path, hybrid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prefix.cache.LONG_PREFILL", 32)
    cache = make(pages=100, hybrid=hybrid, states=20, root=tmp_path)
    disk = Stuck(cache, monkeypatch)
    running = Sequence_(cache, range(1, 61)).run()
    assert cache.disk.pending == 0, "the prompt is computed, its first token is not out"
    running.decode([100])
    assert cache.disk.pending == 1, "a long prefill goes to the disk behind its first token"
    tokens = running.close().tokens
    for n in range(3):  # turns go on while the disk hangs
        tokens = Sequence_(cache, [*tokens, 200 + n]).run().close().tokens
    assert cache.disk.counters["stored"] == 0 and cache.disk.pending > 0
    disk.go.set()
    written(cache)
    assert cache.disk.counters["stored"] >= 4
    kill(cache)
    fresh = make(pages=100, hybrid=hybrid, states=20, root=tmp_path)
    assert Sequence_(fresh, [*tokens, 9]).close().lease.match.common == len(tokens)
