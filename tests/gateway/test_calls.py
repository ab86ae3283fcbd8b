"""Fragments of tool calls, bent in every way that servers bend them: record, tool check and writers see the same calls."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import Answer
from gateway.calls import Call, Calls, Closing, arguments
from gateway.config import Policy
from gateway.dialects.chat import Chat
from gateway.dialects.items import Items
from gateway.sse import Chunk, event, parse
from gateway.toolcheck_watch import ToolCheck
from gateway.turn import Received, Turn
from tests.support.fake_upstream import chunk, finish

JSONS = st.recursive(st.none() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=8)
TEXTS = (
    JSONS.map(json.dumps)
    | JSONS.map(partial(json.dumps, ensure_ascii=False, indent=1))
    | st.text(alphabet='{}[]"\\ a\xa0:1', max_size=30)
)


@given(st.lists(TEXTS, max_size=3).map("".join), st.lists(st.integers(0, 200), max_size=8))
def test_an_object_that_comes_in_pieces_is_whole_exactly_when_it_is_one(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    closing, parts = Closing(), []
    for a, b in zip(edges, edges[1:], strict=False):
        parts.append(text[a:b])
        assert closing.whole(parts) == (arguments("".join(parts)) is not None)


def test_no_piece_of_a_long_call_is_read_twice(monkeypatch) -> None:
    """Names in every fragment, and a brace at the end of each: reading all of them behind each one held up others for 23 s."""
    parsed = []
    monkeypatch.setattr("gateway.calls.arguments", lambda text: parsed.append(text) or arguments(text))
    calls, made = Calls(), []
    for text in ['{"path":"', *["}"] * 2000, '"}', *[" "] * 2000]:
        call, said = calls.take(
            0, {"index": 0, "function": {"name": "read", "arguments": text}}, lambda: made.append(Call()) or made[-1]
        )
        call.parts.append(said)
    assert len(parsed) <= 2 and made[0].arguments == '{"path":"' + "}" * 2000 + '"}'


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stream": True}
Seen = list[tuple[str, str]]


def pieces(calls: Seen, cuts: list[list[int]], index: str, ids: str, names: str, as_object: bool) -> list[dict[str, Any]]:
    """The deltas of `calls`, one call after the other, as a server of these habits writes them."""
    out = []
    for i, (name, text) in enumerate(calls):
        inside = sorted({c % len(text) for c in cuts[i]} - {0}) if not as_object else []
        for k, (a, b) in enumerate(zip([0, *inside], [*inside, len(text)], strict=True)):
            piece: dict[str, Any] = {} if index == "none" else {"index": i if index == "own" else 0}
            if ids == "first" and k == 0 or ids == "every":
                piece["id"] = f"call_{i}"
            function: dict[str, Any] = {"arguments": json.loads(text) if as_object else text[a:b]}
            if k == 0 or names == "every":
                function["name"] = name
            out.append(chunk({"tool_calls": [piece | {"function": function}]}))
    return [*out, finish("tool_calls")]


def recorded(chunks: list[dict[str, Any]]) -> Seen:
    """By the answer, whose blocks may be parsed or glanced at."""
    one, two, raw = Answer(0.0), Answer(0.0), b"".join(map(event, chunks))
    one.observe(parse(raw), 1.0)
    two.glance(raw, 1.0)
    seen = [[(c.name, c.arguments) for _, c in answer.tool_calls] for answer in (one, two)]
    assert seen[0] == seen[1]
    return seen[0]


def written(chunks: list[dict[str, Any]]) -> Seen:
    items = Items()
    events = [e for c in chunks for e in items.feed(c)] + list(items.finish())
    return [(item.name, item.text) for verb, item, _ in events if verb == "end"]


def checked(chunks: list[dict[str, Any]]) -> Seen:
    turn = Turn(id="req_1", received=Received(route="/", headers={}, body=b""), dialect=Chat())
    turn = turn.start(b"", BODY, "m", True).but(policy=Policy())
    watch = ToolCheck().watch(turn, Answer(0.0))
    out = [c for c in chunks for c in watch.feed([Chunk.of(c)])] + list(watch.finish())
    calls = [t["function"] for c in out for choice in c.data["choices"] for t in choice["delta"].get("tool_calls", ())]
    return [(f["name"], f["arguments"]) for f in calls]


VALUES = st.dictionaries(st.sampled_from("ab"), st.text('x"{}\\', max_size=5) | st.dictionaries(st.just("c"), st.integers(0, 9)))


@given(
    calls=st.lists(st.tuples(st.sampled_from(["read", "write"]), VALUES.map(json.dumps)), min_size=1, max_size=4),
    cuts=st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=4, max_size=4),
    index=st.sampled_from(["own", "same", "none"]),
    ids=st.sampled_from(["first", "every", "never"]),
    names=st.sampled_from(["first", "every"]),
    as_object=st.booleans(),
)
def test_bent_fragments_are_the_calls_they_were(calls, cuts, index, ids, names, as_object) -> None:
    chunks = pieces(calls, cuts, index, ids, names, as_object)
    want = [(name, json.loads(text)) for name, text in calls]
    for see in (recorded, written, checked):
        assert [(name, json.loads(text)) for name, text in see(chunks)] == want, see.__name__


def fragment(arguments: str, index: int, id: str = "", name: str = "") -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments} | ({"name": name} if name else {})} | ({"id": id} if id else {})


ODD = [
    # interleaved, and the index of the first one used again
    [fragment('{"a":', 0, "1", "read"), fragment('{"b":', 1, "2", "read"), fragment("1}", 0), fragment("2}", 1)]
    + [fragment('{"c":', 0, "3", "read"), fragment("3}", 0)],
    # the id comes behind the name
    [fragment("", 0, "", "read"), fragment('{"a":1}', 0, "1"), fragment("", 1, "", "read"), fragment('{"b":2}', 1, "2")]
    + [fragment('{"c":3}', 2, "3", "read")],
    # all in one delta
    [[fragment('{"a":1}', 0, "1", "read"), fragment('{"b":2}', 0, "2", "read"), fragment('{"c":3}', 0, "3", "read")]],
    # a call without arguments, then one at the same index
    [fragment('{"a":1}', 0, "", "read"), fragment('{"b":2}', 0, "", "read"), fragment('{"c":3}', 0, "", "read")],
]


@pytest.mark.parametrize("deltas", ODD)
@pytest.mark.parametrize("see", [recorded, written, checked])
def test_calls_that_share_an_index_are_told_apart(see, deltas) -> None:
    chunks = [chunk({"tool_calls": d if isinstance(d, list) else [d]}) for d in deltas]
    assert see([*chunks, finish("tool_calls")]) == [("read", '{"a":1}'), ("read", '{"b":2}'), ("read", '{"c":3}')]


@pytest.mark.parametrize("see", [recorded, written, checked])
def test_a_call_without_arguments_is_over_when_another_name_begins(see) -> None:
    deltas = [fragment("", 0, "", "read"), fragment('{"a":1}', 0, "", "write")]
    first, second = see([*(chunk({"tool_calls": [d]}) for d in deltas), finish("tool_calls")])
    assert first[0] == "read" and first[1] in ("", "{}") and second == ("write", '{"a":1}')
