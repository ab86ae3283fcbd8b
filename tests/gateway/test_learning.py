"""The gateway learns what an agent edits: classification from fingerprints, weights and expectations that follow it."""

from __future__ import annotations

import copy
import json

import pytest

from engine.protocol import Hints
from gateway.anchors import derive
from gateway.diagnostics.compare import compare, parts_of
from gateway.dialects.chat import Chat
from gateway.learning import Agent, Learning, _hashed, _parts, _said, classify, fingerprint
from gateway.turn import Received, Session, Turn
from tests.gateway.diagnostics.test_compare import BASE, CASES
from tests.support.fake_upstream import FakeUpstream, Whole, message
from tests.support.gateway import Gateway, ask, settings

# What a fingerprint cannot tell apart, because it holds no text.
COARSER = {"clock": "system_changed", "tools_rewritten": "tools_changed", "identical": "append", "thinking_changed": "append"}


@pytest.mark.parametrize("kind", CASES)
def test_fingerprints_classify_as_the_texts_do(kind: str) -> None:
    after, _ = CASES[kind]
    assert compare(BASE, after).kind == kind
    before = fingerprint(BASE)
    assert classify(before, fingerprint(after)) == COARSER.get(kind, kind)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi"},
        {"role": "tool", "tool_call_id": "c", "content": "größe", "name": "x"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "a", "reasoning": "", "tool_calls": []},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "", "content": "x"},
        {"content": 3},
    ],
)
def test_the_parts_of_a_message_are_those_of_a_comparison_without_their_text(message: dict) -> None:
    assert list(_parts(3, _said(message))) == list(map(_hashed, parts_of(3, message)))


def turn(body: dict, session: str = "s", agent: str = "opencode", turn_class: str = "user") -> Turn:
    fresh = Turn(id="r", received=Received(route="/", headers={}, body=b""), dialect=Chat()).start(b"", body, "m", True)
    who = Session(session, "header:x", agent, turn_class)
    return fresh.but(session=who, hints=Hints(session=session, agent=agent, anchors=derive(body)))


def asked(learning: Learning, turn: Turn) -> Turn:
    """What the stage makes of a request, whose answer is then over."""
    out = learning.stage(turn)
    learning.learn(out)
    return out


def weights(hints: Hints) -> dict[tuple[str, str], float]:
    return {(a.kind, a.edge): a.weight for a in hints.anchors}


def stripping_session(learning: Learning, name: str, agent: str, turns: int) -> Turn:
    """A session whose client drops the newest thought at every turn."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    out = None
    for i in range(turns):
        for m in messages:
            m.pop("reasoning_content", None)
        messages += [
            {"role": "assistant", "content": f"a{i}", "reasoning_content": f"t{i}"},
            {"role": "user", "content": f"q{i}"},
        ]
        out = asked(learning, turn({"messages": copy.deepcopy(messages)}, name, agent))
    return out


def test_an_agent_that_strips_thoughts_is_expected_to_and_its_thinking_anchors_gain() -> None:
    learning = Learning()
    prior = weights(
        turn(
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "t"}]}
        ).hints
    )
    learned = stripping_session(learning, "one", "opencode", 30)
    assert learned.hints.expect == ("reasoning_stripped",)
    assert weights(learned.hints)["thinking", "start"] > prior["thinking", "start"] + 0.3
    other = learning.stage(turn(BASE, "two", "opencode"))  # a new session of the same agent profits
    assert other.hints.expect == ("reasoning_stripped",)
    assert learning.stage(turn(BASE, "three", "codex")).hints.expect == ()  # another agent does not


def test_an_agent_that_only_appends_keeps_its_turn_ends() -> None:
    learning, messages, out = Learning(), [{"role": "user", "content": "q"}], None
    for i in range(40):
        messages = [
            *messages,
            {"role": "assistant", "content": f"a{i}", "reasoning_content": "t"},
            {"role": "user", "content": f"q{i}"},
        ]
        out = asked(learning, turn({"messages": messages}))
    assert weights(out.hints)["turn", "end"] > 0.8 and weights(out.hints)["thinking", "start"] < 0.2 and out.hints.expect == ()


def test_side_requests_teach_nothing_and_memory_is_bounded() -> None:
    learning = Learning(sessions=3, agents=2)
    for i in range(10):
        asked(learning, turn(BASE, f"s{i}", f"agent{i}"))
    assert len(learning._sessions) == 3 and len(learning._agents) == 2
    before = dict(learning._sessions)
    side = turn({"messages": [{"role": "user", "content": "title"}]}, "s9", turn_class="side")
    assert asked(learning, side).hints.expect == ()
    assert learning._sessions == before


def test_no_client_waits_for_what_is_learned_from_its_request() -> None:
    learning = Learning()
    first, second = turn({"messages": BASE["messages"][:1]}), turn(BASE)
    learning.stage(first)
    assert not learning._sessions
    learning.learn(first)
    learning.stage(second)
    assert learning._agents["opencode"].seen == 0 and learning._sessions["s"] == fingerprint(first.body)
    learning.learn(second)
    assert learning._agents["opencode"].seen == 1 and learning._sessions["s"] == fingerprint(BASE)
    learning.learn(turn(BASE, "refused").but(hints=Hints()))  # before it had hints
    assert learning._sessions.keys() == {"s"}


async def test_what_a_gateway_saw_of_an_agent_stands_in_the_hints_of_its_next_session(tmp_path) -> None:
    thought = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    begun = [{"role": "user", "content": "q"}, thought, {"role": "user", "content": "r"}]
    stripped = [begun[0], {"role": "assistant", "content": "a"}, begun[2], thought, {"role": "user", "content": "s"}]
    async with FakeUpstream() as up, Gateway(settings(up.base), tmp_path) as gw:
        up.script(Whole(message()))
        for session, messages in (("one", begun), ("one", stripped), ("two", begun)):
            assert (await gw.post(ask(messages=messages), x_session_id=session, user_agent="opencode/1")).status == 200
            await gw.records(len(up.requests))  # all steps behind the answer are done
    expected = [r.json["moorage"].get("expect", []) for r in up.requests]
    assert expected == [[], [], ["reasoning_stripped"]]


def test_old_habits_fade() -> None:
    agent = Agent()
    for kind, times in (("compaction", 60), ("append", 2000)):
        for _ in range(times):
            agent.add(kind)
    assert agent.edits["compaction"] < 0.02 * agent.seen and agent.seen <= 200
    assert 0 <= agent.weight("system", "end", 0.9) <= 1


def test_huge_conversations_are_left_out() -> None:
    assert fingerprint({"messages": [{"role": "user", "content": str(i)} for i in range(5000)]}) is None


def test_memory_is_bounded_by_size_whatever_sessions_hold() -> None:
    learning, limit = Learning(keep_bytes=200_000), 200_000
    for i in range(60):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "x" * 1900})}}
        messages = [{"role": "user", "content": str(i)}] + [{"role": "assistant", "content": "", "tool_calls": [call]}] * (
            i % 7 * 4
        )
        for length in (len(messages) // 2 + 1, len(messages)):
            body = {"model": "m", "messages": messages[:length], "tools": [{"type": "function", "function": {"name": "f"}}]}
            learning._remember(f"s{i}", fingerprint(body))
        kept = learning._sessions.values()
        assert learning._size == sum(p.size for p in kept) <= limit
        assert learning._size >= sum(len(call) for p in kept for said in p.messages for call in said.calls)
    assert 1 < len(learning._sessions) < 60 and next(reversed(learning._sessions)) == "s59"
