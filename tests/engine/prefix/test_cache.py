"""Reuse in memory: what a turn, an edit, a neighbour and a full pool cost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.ipc import Anchor
from engine.prefix.base import OutOfPages
from engine.prefix.ram import NODE_TOKENS
from engine.protocol import parse_log_line
from tests.engine.prefix.fakes import Sequence_, audit, make, written

BOTH = pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
SYSTEM = list(range(1, 23))


@BOTH
def test_a_tool_turn_costs_only_its_new_tokens(hybrid: bool) -> None:
    cache = make(hybrid=hybrid)
    first = Sequence_(cache, SYSTEM).run().decode([50, 51, 52]).close()
    assert first.lease.match == cache_match(0, reason="first")
    turn = Sequence_(cache, [*first.tokens, 99, 60, 61]).run().close()
    assert (turn.lease.match.common, turn.lease.match.lost, turn.lease.match.reason) == (len(first.tokens), 0, "")
    assert turn.lease.match.source == "ram"
    audit(cache)


def cache_match(common: int, **kw):
    from engine.prefix.base import Match

    return Match(common, **kw)


@pytest.mark.parametrize("length", range(1, 14))
@BOTH
def test_no_token_is_lost_at_page_borders(length: int, hybrid: bool) -> None:
    cache = make(hybrid=hybrid)
    Sequence_(cache, SYSTEM[:length]).run().close()
    again = Sequence_(cache, [*SYSTEM[:length], 70]).run().close()
    assert again.lease.match.common == length and again.lease.match.lost == 0


def test_attention_resumes_inside_an_edge_and_a_page() -> None:
    cache = make()
    Sequence_(cache, SYSTEM).run().close()
    edited = Sequence_(cache, [*SYSTEM[:9], 70, 71]).run().close()
    assert edited.lease.match.common == 9 and edited.lease.match.reason == "token-mismatch"
    assert edited.lease.match.at == "token[9]"
    Sequence_(cache, [*SYSTEM, 80]).run().close()  # the original branch is still whole
    audit(cache)


def test_hybrid_resumes_at_the_deepest_anchor_before_an_edit() -> None:
    cache = make(pages=256, hybrid=True)
    tokens = list(range(1, 401))
    anchors = [Anchor(offset=200, kind="system"), Anchor(offset=350, kind="user")]
    Sequence_(cache, tokens, anchors=anchors).run().close()
    edited = Sequence_(cache, [*tokens[:300], 900, 901]).run().close()
    assert edited.lease.match.common == 200 and edited.lease.match.anchor == "system@200"
    assert (edited.lease.match.lost, edited.lease.match.reason) == (100, "no-checkpoint")


@BOTH
def test_the_same_prompt_again_repeats_a_few_tokens_at_most(hybrid: bool) -> None:
    cache = make(hybrid=hybrid)
    Sequence_(cache, SYSTEM).run().decode([50, 51]).close()
    again = Sequence_(cache, SYSTEM).run().decode([60]).close()
    assert again.lease.match.common == len(SYSTEM) - 1 and again.lease.match.lost == 0


@BOTH
def test_a_running_sequence_shares_its_prompt_and_nothing_behind_it(hybrid: bool) -> None:
    cache = make(hybrid=hybrid)
    one = Sequence_(cache, SYSTEM).run().decode([50, 51, 52])
    two = Sequence_(cache, [*SYSTEM, 50, 77, 78]).run()
    assert two.lease.match.common in (len(SYSTEM), len(SYSTEM) - 1) and two.lease.match.source == "live"
    one.decode([53, 54, 55, 56]).check()
    two.decode([79, 80]).check()
    audit(cache, [one, two])
    one.close(), two.close()
    for tokens in (one.tokens, two.tokens):
        third = Sequence_(cache, [*tokens, 5]).close()
        assert third.lease.match.common == len(tokens)
    audit(cache)


@BOTH
def test_reuse_off_neither_matches_nor_keeps(hybrid: bool) -> None:
    cache = make(hybrid=hybrid)
    Sequence_(cache, SYSTEM).run().close()
    off = Sequence_(cache, SYSTEM, reuse=False).run().decode([3, 4]).close()
    assert off.lease.match.common == 0 and off.lease.match.reason == "off"
    assert Sequence_(cache, [*SYSTEM, 3, 4, 5]).close().lease.match.common == len(SYSTEM)
    audit(cache)


@BOTH
def test_a_failed_request_keeps_nothing_of_its_end(hybrid: bool) -> None:
    cache = make(hybrid=hybrid)
    bad = Sequence_(cache, SYSTEM).run().decode([50, 51, 52, 53])
    bad.close("error")
    bad.lease.close(bad.tokens, "stop")  # idempotent: the first word counts
    assert Sequence_(cache, [*bad.tokens, 1]).close().lease.match.common <= len(SYSTEM)
    audit(cache)


@BOTH
def test_full_pool_raises_and_changes_nothing(hybrid: bool) -> None:
    cache = make(pages=8, slots=2, hybrid=hybrid)
    one = Sequence_(cache, SYSTEM).run()  # 6 pages
    with pytest.raises(OutOfPages, match="KV pages wanted"):
        one.lease.grow(40)
    two = Sequence_(cache, [100, 101, 102])
    with pytest.raises(OutOfPages, match="slots"):
        Sequence_(cache, [1])
    two.run().close()
    one.decode([50]).close()
    audit(cache)


@BOTH
def test_a_one_shot_neighbour_goes_before_a_conversation(hybrid: bool) -> None:
    cache = make(pages=32, hybrid=hybrid, states=16)
    talk = Sequence_(cache, SYSTEM, session="talk").run().close()
    talk = Sequence_(cache, [*talk.tokens, *range(200, 220)], session="talk").run().close()
    for n in range(12):  # titles and sub-agents: share two tokens, larger together than the pool
        Sequence_(cache, [*SYSTEM[:2], *range(1000 + 100 * n, 1012 + 100 * n)], session="talk").run().close()
        audit(cache)
    after = Sequence_(cache, [*talk.tokens, 7], session="talk")
    assert after.lease.match.common == len(talk.tokens) and after.lease.match.lost == 0


@BOTH
def test_what_was_evicted_is_named_as_lost(hybrid: bool, caplog: pytest.LogCaptureFixture) -> None:
    cache = make(pages=16, hybrid=hybrid)
    caplog.set_level(logging.INFO)
    Sequence_(cache, SYSTEM, session="a").run().close()
    Sequence_(cache, range(500, 560), session="b").run().close()
    back = Sequence_(cache, [*SYSTEM, 4], session="a")
    match = back.lease.match
    assert match.lost == len(SYSTEM) - match.common > 0 and match.reason == "ram-full"
    events = [parse_log_line(r.getMessage()) for r in caplog.records]
    stored = [fields for event, fields in events if event == "kv cache stored"]
    evicted = [fields for event, fields in events if event == "kv cache evicted"]
    assert stored and evicted and evicted[0]["reason"] == "ram-full" and evicted[0]["hits"] == "0"
    assert cache.status()["counters"]["lost_tokens"] == match.lost


def test_states_stay_inside_their_budget_and_system_stays_longest() -> None:
    cache = make(pages=400, hybrid=True, states=6)
    system = Anchor(offset=len(SYSTEM), kind="system", weight=1.0)
    tokens = list(SYSTEM)
    for n in range(12):
        tokens += range(1000 * n + 1000, 1000 * n + 1130)
        Sequence_(cache, tokens, anchors=[system]).run().close()
        audit(cache)
    fresh = Sequence_(cache, [*SYSTEM, 9, 9, 9], session="new", anchors=[system])
    assert fresh.lease.match.common == len(SYSTEM) and fresh.lease.match.anchor.startswith("system@")


def test_a_model_too_large_for_its_state_budget_still_answers() -> None:
    cache = make(hybrid=True, states=0)
    Sequence_(cache, SYSTEM).run().decode([5]).close()
    again = Sequence_(cache, [*SYSTEM, 5, 6]).run().close()
    assert again.lease.match.common == 0 and again.lease.match.reason == "not-computed"
    assert cache.ram.counters["states_refused"] > 0
    assert cache.pool.free == cache.pool.total


@pytest.mark.parametrize("root", [False, True], ids=["memory", "disk"])
def test_what_a_prompt_matches_but_cannot_resume_from_makes_room_for_it(root: bool, tmp_path: Path) -> None:
    """A hybrid knows 40 tokens of the prompt, but the only state lies behind the edit: their pages are free to go."""
    cache = make(pages=20, hybrid=True, root=tmp_path if root else None)
    before = Sequence_(cache, range(60)).run().close()
    if root:
        written(cache)
    edited = Sequence_(cache, [*before.tokens[:40], *range(200, 236)])
    assert edited.lease.match.common == 0 and edited.lease.match.reason == "no-checkpoint"
    edited.run()  # 19 of the 20 pages
    audit(cache, [edited])
    edited.close()
    audit(cache)
    again = Sequence_(cache, [*edited.tokens, 7])
    assert again.lease.match.common >= 70
    audit(cache, [again])


def test_prompts_that_were_sent_and_forgotten_are_bounded() -> None:
    """Ghosts of prompts that ended without a page count towards the bound as those that lost their pages do."""
    cache = make(hybrid=True)
    for n in range(50):
        Sequence_(cache, range(100 * n, 100 * n + 30), session=f"s{n}").close("error")
    assert cache.tree.ghost_tokens == 50 * 30
    cache.ram.bound_ghosts(most=300)
    assert cache.tree.ghost_tokens <= 300
    audit(cache)


@BOTH
def test_what_the_engine_prepares_by_itself_is_no_sign_that_anybody_comes_back(hybrid: bool) -> None:
    """One-shot requests whose next turn was prepared push each other out, not the conversation that goes on."""
    cache = make(pages=48, hybrid=hybrid, states=16)
    talk = Sequence_(cache, range(1, 91)).run().decode([500]).close().tokens
    talk = Sequence_(cache, [*talk, 501, 502]).run().decode([503]).close().tokens
    Sequence_(cache, [*talk[:-1], 504, 505], background=True).run().close()
    for n in range(12):
        side = (
            Sequence_(cache, range(1000 * n + 2000, 1000 * n + 2030), session="s" if n % 2 else f"x{n}").run().decode([7]).close()
        )
        Sequence_(cache, [*side.tokens[:-1], 8, 9], session=side.lease.session, background=True).run().close()
        audit(cache)
    again = Sequence_(cache, [*talk[:-1], 504, 505, 506]).run().close()
    assert again.lease.match.common == len(talk) + 1, again.lease.match


def test_thousands_of_tiny_sessions_leave_no_more_than_a_few_nodes() -> None:
    """What is remembered of each is less than the node that remembers it."""
    cache = make(pages=16)
    for n in range(1000):
        Sequence_(cache, [n, n + 1], session=f"s{n}").run().close()
        cache.ram.bound_ghosts(20_000)
    assert cache.tree.nodes < 20_000 / NODE_TOKENS + 20
    audit(cache)
