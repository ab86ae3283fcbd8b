"""What an OpenAI Responses request means as chat completions, and what is said about it."""

from typing import Any

import pytest

from gateway.dialects import thoughts
from gateway.dialects.responses_read import read
from gateway.errors import Refusal


def ask(*items: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "store": False, "input": list(items) or "hi"} | more


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": t} for t in texts]}


def call(call_id: str, arguments: str = "{}", name: str = "run", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments} | more


def output(call_id: str, value: Any = "ok", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": value}


def chat(body: dict[str, Any]) -> dict[str, Any]:
    return read(body)[0]


def rules(body: dict[str, Any]) -> list[str]:
    return [d.rule for d in read(body)[2]]


def chat_call(call_id: str, arguments: str = "{}", name: str = "run") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_plain_question_is_a_plain_question() -> None:
    body = {"model": "m", "input": "hi", "temperature": 0.5, "max_output_tokens": 9, "store": False}
    expected = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9, "temperature": 0.5}
    assert chat(body) == expected and rules(body) == []


def test_instructions_and_developer_messages_at_the_head_are_the_system_prompt() -> None:
    body = ask(said("developer", "A", "B"), said("system", "C"), said("user", "hi"), instructions="I")
    assert chat(body)["messages"] == [{"role": "system", "content": "I\n\nA\n\nB\n\nC"}, {"role": "user", "content": "hi"}]


