"""Answers read back from a client's dialect: what our own writers wrote means the same when it is read again."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import Answer
from gateway.dialects.messages import Messages
from gateway.dialects.responses import Responses
from gateway.errors import UpstreamError
from gateway.plugin.calls import Calls, client_body
from gateway.plugin.read_answers import READERS
from gateway.sse import Chunk
from gateway.turn import Received, Turn
from tests.support.fake_upstream import content, finish, message, reasoning, tool_call, usage

ASKS = {
    "messages": {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"model": "m", "input": "hi"},
}
DIALECTS = {"messages": Messages(), "responses": Responses()}
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
CALLS = st.lists(
    st.dictionaries(st.text(st.characters(codec="ascii"), max_size=5), st.integers(-9, 9) | TEXTS, max_size=3), max_size=3
)


def turn(name: str) -> Turn:
    received = Received(route="/", headers={}, body=orjson.dumps(ASKS[name]))
    return DIALECTS[name].read(Turn(id="req_1", received=received, dialect=DIALECTS[name]))


def observed(chunks: list[Chunk]) -> dict[str, Any]:
    answer = Answer(0.0)
    answer.observe(chunks, 1.0)
    calls = [(c.id, c.name, orjson.loads(c.arguments or "{}")) for _, c in answer.tool_calls]
    texts = {name: c.text for (_, name), c in answer.channels.items() if name != "tool_calls"}
    return {"calls": calls, "texts": texts, "finish": answer.finish, "usage": answer.usage}


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"chat"}))
@given(thought=TEXTS | st.none(), text=TEXTS | st.none(), calls=CALLS, size=st.integers(1, 40), cut=st.booleans())
def test_a_streamed_answer_survives_being_written_and_read(name, thought, text, calls, size, cut) -> None:
    parts = [reasoning(thought)] * bool(thought) + [content(text)] * bool(text)
    parts += [tool_call(i, orjson.dumps(c).decode(), f"c{i}", "run") for i, c in enumerate(calls)]
    reason = "length" if cut and not calls else "tool_calls" if calls else "stop"
    chunks = [Chunk.of(p) for p in (*parts, finish(reason), usage(12, 2, 8))]
    writer, reader = DIALECTS[name].writer(turn(name)), READERS[name]()
    wire = writer.feed(chunks) + writer.finish()
    read = [c for i in range(0, len(wire), size) for c in reader.item(wire[i : i + size])]
    before, after = observed(chunks), observed(read)
    assert {k: before[k] for k in ("calls", "texts", "finish")} == {k: after[k] for k in ("calls", "texts", "finish")}
    assert after["usage"]["prompt_tokens"] == 12 and after["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"chat"}))
@given(thought=TEXTS | st.none(), text=TEXTS | st.none(), calls=CALLS)
def test_a_whole_answer_survives_being_written_and_read(name, thought, text, calls) -> None:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": "run", "arguments": orjson.dumps(c).decode()}}
        for i, c in enumerate(calls)
    ]
    more = ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": made} if made else {})
    before = message(text, "tool_calls" if made else "stop", **more)
    after = READERS[name]().whole(orjson.loads(DIALECTS[name].writer(turn(name)).whole(before)))
    ours, theirs = before["choices"][0], after["choices"][0]
    assert (theirs["message"]["content"], theirs["message"].get("reasoning_content")) == (text, thought)
    assert [c["function"] for c in theirs["message"].get("tool_calls", [])] == [c["function"] for c in made]
    assert theirs["finish_reason"] == ours["finish_reason"] and after["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("messages", {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}),
        ("responses", {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "busy"}}}),
    ],
)
def test_an_error_event_is_an_error(name, event) -> None:
    with pytest.raises(UpstreamError, match="busy"):
        READERS[name]().item(event)


@pytest.mark.parametrize("name", READERS)
@given(
    data=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "delta", "item", "content", "output", "text", "index", "message", "usage", "response"]),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_nonsense_is_read_as_little_and_never_raises(name, data) -> None:
    if isinstance(data, dict) and data.get("type") not in ("error", "response.failed"):
        READERS[name]().item(data)
        READERS[name]().whole(data)


def test_what_litellm_put_into_a_body_is_taken_out_again() -> None:
    theirs = {"model": "m", "metadata": {"user_id": "u"}, "messages": []}
    litellm = theirs | {"metadata": {"headers": {"authorization": "x"}, "requester_metadata": {"user_id": "u"}}}
    assert (
        client_body(litellm | {"litellm_metadata": {"user_api_key": "k"}, "secret_fields": {}, "litellm_call_id": "1"}) == theirs
    )
    assert client_body({"model": "m", "metadata": {"user_api_key": "k"}}) == {"model": "m"}


def test_a_call_that_never_ends_is_let_go_and_recorded(tmp_path, monkeypatch) -> None:
    from gateway.config_file import parse
    from gateway.plugin import calls as module

    monkeypatch.setattr(module, "KEEP_CALLS", 2)
    calls = Calls(parse({"records": {"path": str(tmp_path / "r.jsonl")}}, "test", {}))
    data = [{"model": "m", "messages": [{"role": "user", "content": str(i)}], "metadata": {}} for i in range(4)]
    began = [calls.begin("acompletion", d, "") for d in data]
    assert [calls.find(d) is not None for d in data] == [False, False, True, True]
    for call in began:
        calls.end(call)
        calls.end(call)
    calls.close()
    lines = [orjson.loads(line) for line in (tmp_path / "r.jsonl").read_bytes().splitlines()]
    assert [r["outcome"] for r in lines] == ["cancelled"] * 4 and all(calls.find(d) is None for d in data)


def test_only_the_plugin_file_imports_litellm_on_top_and_nobody_imports_it() -> None:
    root = Path(__file__).resolve().parents[3]
    for path in (root / "gateway").rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        if path.name != "litellm_plugin.py":
            assert not any(n.split(".")[0] == "litellm" for n in names), path
        assert "gateway.litellm_plugin" not in names, path


def test_every_hook_is_defined_on_the_class_that_litellm_looks_at() -> None:
    """It runs `async_pre_call_hook` only when the callback's own class has it."""
    tree = ast.parse((Path(__file__).resolve().parents[3] / "gateway/litellm_plugin.py").read_text())
    (plugin,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Moorage"]
    hooks = {node.name for node in plugin.body if isinstance(node, ast.AsyncFunctionDef)}
    assert {"async_pre_call_hook", "async_pre_call_deployment_hook", "async_post_call_streaming_iterator_hook"} <= hooks
    (parent,) = plugin.bases
    assert parent.id == "CustomLogger" and not any("log_success" in name for name in hooks)  # it calls aborted streams a success
