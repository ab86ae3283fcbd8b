"""Messages that came before are not read again, and nobody can tell: bodies, decisions and hints are those of a fresh gateway."""

import copy
import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Hints
from gateway import anchors, sessions, toolcheck
from gateway.config import NormaliseRule, ThinkingRule
from gateway.conversations import LONG as ENOUGH
from gateway.conversations import KnownConversations, Messages, folded
from gateway.dialects.base import loads
from gateway.dialects.chat import Chat
from gateway.edits import render
from gateway.errors import Refusal
from gateway.learning import fingerprint
from gateway.policy import claude, normalise, thinking
from gateway.tools import KnownTools
from gateway.turn import Received, Turn

SYSTEM = {"role": "system", "content": "You help.\nToday's date is 2026-03-01, 12:00\n" + "rules " * 2000}
LONG = "x" * ENOUGH

TEXTS = st.sampled_from(["hi", "größe 🙂", "/no_think", "<total_tokens>9 left</total_tokens>", 'a "quoted" \\ word', LONG])
PARTS = st.one_of(TEXTS, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), min_size=1, max_size=2))
MARKED = PARTS.map(lambda c: {"role": "user", "content": c, "cache_control": {"type": "ephemeral"}})
ARGUMENTS = st.sampled_from(['{"a":1}', '{"a":', {"a": 1}, None, "[1]"])
CALLS = ARGUMENTS.map(
    lambda a: {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": a}}],
    }
)
MESSAGE = st.one_of(
    PARTS.map(lambda c: {"role": "user", "content": c}),
    MARKED,
    CALLS,
    PARTS.map(lambda c: {"role": "assistant", "content": c, "reasoning_content": "hm", "thinking_blocks": []}),
    TEXTS.map(lambda c: {"role": "tool", "tool_call_id": "c", "content": c}),
    st.just(SYSTEM),
)
HISTORY = st.lists(MESSAGE, min_size=1, max_size=8)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
RULE = NormaliseRule(clock="move")


def seen(raw: bytes, known: KnownTools) -> list:
    """All that stages make of a chat request, refusals included."""
    try:
        turn = Chat(known).read(Turn(id="r", received=Received(route="/", headers={}, body=raw), dialect=Chat()))
        turn = turn.but(session=sessions.identify({}, turn.body))
        said = thinking.read(turn.body)
        turn = turn.decide(*thinking.resolve(said, ThinkingRule())[1], *normalise.decide(turn.body, RULE))
        turn = toolcheck.history(turn).decide(*claude.unsigned(turn.body))
        turn = turn.but(hints=Hints(anchors=anchors.derive(turn.body, turn.breakpoints)))
        print_ = fingerprint(turn.body)
        sent = render(turn.raw, turn.parsed, turn.body)
    except Refusal as refusal:
        return [refusal.status, refusal.text]
    decisions = [d.record() for d in turn.decisions]
    return [turn.body, turn.session, said, decisions, turn.hints, turn.breakpoints, sent, print_.size, print_.parts()]


def written(messages: list, spaces: tuple[str, str], **more) -> bytes:
    return json.dumps(
        {"model": "m"} | more | {"messages": messages, "stream": True}, ensure_ascii=False, separators=spaces
    ).encode()


@settings(max_examples=150, deadline=None)
@given(HISTORY, HISTORY, HISTORY, st.integers(0, 9), SPACES, st.booleans())
def test_a_request_that_goes_on_is_read_as_by_a_fresh_gateway(first, more, other, kept, spaces, tools) -> None:
    extra = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"messages": ["a"]}}}]} if tools else {}
    known = KnownTools()
    histories = [[SYSTEM, *first], [SYSTEM, *first, *more], [SYSTEM, *first[:kept], *other], [SYSTEM, *first, *more], first]
    for history in histories:
        raw = written(history, spaces, **extra)
        assert seen(raw, known) == seen(raw, KnownTools())