def test_parallel_calls_are_one_message_and_their_outputs_follow_it() -> None:
    body = ask(
        said("user", "go"),
        said("assistant", "Looking."),
        call("a", '{"x": 1}'),
        call("b"),
        said("user", "hurry"),
        output("a", "A"),
        output("b", [{"type": "input_text", "text": "B1"}, {"type": "input_text", "text": "B2"}]),
        call("c"),
        output("c"),
    )
    assert chat(body)["messages"] == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Looking.", "tool_calls": [chat_call("a", '{"x": 1}'), chat_call("b")]},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
        {"role": "tool", "tool_call_id": "b", "content": "B1\n\nB2"},
        {"role": "user", "content": "hurry"},
        {"role": "assistant", "content": "", "tool_calls": [chat_call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    assert rules(body) == ["result_order"]


def test_two_messages_of_the_assistant_stay_apart_and_parts_of_one_do_not() -> None:
    assert chat(ask(said("assistant", "a", "b"), said("assistant", "c")))["messages"][0]["content"] == "ab\n\nc"


def test_the_bytes_of_arguments_stay_as_the_model_wrote_them() -> None:
    odd = '{ "n": 1.50,\n "s":"\\u00e9" }'
    assert chat(ask(call("a", odd), output("a")))["messages"][0]["tool_calls"][0]["function"]["arguments"] == odd


THOUGHTS = [
    ({"content": [{"type": "reasoning_text", "text": "T"}], "summary": []}, "T", []),
    ({"encrypted_content": thoughts.seal("whole"), "summary": [{"type": "summary_text", "text": "short"}]}, "whole", []),
    ({"encrypted_content": None, "summary": [{"type": "summary_text", "text": "short"}]}, "short", []),
    ({"encrypted_content": "gAAAA", "summary": []}, None, ["encrypted_reasoning"]),
    ({"encrypted_content": "moorage1:***", "summary": []}, None, ["encrypted_reasoning"]),
]


@pytest.mark.parametrize(("item", "thought", "expected"), THOUGHTS)
def test_reasoning_items(item, thought, expected) -> None:
    body = ask(said("user", "q"), {"type": "reasoning"} | item, call("a"), output("a"))
    assert chat(body)["messages"][1].get("reasoning_content") == thought and rules(body) == expected
    assert [m["role"] for m in chat(body)["messages"]] == ["user", "assistant", "tool"]


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Patch files", "format": GRAMMAR}


def test_custom_tools_are_functions_with_one_string() -> None:
    body = ask(
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": '*** "é"\n'},
        output("a", "Done", "custom_tool_call_output"),
        tools=[CUSTOM],
        tool_choice={"type": "custom", "name": "apply_patch"},
    )
    given, wire, _ = read(body)
    (tool,) = given["tools"]
    assert tool["function"]["parameters"]["required"] == ["input"] and "start: /.+/" in tool["function"]["description"]
    assert given["messages"][0]["tool_calls"] == [chat_call("a", '{"input":"*** \\"é\\"\\n"}', "apply_patch")]
    assert given["messages"][1] == {"role": "tool", "tool_call_id": "a", "content": "Done"}
    assert given["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}
    assert wire.names.custom == {"apply_patch"} and rules(body) == ["custom_tool"]


FUNCTION = {"type": "function", "name": "run", "description": "Run", "parameters": {"type": "object"}, "strict": False}


def test_tools_of_a_namespace_carry_its_name() -> None:
    space = {"type": "namespace", "name": "agents", "tools": [FUNCTION | {"name": "spawn"}]}
    body = ask(call("a", name="spawn", namespace="agents"), output("a"), tools=[FUNCTION, space])
    given, wire, _ = read(body)
    assert [t["function"]["name"] for t in given["tools"]] == ["run", "agents__spawn"]
    assert given["tools"][0]["function"] == {k: FUNCTION[k] for k in ("name", "description", "parameters", "strict")}
    assert given["messages"][0]["tool_calls"][0]["function"]["name"] == "agents__spawn"
    assert wire.names.spaces == {"agents__spawn": ("agents", "spawn")} and rules(body) == ["namespace"]


def test_built_in_tools_and_their_history_are_left_out_aloud() -> None:
    items = [{"type": "web_search_call", "id": "w"}, {"type": "local_shell_call", "call_id": "l"}]
    body = ask(said("user", "q"), *items, tools=[{"type": "web_search"}, {"type": "local_shell"}, FUNCTION])
    assert len(chat(body)["tools"]) == 1 and len(chat(body)["messages"]) == 1
    assert rules(body) == ["builtin_tool", "builtin_tool", "builtin_item", "builtin_item"]


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt", "background"])
def test_what_needs_a_store_is_refused_with_the_remedy(name) -> None:
    with pytest.raises(Refusal) as caught:
        read(ask(**{name: True if name == "background" else "x"}))
    assert caught.value.status == 400 and caught.value.param == name and caught.value.remedy


def test_what_is_not_applied_is_said_and_what_is_unknown_passes() -> None:
    body = ask(
        store=True, truncation="auto", metadata={"a": "b"}, client_metadata={"c": "d"}, include=["x"], min_p=0.1, user="u",
        prompt_cache_key="k", top_logprobs=0,
    )  # fmt: skip
    assert sorted(rules(body)) == ["client_metadata", "include", "metadata", "store", "truncation"]
    given = chat(body)
    assert (given["min_p"], given["user"], given["prompt_cache_key"]) == (0.1, "u", "k")
    assert not {"store", "metadata", "client_metadata", "include", "truncation"} & given.keys()


def test_formats_and_reasoning() -> None:
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    given = chat(ask(text={"format": schema, "verbosity": "low"}, reasoning={"effort": "none", "summary": None}))
    assert given["response_format"]["json_schema"] == {"name": "s", "schema": {"type": "object"}, "strict": True}
    assert given["verbosity"] == "low" and given["reasoning_effort"] == "none" and "reasoning" not in given
    assert chat(ask(text={"format": {"type": "json_object"}}))["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat(ask(text={"format": {"type": "text"}}))


CHOICES = [
    ("auto", "auto"),
    ("none", "none"),
    ("required", "required"),
    ({"type": "allowed_tools", "mode": "required"}, "required"),
]


@pytest.mark.parametrize(("given", "expected"), CHOICES)
def test_tool_choice(given, expected) -> None:
    assert chat(ask(tools=[FUNCTION], tool_choice=given, parallel_tool_calls=False))["tool_choice"] == expected


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
BAD = [
    {"input": []},
    {"input": 7},
    {"input": None},
    {"input": [7]},
    {"input": [{"type": "item_reference", "id": "msg_1"}]},
    {"input": [{"type": "compaction", "encrypted_content": "x"}]},
    {"input": [{"role": "tool", "content": "x"}]},
    {"input": [{"role": "user", "content": [IMAGE]}]},
    {"input": [call("a"), output("a", [IMAGE])]},
    {"input": [output("a")]},
    {"input": [call("a", arguments=None)]},
    {"tools": [FUNCTION | {"name": None}]},
    {"tools": {}},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "web_search"}},
    {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "other"}},
    {"text": {"format": {"type": "xml"}}},
    {"instructions": 7},
    {"include": "x"},
    {"stream": "yes"},
    {"model": None},
]


@pytest.mark.parametrize("change", BAD)
def test_bad_requests_are_refused_in_one_line(change) -> None:
    with pytest.raises(Refusal) as caught:
        read(ask() | change)
    assert caught.value.status == 400 and "\n" not in caught.value.text


def test_an_output_that_comes_late_stands_behind_its_own_call() -> None:
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"role": "user", "content": "meanwhile"},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "3", "output": "three"},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
    ]
    messages = read({"model": "m", "input": items})[0]["messages"]
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            calls = [m for m in messages[:i] if m["role"] == "assistant"][-1]["tool_calls"]
            assert message["tool_call_id"] in [c["id"] for c in calls]
