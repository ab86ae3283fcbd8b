"""Text keys: another spelling of the same text matches what is stored; a special token equals itself only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ipc import Anchor
from engine.prefix.textkeys import TextKeys
from tests.engine.prefix.fakes import Sequence_, audit, make, written

# 1-3 letters, 4-9 strings of them, 10 and 11 special, one of which looks like text
SPELLING: list[bytes | None] = [b"", b"a", b"b", b"c", b"ab", b"bc", b"abc", b"ca", b"aa", b"bca", None, None]
END = 10


def spell(tokens: list[int]) -> list[bytes | int]:
    """Text with special tokens as atoms."""
    out: list[bytes | int] = []
    for token in tokens:
        piece = SPELLING[token]
        out += [token] if piece is None else [bytes([b]) for b in piece]
    return out


def keyed(hybrid: bool, root: Path | None = None):
    cache = make(pages=128, hybrid=hybrid, root=root)
    cache._text_keys = TextKeys(lambda: SPELLING)
    return cache


BOTH = pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])


@BOTH
def test_a_sampled_spelling_is_found_by_its_text(hybrid: bool) -> None:
    cache = keyed(hybrid)
    prompt = [1, 2, 3, END]
    first = Sequence_(cache, prompt).run().decode([1, 2, 3, 1, 2, 3, 2]).close()  # "abcabcb" in letters
    anchors = [Anchor(offset=7, kind="user")]  # behind the special token
    lease = cache.open([*prompt, 6, 6, 2, END, 3, 3], session="s", anchors=anchors)
    assert list(lease.tokens) == [*first.tokens, END, 3, 3]
    assert lease.match.common == len(first.tokens) and lease.match.lost == 0
    if hybrid:
        assert 11 in [stop.offset for stop in lease.stops] or lease.next_stop(11, 14) == 13
    lease.close(lease.tokens[: lease.match.common], "cancelled")
    audit(cache)
    assert cache.counters["respelled"] == 1


@BOTH
def test_a_special_token_never_matches_its_text(hybrid: bool) -> None:
    cache = keyed(hybrid)
    Sequence_(cache, [1, 2, END, 1, 2, 3]).run().close()
    match = Sequence_(cache, [1, 2, 11, 1, 2, 3, 3]).close().lease.match
    assert match.common <= 2
    assert cache.counters["respelled"] == 0


def test_the_prompt_keeps_its_own_spelling_when_nothing_is_saved() -> None:
    cache = keyed(False)
    Sequence_(cache, [1, 2, 3, END]).run().close()
    lease = cache.open([6, 2, 2], session="s", anchors=())  # "abc" is stored in letters, and then the texts part
    assert lease.match.common in (0, 3)
    lease.close((), "cancelled")
    lease = cache.open([8, 2, 2], session="s", anchors=())  # "aa": nothing stored spells it
    assert list(lease.tokens) == [8, 2, 2] and lease.match.common == 0


def test_a_spelling_that_is_only_on_disk_is_found(tmp_path: Path) -> None:
    cache = keyed(False, tmp_path)
    text = [1, 2, 3] * 8
    Sequence_(cache, [END, *text]).run().close()
    written(cache)
    cache.flush("ram")
    lease = cache.open([END, *[6] * 8, END], session="s", anchors=())
    assert lease.match.source == "disk" and lease.match.common == 25


@pytest.mark.parametrize(("most", "common"), [(12, 1), (13, 1), (14, 12), (None, 12)])
def test_a_spelling_that_does_not_fit_is_not_used(most: int | None, common: int) -> None:
    cache = keyed(False)
    Sequence_(cache, [END, *[1, 2, 3] * 4]).run().close()
    prompt = [END, 6, 6, 6, 6, 1]
    lease = cache.open(prompt, session="s", anchors=(), most=most)
    assert lease.match.common == common + (common == 12) and spell(lease.tokens) == spell(prompt)
    assert list(lease.tokens) == prompt if common == 1 else len(lease.tokens) == 14
    assert cache.counters["respelled_too_long"] == (common == 1)


tokens = st.lists(st.integers(1, 11), min_size=1, max_size=14)


@settings(max_examples=150)
@given(stored=st.lists(tokens, min_size=1, max_size=5), prompt=tokens, hybrid=st.booleans())
def test_whatever_is_matched_spells_the_same_text(stored: list[list[int]], prompt: list[int], hybrid: bool) -> None:
    cache = keyed(hybrid)
    for each in stored:
        lease = cache.open(each, session="s", anchors=())
        Replay(cache, lease).finish()
    plain = max((common(prompt, s) for s in stored), default=0)
    lease = cache.open(prompt, session="s", anchors=())
    assert spell(lease.tokens) == spell(prompt)
    assert hybrid or lease.match.common >= min(plain, len(prompt) - 1)
    Replay(cache, lease).check().finish()
    audit(cache)


class Replay(Sequence_):
    """A sequence over a lease that is open already, in the lease's spelling."""

    def __init__(self, cache, lease) -> None:
        self.cache, self.lease, self.tokens = cache, lease, list(lease.tokens)
        self.done = lease.match.common

    def check(self) -> Replay:
        super().check()
        return self

    def finish(self) -> None:
        self.run().close()


def common(a: list[int], b: list[int]) -> int:
    differs = np.flatnonzero(np.array(a[: len(b)]) != np.array(b[: len(a)]))
    return int(differs[0]) if len(differs) else min(len(a), len(b))
