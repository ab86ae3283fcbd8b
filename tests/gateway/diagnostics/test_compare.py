"""Every kind of edit an agent was seen to make, found and named; and laws that hold for any two requests."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.diagnostics.compare import REMEDIES, compare, parts

TOOLS = [
    {"type": "function", "function": {"name": n, "parameters": {"type": "object", "required": ["a"]}}} for n in ("read", "grep")
]
SYSTEM = "You are an agent.\nToday's date: 2026-11-29 10:15:00\nBe brief. " + "Rules. " * 30
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"a": 1, "b": "é"}'}}
BASE = {
    "model": "m",
    "tools": TOOLS,
    "messages": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Fix the bug in the parser module please."},
        {"role": "assistant", "content": "I will look.", "reasoning_content": "The user wants a fix.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "line one of the file\n" * 20},
        {"role": "assistant", "content": "It is the tokenizer that is wrong."},
        {"role": "user", "content": "Then repair it and run the tests."},
    ],
}


def edited(*path: object, to: object) -> dict:
    body = copy.deepcopy(BASE)
    target = body
    for step in path[:-1]:
        target = target[step]
    if to is None:
        del target[path[-1]]
    else:
        target[path[-1]] = to
    return body


def with_messages(messages: list) -> dict:
    return BASE | {"messages": messages}


M = BASE["messages"]
CASES = {
    "append": (
        with_messages([*M, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks"}]),
        "messages[6]",
    ),
    "identical": (copy.deepcopy(BASE), ""),
    "clock": (edited("messages", 0, "content", to=SYSTEM.replace("10:15:00", "10:16:41")), "messages[0].content"),
    "system_changed": (edited("messages", 0, "content", to=SYSTEM.replace("an agent", "a pirate")), "messages[0].content"),
    "tools_reordered": (BASE | {"tools": TOOLS[::-1]}, "tools[0]"),
    "tools_rewritten": (
        BASE
        | {
            "tools": [
                {"function": {"parameters": t["function"]["parameters"], "name": t["function"]["name"]}, "type": "function"}
                for t in TOOLS
            ]
        },
        "tools[0]",
    ),
    "tools_changed": (BASE | {"tools": TOOLS[:1]}, "tools[1]"),
    "reasoning_stripped": (edited("messages", 2, "reasoning_content", to=None), "messages[2].content"),
    "tool_call_rewritten": (
        edited(
            "messages", 2, "tool_calls", to=[CALL | {"function": {"name": "read", "arguments": json.dumps({"b": "é", "a": 1})}}]
        ),
        "messages[2].tool_calls[0]",
    ),
    "tool_output_replaced": (edited("messages", 3, "content", to="[Old tool result content cleared]"), "messages[3].content"),
    "compaction": (
        with_messages([M[0], {"role": "user", "content": "Summary: the tokenizer is wrong."}, M[5]]),
        "messages[1].content",
    ),
    "rewind": (with_messages([*M[:5], {"role": "user", "content": "No, leave it as it is."}]), "messages[5].content"),
    "message_changed": (edited("messages", 1, "content", to="Fix the bug in the lexer module please."), "messages[1].content"),
    "thinking_changed": (BASE | {"chat_template_kwargs": {"enable_thinking": False}}, "thinking"),
    "other_session": (with_messages([{"role": "user", "content": "Something else entirely"}]) | {"tools": TOOLS}, "messages[0]"),
}


def test_every_kind_with_a_remedy_has_a_case() -> None:
    assert set(CASES) == set(REMEDIES)


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_of_edit_is_named_and_placed(kind: str) -> None:
    after, place = CASES[kind]
    found = compare(BASE, after)
    assert (found.kind, found.place) == (kind, place)
    assert bool(found.remedy) == (kind not in ("append", "identical"))
    assert 0 <= found.kept <= found.total == sum(len(p.text) for p in parts(after))


def test_the_first_differing_character_is_named_with_its_surroundings() -> None:
    found = compare(BASE, CASES["clock"][0])
    assert found.offset == SYSTEM.index("5:00") and "10:15:00" in found.before and "10:16:41" in found.after


def test_other_spellings_of_the_same_edits() -> None:
    inline = edited("messages", 4, "content", to="<think>\nhm\n</think>\n\n" + M[4]["content"])
    assert compare(inline, BASE).kind == "reasoning_stripped"
    assert compare(BASE, with_messages(M[:3])).kind == "rewind"  # regenerate: a beginning of what was sent
    marked = edited(
        "messages", 1, "content", to=[{"type": "text", "text": M[1]["content"], "cache_control": {"type": "ephemeral"}}]
    )
    assert compare(BASE, marked).kind == "identical"  # moving cache marks are no edit
    trimmed = with_messages([*M[:2], *M[4:]])
    assert compare(BASE, trimmed).kind == "compaction"
    neighbour = with_messages([M[0], {"role": "user", "content": "Another user with the same agent. " * 40}])
    assert compare(BASE, neighbour).kind == "other_session"
    counter = edited("messages", 1, "content", to=M[1]["content"] + " <total_tokens>9123 tokens left</total_tokens>")
    later = edited("messages", 1, "content", to=M[1]["content"] + " <total_tokens>8001 tokens left</total_tokens>")
    assert compare(counter, later).kind == "clock"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3),
    lambda c: (
        st.lists(c, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "text", "tool_calls", "function", "arguments", "name"]), c, max_size=4
        )
    ),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=6) | JSON},
    optional={"tool_calls": JSON, "reasoning_content": st.text(max_size=4)},
)
BODY = st.fixed_dictionaries({"messages": st.lists(MESSAGE | JSON, max_size=5)}, optional={"tools": st.lists(JSON, max_size=3)})


@given(BODY, BODY)
def test_any_two_bodies_compare_and_the_common_part_is_common(a: dict, b: dict) -> None:
    found = compare(a, b)
    text_a, text_b = ("".join(p.text for p in parts(x)) for x in (a, b))
    assert found.kind in REMEDIES and text_a[: found.kept] == text_b[: found.kept]
    assert compare(a, a).kind == "identical"
    assert compare(a, a | {"messages": [*a["messages"], {"role": "user", "content": "more"}]}).kind == "append"
