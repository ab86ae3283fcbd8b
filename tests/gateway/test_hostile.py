"""Requests that nobody sends by accident: each one gets one clear line, never a failure of the gateway."""

import json

import pytest

from tests.support.fake_upstream import FakeUpstream, Whole, message
from tests.support.gateway import Gateway, ask, settings

SAID = {"role": "user", "content": "x"}
PLACES = {
    "content": ("/v1/chat/completions", ask() | {"messages": [{"role": "user", "content": "HERE"}]}),
    "parameter": ("/v1/chat/completions", ask(vendor="HERE", stream=True)),
    "template": ("/v1/chat/completions", ask(chat_template_kwargs="HERE", reasoning_effort="none")),
    "schema": ("/v1/chat/completions", ask(tools=[{"type": "function", "function": {"name": "a", "parameters": "HERE"}}])),
    "past call": (
        "/v1/chat/completions",
        ask()
        | {
            "messages": [
                SAID,
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "HERE"}}]},
            ]
        },
    ),
    "prompt": ("/v1/completions", {"model": "m", "prompt": "HERE"}),
    "embedding": ("/v1/embeddings", {"model": "m", "input": "HERE"}),
    "tool_use": (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [SAID, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": "HERE"}]}],
        },
    ),
    "input_schema": ("/v1/messages", ask(max_tokens=9, tools=[{"name": "a", "input_schema": "HERE"}])),
    "vendor field": ("/v1/messages", ask(max_tokens=9, vendor="HERE")),
    "counted": ("/v1/messages/count_tokens", ask(tools=[{"name": "a", "input_schema": "HERE"}])),
    "function": (
        "/v1/responses",
        {"model": "m", "input": "x", "tools": [{"type": "function", "name": "a", "parameters": "HERE"}]},
    ),
    "format": (
        "/v1/responses",
        {"model": "m", "input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": "HERE"}}},
    ),
}


@pytest.mark.parametrize("place", PLACES)
async def test_any_depth_of_json_is_read_or_refused_in_one_line(tmp_path, place) -> None:
    path, body = PLACES[place]
    async with FakeUpstream() as up:
        up.script(Whole(message()))
        async with Gateway(settings(up.base), tmp_path) as gw:
            statuses = []
            for depth in (2, 236, 240, 244, 246, 250, 254, 255, 1000, 5000):
                for deep in ('{"a":' * depth + "1" + "}" * depth, "[" * depth + "]" * depth):
                    got = await gw.post(json.dumps(body).replace('"HERE"', deep).encode(), path)
                    statuses.append(got.status)
                    assert got.status < 500 or b"without a stream" in got.body, (depth, got)
    assert statuses[0] in (200, 502) and statuses[-1] == 400


async def test_broken_arguments_of_any_depth_in_the_history_are_repaired_or_refused(tmp_path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a"}}
    async with FakeUpstream() as up:
        up.script(Whole(message()))
        async with Gateway(settings(up.base), tmp_path) as gw:
            for depth in (3, 300, 5000):
                said = call | {"function": {"name": "a", "arguments": '{"a":' * depth + "1"}}
                got = await gw.post(ask() | {"messages": [SAID, {"role": "assistant", "content": "", "tool_calls": [said]}]})
                assert got.status == (200 if depth == 3 else 400), got
