"""Nonsense in, one clear refusal out: no request and no upstream's chunk may make a dialect fail in any other way."""

import copy
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.messages import Messages
from gateway.dialects.responses import Responses
from gateway.errors import Refusal
from gateway.sse import Chunk
from gateway.turn import Received, Turn
from tests.support.fake_upstream import chunk, finish, tool_call, usage

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.sampled_from(["", "x", "text", "function", "auto"]),
    lambda v: (
        st.lists(v, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "id", "name", "role"]), v, max_size=3)
    ),
    max_leaves=6,
)
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "stream": True,
    "system": [{"type": "text", "text": "s", **MARK}],
    "tools": [
        {"name": "run", "description": "d", "input_schema": {"type": "object"}, **MARK},
        {"type": "bash_1", "name": "bash"},
    ],
    "tool_choice": {"type": "tool", "name": "run", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 100, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["END"],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [{"type": "text", "text": "late"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "1", "name": "run", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}], "is_error": True, **MARK},
                {"type": "document", "title": "t", "source": {"type": "content", "content": [{"type": "text", "text": "d"}]}},
                {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "d"}]},
            ],
        },
    ],
}
RESPONSES = {
    "model": "m",
    "stream": True,
    "store": False,
    "instructions": "i",
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}, "verbosity": "low"},
    "tool_choice": {"type": "function", "name": "run"},
    "parallel_tool_calls": True,
    "max_output_tokens": 9,
    "tools": [
        {"type": "function", "name": "run", "parameters": {}, "strict": False},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
        {"type": "web_search"},
    ],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": "x", "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "p"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "r"},
        {"type": "web_search_call"},
    ],
}
DIALECTS = {"messages": (Messages(), MESSAGES), "responses": (Responses(), RESPONSES)}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return (
        [path, *(p for k, v in inner for p in places(v, (*path, k)))] if path else [p for k, v in inner for p in places(v, (k,))]
    )


def spoiled(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(body)
    at = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return body


def read(name: str, raw: bytes) -> Turn:
    dialect = DIALECTS[name][0]
    return dialect.read(Turn(id="req_1", received=Received(route="/", headers={}, body=raw), dialect=dialect))


@pytest.mark.parametrize("name", DIALECTS)
def test_the_examples_are_good(name) -> None:
    assert len(read(name, orjson.dumps(DIALECTS[name][1])).body["messages"]) > 3


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=150)
@given(data=st.data())
def test_a_request_with_nonsense_in_one_place_is_read_or_refused(name, data) -> None:
    body = DIALECTS[name][1]
    path = data.draw(st.sampled_from(places(body)))
    try:
        turn = read(name, orjson.dumps(spoiled(body, path, data.draw(JSON))))
    except Refusal as refusal:
        assert 400 <= refusal.status < 500 and "\n" not in refusal.text
    else:
        orjson.dumps(turn.body)
        assert all(isinstance(m["content"], str) for m in turn.body["messages"])


@pytest.mark.parametrize("name", DIALECTS)
@given(raw=st.binary(max_size=20) | JSON.map(orjson.dumps))
def test_any_bytes_are_read_or_refused(name, raw) -> None:
    with pytest.raises(Refusal):
        read(name, raw)


CHUNKS = [
    chunk({"role": "assistant", "content": "a", "reasoning_content": "t", "refusal": "r"}),
    chunk({"thinking_blocks": [{"type": "thinking", "thinking": "t", "signature": "s"}]}),
    tool_call(0, '{"a":', "c", "run"),
    tool_call(1, "{}", "d", "patch"),
    finish("stop"),
    usage(1, 2, 3),
]


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=150)
@given(data=st.data())
def test_an_upstream_that_sends_nonsense_is_written_or_reported(name, data) -> None:
    at = data.draw(st.integers(0, len(CHUNKS) - 1))
    path = data.draw(st.sampled_from(places(CHUNKS[at])))
    chunks = [*CHUNKS[:at], spoiled(CHUNKS[at], path, data.draw(JSON)), *CHUNKS[at + 1 :]]
    turn = read(name, orjson.dumps(DIALECTS[name][1]))
    one, whole = turn.dialect.writer(turn), turn.dialect.writer(turn)
    try:
        assert one.feed([Chunk.of(c) for c in chunks]) + one.finish()
    except Refusal as refusal:
        assert one.error(refusal)
    answer = (
        {"choices": [{"message": chunks[at]["choices"][0]["delta"]}]} if path[0] == "choices" and len(path) > 3 else chunks[at]
    )
    try:
        orjson.loads(whole.whole(answer))
    except Refusal as refusal:
        assert refusal.status >= 500
