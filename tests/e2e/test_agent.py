"""The main job: an agent talks to the gateway, the engine answers, and the log says what was reused. With the demo model."""

from __future__ import annotations

import json
import time

import openai
import pytest

from .agent import QUESTION, READ_FILE, Answer, ask, client, use
from .harness import MODEL, Service, get

pytestmark = pytest.mark.slow


def conversation(up: Service, **options) -> list[Answer]:
    """Question, tool call, tool result, answer."""
    sdk = client(up)
    messages: list[dict] = [{"role": "user", "content": QUESTION}]
    first = ask(sdk, messages, **options)
    assert first.calls, f"no tool call but: {first.content!r}"
    messages += [first.message(), *(use(call) for call in first.calls)]
    return [first, ask(sdk, messages, **options)]


def said(answer: Answer) -> tuple:
    """All that the model decided; a call's id is drawn at random."""
    return answer.content, answer.reasoning, [(call["name"], call["arguments"]) for call in answer.calls], answer.finish


def test_streams_reasoning_a_tool_call_and_the_answer(running: Service) -> None:
    first, second = conversation(running)
    assert first.reasoning.strip(), "the demo model thinks before it calls"
    (call,) = first.calls
    assert (call["name"], json.loads(call["arguments"])) == ("read_file", {"path": "config.toml"})
    assert first.finish == "tool_calls" and first.chunks > 5, "streamed, not sent at once"
    assert "8471" in second.content and second.finish == "stop" and not second.calls


def test_the_second_turn_reuses_the_first_and_log_usage_and_record_agree(running: Service) -> None:
    began = time.time()
    first, second = conversation(running, extra_headers={"x-session-id": "reuse"})
    ours = second.usage.model_extra["moorage"]
    assert ours["common"] + ours["new"] == ours["prompt"] == second.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == ours["common"]
    assert ours["common"] >= first.usage.prompt_tokens, "all of the first prompt at least"
    assert ours["lost"] == 0
    records = running.records(2, since=began)
    assert [record["reuse"]["common"] for record in records] == [first.usage.model_extra["moorage"]["common"], ours["common"]]
    hits = [{key: int(line[key]) for key in ("prompt", "common", "new", "lost")} for line in running.engine.events("hit")]
    assert {key: ours[key] for key in ("prompt", "common", "new", "lost")} in hits


def test_the_same_request_cold_and_warm_gives_the_same_text(running: Service) -> None:
    sdk = client(running)
    messages = [{"role": "user", "content": "What is 12 + 30? Answer without tools."}]
    cold, warm = (ask(sdk, messages) for _ in range(2))
    assert warm.usage.model_extra["moorage"]["common"] > 0
    assert said(cold) == said(warm)


@pytest.mark.parametrize(
    "spelling",
    [
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"extra_body": {"thinking": {"type": "disabled"}}},
        {"reasoning_effort": "none"},
    ],
    ids=["template", "anthropic", "effort"],
)
def test_thinking_off_means_no_reasoning_at_all(running: Service, spelling: dict) -> None:
    began = time.time()
    for answer in conversation(running, **spelling):
        assert answer.reasoning == "" and "<think>" not in answer.content
    assert {record["thinking"]["mode"] for record in running.records(2, since=began)} == {"off"}


def test_not_streamed_is_the_same_answer(running: Service) -> None:
    sdk = client(running)
    messages = [{"role": "user", "content": QUESTION}]
    streamed = ask(sdk, messages)
    whole = sdk.chat.completions.create(model=MODEL, messages=messages, tools=[READ_FILE], temperature=0, max_tokens=400)
    message = whole.choices[0].message
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
        (c["name"], c["arguments"]) for c in streamed.calls
    ]
    assert message.reasoning_content == streamed.reasoning


def test_the_record_holds_the_request_byte_for_byte_and_every_channel(running: Service) -> None:
    began = time.time()
    conversation(running)
    first, second = running.records(2, since=began)
    body = json.loads(first["received"]["body"])
    assert body["messages"] == [{"role": "user", "content": QUESTION}] and body["model"] == MODEL
    assert first["status"] == 200 and first["outcome"] == "ok" and first["answer"]["malformed"] == 0
    assert {"reasoning_content", "tool_calls"} <= set(first["answer"]["channels"])
    assert "content" in second["answer"]["channels"]


def test_models_and_health(running: Service) -> None:
    assert MODEL in [model.id for model in client(running).models.list()]


def test_a_prompt_beyond_the_context_says_the_limit_and_the_length(running: Service) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client(running), [{"role": "user", "content": "word " * 60_000}])
    limit = get(running.engine.url + "/health")[1]["max_context"]
    assert str(limit) in refused.value.message


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "wizard", "content": "x"}], [{"content": "x"}]],
    ids=["empty", "unknown role", "no role"],
)
def test_bad_conversations_are_refused_with_one_clear_line(running: Service, messages: list) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        ask(client(running), messages)
    assert 400 <= refused.value.status_code < 500
    assert "Traceback" not in refused.value.message and len(refused.value.message) < 500
