"""What an Anthropic Messages request means as chat completions, and what is said about it."""

import json
from typing import Any

import pytest

from gateway.dialects import thoughts
from gateway.dialects.messages_read import read
from gateway.errors import Refusal


def ask(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": list(messages) or [user("hi")]} | more


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if len(content) == 1 and isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return user(*content) | {"role": "assistant"}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} | more


def use(call_id: str, name: str = "run", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def result(call_id: str, content: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content} | more


def call(call_id: str, arguments: str, name: str = "run") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat(body: dict[str, Any]) -> dict[str, Any]:
    return read(body)[0]


def rules(body: dict[str, Any]) -> list[str]:
    return [d.rule for d in read(body)[2]]


def test_a_plain_question_is_a_plain_question() -> None:
    body = ask(system="Be brief.", temperature=0.5, top_k=40, stop_sequences=["END"])
    assert read(body) == (
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
            "stop": ["END"],
            "max_tokens": 100,
            "temperature": 0.5,
            "top_k": 40,
        },
        (),
        (),
    )


def test_a_stream_always_asks_for_usage() -> None:
    body = chat(ask(stream=True))
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}


def test_a_whole_tool_turn_keeps_its_order() -> None:
    messages = [
        user("go"),
        assistant(text("Looking."), use("a", path="x", n=1), use("b")),
        user(text("by the way"), result("b", "B"), result("a", [text("A1"), text("A2")]), text("and then?")),
    ]
    assert chat(ask(*messages))["messages"] == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Looking.", "tool_calls": [call("a", '{"path":"x","n":1}'), call("b", "{}")]},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A1\n\nA2"},
        {"role": "user", "content": "by the way\n\nand then?"},
    ]
    assert rules(ask(*messages)) == ["result_order"]


def test_neighbours_of_one_role_are_one_message() -> None:
    messages = [user("a"), user(text("b"), text("c")), assistant("x"), assistant(text("y"), use("1")), user(result("1"))]
    assert [m["content"] for m in chat(ask(*messages))["messages"]] == ["a\n\nb\n\nc", "xy", "ok"]


def test_a_result_in_a_later_message_still_follows_its_call() -> None:
    messages = [assistant(use("1")), user("wait"), user(result("1"))]
    assert [m["role"] for m in chat(ask(*messages))["messages"]] == ["assistant", "tool", "user"]


def test_failed_tools_say_so_once() -> None:
    said = [("no such file", "Error: no such file"), ("<tool_use_error>x", "<tool_use_error>x"), ("error: y", "error: y")]
    for given, expected in said:
        body = ask(assistant(use("1")), user(result("1", given, is_error=True)))
        assert chat(body)["messages"][-1]["content"] == expected
        assert rules(body) == (["tool_error"] if given != expected else [])


def test_an_empty_result_is_an_empty_result() -> None:
    for content in (None, [], ""):
        assert chat(ask(assistant(use("1")), user(result("1", content))))["messages"][-1]["content"] == ""


def test_a_system_message_in_mid_conversation_keeps_its_place_and_says_what_it_is() -> None:
    body = ask(user("a"), {"role": "system", "content": "agents: x"}, assistant("ok"), {"role": "system", "content": "late"})
    assert [(m["role"], m["content"]) for m in chat(body)["messages"]] == [
        ("user", "a\n\n<system-reminder>\nagents: x\n</system-reminder>"),
        ("assistant", "ok"),
        ("user", "<system-reminder>\nlate\n</system-reminder>"),
    ]
    (decision,) = read(body)[2]
    assert decision.rule == "late_system" and "2 times" in decision.reason


def think(thought: str, signature: str | None) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thought} | ({} if signature is None else {"signature": signature})


def test_signed_thoughts_come_back_and_others_are_left_out_aloud() -> None:
    ours = think("I see", thoughts.sign("I see"))
    foreign = think("hm", "EqQBCkYIBxgC")
    bad = [think("x", None), think("x", ""), think("changed", thoughts.sign("I see"))]
    body = ask(user("q"), assistant(ours, text("a")), user("q"), assistant(foreign, text("b"), *bad), user("q"))
    messages = chat(body)["messages"]
    assert messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "I see"}
    assert messages[3]["reasoning_content"] == "hm" and messages[3]["thinking_blocks"] == [foreign]
    assert set(rules(body)) == {"unsigned_thinking"}


def test_redacted_thoughts_and_a_providers_own_blocks_are_left_out_aloud() -> None:
    blocks = [{"type": "redacted_thinking", "data": "xx"}, {"type": "server_tool_use", "id": "s", "name": "web_search"}]
    body = ask(user("q"), assistant(*blocks, text("a")), user("q"))
    assert chat(body)["messages"][1] == {"role": "assistant", "content": "a"}
    assert rules(body) == ["redacted_thinking", "provider_block"]


def test_prefill_is_continued() -> None:
    body = chat(ask(user("q"), assistant("The answer is")))
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}


