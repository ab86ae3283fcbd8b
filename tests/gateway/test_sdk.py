"""The official openai SDK against the gateway: content, reasoning and tool calls stream, errors are its own error classes."""

import openai
import pytest

from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Gateway, settings

ASK = [{"role": "user", "content": "weather?"}]


@pytest.fixture
async def setup(tmp_path):
    async with (
        FakeUpstream() as up,
        Gateway(settings(up.base), tmp_path) as gw,
        openai.AsyncOpenAI(base_url=gw.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield up, client


async def test_all_channels_stream(setup) -> None:
    up, client = setup
    calls = [tool_call(0, '{"city":', "c1", "weather"), tool_call(0, '"Rome"}'), tool_call(1, "{}", "c2", "now")]
    up.script(Stream([reasoning("let me see"), content("Looking"), *calls, finish("tool_calls"), usage(9, 9, 4)]))
    stream = client.chat.completions.stream(model="m", messages=ASK, stream_options={"include_usage": True})
    async with stream as events:
        thoughts = [
            e.chunk.choices[0].delta.reasoning_content async for e in events if e.type == "chunk" and "let me" in str(e.chunk)
        ]
        final = await events.get_final_completion()
    message = final.choices[0].message
    assert thoughts == ["let me see"] and message.content == "Looking"
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("weather", '{"city":"Rome"}'),
        ("now", "{}"),
    ]
    assert final.usage.prompt_tokens_details.cached_tokens == 4


async def test_vendor_fields_arrive_and_whole_answers_parse(setup) -> None:
    up, client = setup
    up.script(Whole(message("Sunny") | {"timings": {"prompt_ms": 1}}))
    got = await client.chat.completions.create(model="m", messages=ASK, extra_body={"top_k": 5, "cache_salt": "s"})
    assert got.choices[0].message.content == "Sunny" and got.timings == {"prompt_ms": 1}
    assert (up.requests[0].json["top_k"], up.requests[0].json["cache_salt"]) == (5, "s")


async def test_errors_are_the_sdks_own(setup) -> None:
    up, client = setup
    with pytest.raises(openai.NotFoundError, match="Available: m"):
        await client.chat.completions.create(model="other", messages=ASK)
    up.script(Stream([content("par"), 0.05], die_after=2))
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in await client.chat.completions.create(model="m", messages=ASK, stream=True):
            pass