def test_known_messages_are_the_same_objects_and_only_the_new_ones_are_looked_at() -> None:
    known, looked = KnownTools(), []

    def look(raw: bytes) -> list:
        messages = loads(raw, known)[0]["messages"]
        folded(messages, "look", None, lambda _, first: looked.append(len(messages) - first))
        return messages

    history = [SYSTEM, {"role": "user", "content": LONG}]
    a = look(written(history, (",", ":")))
    b = look(written([*history, {"role": "assistant", "content": "hm"}], (",", ":")))
    c = look(written([*history, {"role": "assistant", "content": "other"}, {"role": "user", "content": "?"}], (",", ":")))
    assert looked == [2, 1, 4]  # the last one departs from what came before: its beginning is shared, what was found is not
    assert a[0] is b[0] is c[0] and a[1] is b[1] is c[1] and [len(m) for m in (a, b, c)] == [2, 3, 4]
    assert look(written(history, (",", ":")))[1] is a[1]


@pytest.mark.parametrize("end", ["", "}", "]]}", ",]}", '],"messages":[]}', '],"stream":1'])
def test_what_is_wrong_behind_known_messages_is_refused_as_ever(end) -> None:
    known = KnownTools()
    good = written([SYSTEM, {"role": "user", "content": LONG}], (",", ":"))
    seen(good, known)
    bad = good[: good.rindex(b"]")] + end.encode()
    got = seen(bad, known)
    assert got == seen(bad, KnownTools()) and got[0] == 400


def test_messages_elsewhere_in_the_body_are_not_taken_for_the_conversation() -> None:
    known = KnownTools()
    history = [SYSTEM, {"role": "user", "content": LONG}]
    seen(written(history, (",", ":")), known)
    for more in ({"metadata": {"messages": history}}, {'a","messages': history}, {"x": '{"messages":' + json.dumps(history)}):
        raw = written([{"role": "user", "content": "short"}], (",", ":"), **more)
        assert seen(raw, known) == seen(raw, KnownTools())


def test_depth_is_checked_behind_known_messages() -> None:
    known, deep = KnownTools(), []
    for _ in range(250):
        deep = [deep]
    history = [SYSTEM, {"role": "user", "content": LONG * 8}]
    loads(written(history, (",", ":")), known)
    with pytest.raises(Refusal, match="nested deeper"):
        loads(written([*history, {"role": "user", "content": deep}], (",", ":")), known)


def test_half_an_emoji_behind_known_messages_is_mended() -> None:
    known = KnownTools()
    history = [SYSTEM, {"role": "user", "content": LONG}]
    seen(written(history, (",", ":")), known)
    raw = written([*history, {"role": "user", "content": "MARK"}], (",", ":")).replace(b"MARK", rb"\ud83d")
    assert seen(raw, known) == seen(raw, KnownTools())


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    known = KnownConversations(keep_bytes=4 * ENOUGH, keep=3)

    def keep(name: str, size: int) -> None:
        messages = [{"role": "user", "content": name + "y" * size}]
        span = orjson.dumps(messages)
        raw = b'{"messages":%s}' % span
        known.keep(raw, span, messages, known.cut(raw))

    for name in "abcd":
        keep(name, ENOUGH)
    assert [k.text[26:27] for k in known._known] == [b"b", b"c", b"d"]
    keep("e", 2 * ENOUGH)
    assert [k.text[26:27] for k in known._known] == [b"d", b"e"] and known._size == sum(len(k.text) for k in known._known)
    keep("f", 5 * ENOUGH)
    assert len(known._known) == 2


def test_a_list_remembers_nothing_of_a_plain_one() -> None:
    plain = [1, 2]
    assert folded(plain, "n", 0, lambda before, first: before + len(plain) - first) == 2
    first = Messages([1, 2])
    assert folded(first, "n", 0, lambda before, at: before + len(first) - at) == 2
    second = Messages([1, 2, 3], 2, copy.copy(first.facts))
    assert folded(second, "n", 0, lambda before, at: (before, at)) == (2, 2)