@pytest.mark.parametrize(
    "messages",
    [
        [user(IMAGE)],
        [user(PDF)],
        [user({"type": "container_upload"})],
        [assistant(use("1")), user(result("1", [text("see"), IMAGE]))],
    ],
)
def test_what_is_no_text_is_refused_with_its_place(messages) -> None:
    with pytest.raises(Refusal) as caught:
        read(ask(*messages))
    refusal = caught.value
    assert refusal.status == 400 and refusal.code == "unsupported_content" and refusal.param.startswith("messages[")
    assert "text only" in refusal.message and refusal.remedy


def test_text_documents_are_text() -> None:
    plain = {"type": "document", "title": "notes.txt", "source": {"type": "text", "media_type": "text/plain", "data": "abc"}}
    parts = {"type": "document", "source": {"type": "content", "content": [text("x"), text("y")]}}
    assert chat(ask(user(plain, parts)))["messages"][0]["content"] == "notes.txt\nabc\n\nx\n\ny"


TOOL = {"name": "run", "description": "Run it", "input_schema": {"type": "object", "properties": {}}}


def test_tools_and_what_a_provider_alone_can_run() -> None:
    tools = [TOOL | {"type": "custom", "strict": True}, {"type": "web_search_20250305", "name": "web_search"}]
    body = ask(tools=tools)
    function = {"name": "run", "description": "Run it", "parameters": TOOL["input_schema"], "strict": True}
    assert chat(body)["tools"] == [{"type": "function", "function": function}]
    assert rules(body) == ["provider_tool"]


CHOICES = [
    ({"type": "auto"}, {"tool_choice": "auto"}),
    ({"type": "any"}, {"tool_choice": "required"}),
    ({"type": "none"}, {"tool_choice": "none"}),
    ({"type": "tool", "name": "run"}, {"tool_choice": {"type": "function", "function": {"name": "run"}}}),
    ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
]


@pytest.mark.parametrize(("given", "expected"), CHOICES)
def test_tool_choice(given, expected) -> None:
    body = chat(ask(tools=[TOOL], tool_choice=given))
    assert {k: body[k] for k in ("tool_choice", "parallel_tool_calls") if k in body} == expected


def test_what_is_not_applied_is_said_and_what_is_unknown_passes() -> None:
    body = ask(context_management={"edits": []}, service_tier="auto", min_p=0.1, chat_template_kwargs={"a": 1})
    assert rules(body) == ["context_management", "service_tier"]
    given = chat(body)
    assert given["min_p"] == 0.1 and given["chat_template_kwargs"] == {"a": 1}
    assert not {"context_management", "service_tier"} & given.keys()


def test_thinking_effort_format_and_user_have_their_places() -> None:
    config = {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    body = ask(thinking={"type": "adaptive", "display": "omitted"}, output_config=config, metadata={"user_id": "u1"})
    given = chat(body)
    assert given["thinking"] == {"type": "adaptive"} and given["output_config"] == {"effort": "high"}
    assert given["response_format"]["json_schema"]["schema"] == {"type": "object"} and given["user"] == "u1"
    assert rules(body) == ["thinking_display"]


def test_cache_marks_become_hints_and_leave_no_trace() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [user(text("a")), assistant(use("1")), user(result("1", "r") | mark, text("b"))]
    body = ask(*messages, system=[text("s1"), text("s2") | hour], tools=[TOOL | mark])
    given, breakpoints, notes = read(body)
    assert [(b.message, b.kind, b.weight) for b in breakpoints] == [
        (-1, "client_breakpoint", 0.9),
        (0, "client_breakpoint", 1.0),
        (3, "client_breakpoint", 0.9),
    ]
    assert given["messages"][3]["role"] == "tool" and "cache_control" not in json.dumps(given) and not notes


def test_a_mark_that_moves_changes_nothing_that_is_sent() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    first = ask(user(text("a") | mark), system="s")
    later = ask(user(text("a")), assistant(text("b")), user(text("c") | mark), system="s")
    assert chat(later)["messages"][:2] == chat(first)["messages"]


BAD = [
    {"messages": "hi"},
    {"messages": []},
    {"messages": [7]},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": [user(7)]},
    {"messages": [user({"type": "text", "text": 1})]},
    {"messages": [user(result("unknown"))]},
    {"messages": [assistant({"type": "tool_use", "id": "1", "name": "f", "input": "{}"})]},
    {"system": 7},
    {"system": [IMAGE]},
    {"tools": {}},
    {"tools": [{}]},
    {"tool_choice": {"type": "any"}},
    {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
    {"tools": [TOOL], "tool_choice": {"type": "some"}},
    {"thinking": "on"},
    {"stop_sequences": "END"},
    {"stream": "yes"},
    {"model": ""},
    {"output_config": {"format": {"type": "xml"}}},
]


@pytest.mark.parametrize("change", BAD)
def test_bad_requests_are_refused_in_one_line(change) -> None:
    with pytest.raises(Refusal) as caught:
        read(ask() | change)
    assert caught.value.status == 400 and "\n" not in caught.value.text
