"""Messages as clients send them become one form."""

import json

import pytest

from engine.text import history
from engine.text.history import CallMemory
from engine.text.messages import normalise, normalise_tools, split_thought
from engine.text.parser import OutputParser
from engine.text.stream import Thought
from engine.text.text_model import load_text_model
from tests.support.text import backend, tool, write_tokenizer


def one(**message):
    return normalise([message]).messages[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
        (["a", {"text": "b", "cache_control": {"type": "ephemeral"}}], "a\nb"),
        ([], ""),
    ],
)
def test_content_is_a_string(content, text):
    assert one(role="user", content=content) == {"role": "user", "content": text}


def test_what_nothing_reads_is_reported():
    found = normalise([{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": 1}], "weight": 2}])
    assert found.ignored == {"messages[].weight", "messages[].content[].cache_control"}


def test_the_input_is_not_changed():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = json.dumps(given)
    assert normalise(given).messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    ("arguments", "value", "repaired"),
    [
        ('{"a": 1}', {"a": 1}, 0),
        ({"a": 1}, {"a": 1}, 0),
        ("", {}, 0),
        (None, {}, 0),
        ("{broken", {"arguments": "{broken"}, 1),
        ("[1]", {"arguments": "[1]"}, 1),
    ],
)
def test_arguments_are_an_object(arguments, value, repaired):
    found = normalise([{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}])
    assert found.messages[0]["content"] == "" and found.repaired == repaired
    assert found.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": value}


def test_old_spellings():
    assert one(role="function", name="f", content="r") == {"role": "tool", "content": "r", "name": "f"}
    old = one(role="assistant", content=None, function_call={"name": "f", "arguments": "{}"})
    assert old["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert one(role="assistant", content="x", reasoning="why")["reasoning_content"] == "why"


def test_inline_thoughts_of_old_answers_become_reasoning():
    message = one(role="assistant", content="<think>\nwhy\n</think>\n\nbecause")
    assert (message["reasoning_content"], message["content"]) == ("why", "because")
    assert split_thought("opened by the prompt\n</think>\n\nx", "</think>") == ("opened by the prompt", "x")
    kept = one(role="assistant", content="about </think>", reasoning_content="r")
    assert kept["content"] == "about </think>", "a client that has the field means its content literally"
    assert one(role="user", content="<think>x</think>y")["content"] == "<think>x</think>y"


def test_tools_pass_unchanged():
    tools = [tool("a"), tool("b")]
    assert normalise_tools(tools) is tools and normalise_tools(None) == []


def test_call_memory_forgets_the_oldest_and_ignores_edits(monkeypatch):
    monkeypatch.setattr(history, "MAX_CALLS", 2)
    memory = CallMemory()
    for i in range(3):
        memory.remember(f"c{i}", '{"b": 1, "a": 2}')

    def restored(call_id, arguments):
        call = {"id": call_id, "function": {"name": "f", "arguments": arguments}}
        return list(memory.restore(call)["function"]["arguments"])

    assert restored("c2", {"a": 2, "b": 1}) == ["b", "a"]
    assert restored("c0", {"a": 2, "b": 1}) == ["a", "b"], "forgotten"
    assert restored("c2", {"a": 3, "b": 1}) == ["a", "b"], "edited"


@pytest.mark.parametrize(
    "written, sent, same",
    [
        ('{"n": 1}', {"n": True}, False),
        ('{"n": false}', {"n": 0}, False),
        ('{"n": [1, {"m": true}]}', {"n": [1, {"m": 1}]}, False),
        ('{"n": null}', {"n": False}, False),
        ('{"n": "1"}', {"n": 1}, False),
        ('{"n": [1]}', {"n": [1, 2]}, False),
        ('{"n": 2.0}', {"n": 2}, True),  # as JavaScript writes it back
        ('{"b": [1.5, "x"], "a": {}}', {"a": {}, "b": [1.5, "x"]}, True),
    ],
)
def test_call_memory_tells_values_apart_that_python_takes_for_equal(written, sent, same):
    memory = CallMemory()
    memory.remember("c", written)
    call = {"id": "c", "function": {"name": "f", "arguments": sent}}
    assert memory.restore(call)["function"]["arguments"] is not sent if same else memory.restore(call) is call


def test_markers_that_are_control_tokens_still_reach_the_parser(tmp_path):
    """Some tokenizers mark <think> and <tool_call> as special; hiding them would show thoughts as answers."""
    content = json.loads(backend())
    for token in content["added_tokens"]:
        token["special"] = True
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = load_text_model(tmp_path)
    from engine.text.detokenizer import Detokenizer

    detokenizer, parser = Detokenizer(text.tokenizer, text.kept_ids), OutputParser(text.output)
    events = []
    for token in text.tokenizer.encode("<think>\nwhy\n</think>\n\nok<|im_end|>"):
        events += parser.feed(detokenizer.feed(token))
    events += parser.finish()
    assert "".join(e.text for e in events if isinstance(e, Thought)) == "why"
    assert "".join(e.text for e in events if not isinstance(e, Thought)) == "ok"


def test_a_template_of_its_own_for_tools(tmp_path):
    write_tokenizer(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    templates = {
        "default": "plain {{ messages[0].content }}",
        "tool_use": "{% for t in tools %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}",
    }
    config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = load_text_model(tmp_path)
    assert text.shows_tools

    def shown(tools):
        return text.tokenizer.decode(text.builder_for(tools).build([{"role": "user", "content": "hi"}], tools, {}).tokens)

    assert shown([]) == "plain hi" and "read_file" in shown([tool()])


def test_a_call_that_is_not_known_gets_the_key_order_of_its_schema() -> None:
    """After a restart: the grammar made the model write its arguments in that order, whatever the client made of them."""
    inner = {"type": "object", "properties": {"line": {"type": "integer"}, "text": {"type": "string"}}}
    properties = {"path": {"type": "string"}, "edits": {"type": "array", "items": inner}, "dry": {"type": "boolean"}}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": properties}}}]
    sent = {"note": 1, "edits": [{"text": "b", "other": 2, "line": 3}], "path": "a"}
    call = {"id": "c", "type": "function", "function": {"name": "edit", "arguments": sent}}
    own = CallMemory().restore(call, tools)["function"]["arguments"]
    assert own == sent
    assert json.dumps(own) == '{"path": "a", "edits": [{"line": 3, "text": "b", "other": 2}], "note": 1}'
    for other in ({"name": "unknown", "arguments": sent}, {"name": "edit", "arguments": {"edits": "text"}}):
        kept = CallMemory().restore({**call, "function": other}, tools)["function"]
        assert json.dumps(kept) == json.dumps(other)
