"""/v1/messages through the real gateway: the official anthropic SDK parses everything, and every ending is an honest one."""

import json

import anthropic
import openai
import pytest

from gateway.dialects import thoughts
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, chunk, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Gateway, settings

ASK = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "weather?"}]}
TOOLS = [{"name": n, "input_schema": {"type": "object"}} for n in ("weather", "now")]
# The dialect alone: tool calls reach it as the upstream sent them.
PLAIN = {"policies": [{"tools": {"check": False, "rescue": False}}], "timeouts": {"keepalive": 0.1}}


@pytest.fixture
async def up():
    async with FakeUpstream() as fake:
        yield fake


@pytest.fixture
async def setup(up, tmp_path):
    async with (
        Gateway(settings(up.base, **PLAIN), tmp_path) as gw,
        anthropic.AsyncAnthropic(base_url=gw.url, api_key="x", max_retries=0) as client,
    ):
        yield up, gw, client


async def test_the_sdk_streams_thoughts_text_and_interleaved_calls(setup) -> None:
    up, _, client = setup
    calls = [
        tool_call(0, '{"city":', "c1", "weather"),
        tool_call(1, '{"zone"', "c2", "now"),
        tool_call(0, '"Rome"}'),
        tool_call(1, ':"CET"}'),
    ]
    up.script(
        Stream(
            [
                reasoning("let me "),
                reasoning("see"),
                content("Look"),
                content("ing"),
                *calls,
                finish("tool_calls"),
                usage(9, 7, 4),
            ]
        )
    )
    kinds = []
    async with client.messages.stream(**ASK, tools=TOOLS) as stream:
        async for event in stream:
            kinds.append((event.type, getattr(event, "index", None)))
        final = await stream.get_final_message()
    thought, text, *uses = final.content
    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "let me see", thoughts.sign("let me see"))
    assert text.text == "Looking"
    assert [(u.id, u.name, u.input) for u in uses] == [("c1", "weather", {"city": "Rome"}), ("c2", "now", {"zone": "CET"})]
    borders = [(kind, index) for kind, index in kinds if kind in ("content_block_start", "content_block_stop")]
    assert borders == [(f"content_block_{b}", i) for i in range(4) for b in ("start", "stop")]
    assert final.stop_reason == "tool_use" and final.model == "m"
    counts = final.usage
    assert (counts.input_tokens, counts.cache_read_input_tokens, counts.output_tokens) == (5, 4, 7)


async def test_the_sdk_reads_whole_answers(setup) -> None:
    up, _, client = setup
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    up.script(Whole(message("Hi", "tool_calls", reasoning_content="hm", tool_calls=[call])))
    got = await client.messages.create(**ASK, tools=TOOLS)
    assert [b.type for b in got.content] == ["thinking", "text", "tool_use"]
    assert got.content[2].input == {"city": "Rome"} and got.stop_reason == "tool_use"
    assert (got.usage.input_tokens, got.usage.output_tokens) == (10, 2)


async def test_a_streamed_turn_comes_back_as_the_history_the_model_made(setup) -> None:
    up, _, client = setup
    up.script(Stream([reasoning("th"), content("A"), tool_call(0, '{"x":1}', "c1", "now"), content("B"), finish("tool_calls")]))
    async with client.messages.stream(**ASK, tools=TOOLS) as stream:
        final = await stream.get_final_message()
    answer = {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in final.content]}
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "noon"}]}
    up.script(Stream([content("done"), finish()]))
    async with client.messages.stream(**ASK | {"messages": [*ASK["messages"], answer, results]}, tools=TOOLS) as stream:
        assert await stream.get_final_text() == "done"
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"x":1}'}}
    assert up.requests[1].json["messages"] == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "AB", "reasoning_content": "th", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]


ENDS = [
    (finish("stop"), "end_turn", None),
    (finish("length"), "max_tokens", None),
    (finish("content_filter"), "refusal", None),
    (chunk({}) | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"}]}, "stop_sequence", "END"),
    (chunk({}) | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": 151645}]}, "end_turn", None),
]


@pytest.mark.parametrize(("end", "reason", "sequence"), ENDS)
async def test_stop_reasons(setup, end, reason, sequence) -> None:
    up, _, client = setup
    whole = message("a")
    whole["choices"][0] |= {k: v for k, v in end["choices"][0].items() if k != "delta"}
    up.script(Stream([content("a"), end]), Whole(whole))
    async with client.messages.stream(**ASK, stop_sequences=["END"]) as stream:
        final = await stream.get_final_message()
    got = await client.messages.create(**ASK, stop_sequences=["END"])
    assert [(m.stop_reason, m.stop_sequence) for m in (final, got)] == [(reason, sequence)] * 2
    assert up.requests[0].json["stop"] == ["END"]


async def test_a_call_is_tool_use_whatever_the_upstream_says(setup) -> None:
    up, _, client = setup
    up.script(Stream([tool_call(0, "{}", "c1", "now"), finish("stop")]))
    async with client.messages.stream(**ASK, tools=TOOLS) as stream:
        assert (await stream.get_final_message()).stop_reason == "tool_use"


async def test_pings_keep_a_long_prefill_alive_and_the_sdk_does_not_mind(setup) -> None:
    up, gw, client = setup
    up.script(Stream([content("late"), finish()], head_delay=0.5))
    async with client.messages.stream(**ASK) as stream:
        assert await stream.get_final_text() == "late"
    got = await gw.post(ASK | {"stream": True}, "/v1/messages")
    assert got.body.startswith(b'event: ping\ndata: {"type":"ping"}\n\n')


async def test_an_upstream_that_dies_ends_in_an_error_event_and_never_in_message_stop(setup) -> None:
    up, gw, client = setup
    up.script(Stream([content("Hel"), 0.05], die_after=2))
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        async with client.messages.stream(**ASK) as stream:
            async for _ in stream:
                pass
    got = await gw.post(ASK | {"stream": True}, "/v1/messages")
    assert got.body.rstrip().split(b"\n\n")[-1].startswith(b"event: error\n") and b"message_stop" not in got.body


ERRORS = [
    (400, "invalid_request_error", anthropic.BadRequestError),
    (404, "not_found_error", anthropic.NotFoundError),
    (429, "rate_limit_error", anthropic.RateLimitError),
    (500, "api_error", anthropic.InternalServerError),
    (503, "overloaded_error", anthropic.InternalServerError),
]


@pytest.mark.parametrize(("status", "kind", "error"), ERRORS)
async def test_errors_have_anthropics_shape(setup, status, kind, error) -> None:
    up, gw, client = setup
    up.script(Whole({"error": {"message": "so it is"}}, status, {"retry-after": "3"}))
    with pytest.raises(error, match="so it is"):
        await client.messages.create(**ASK)
    got = await gw.post(ASK, "/v1/messages")
    assert got.json["type"] == "error" and got.json["error"]["type"] == kind
    assert got.headers["retry-after"] == "3"


async def test_a_prompt_that_is_too_long_is_said_in_the_words_that_agents_compact_on(setup) -> None:
    up, gw, _ = setup
    up.script(Whole({"error": {"message": "9000 tokens are more than 8192", "code": "context_length_exceeded"}}, 400))
    got = await gw.post(ASK, "/v1/messages")
    assert got.json["error"]["message"] == "prompt is too long: 9000 tokens are more than 8192"


async def test_refusals_of_the_gateway_have_anthropics_shape_too(setup) -> None:
    _, gw, _ = setup
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    got = await gw.post(ASK | {"messages": [image]}, "/v1/messages")
    assert got.status == 400 and "messages[0].content[0] holds an image" in got.json["error"]["message"]
    broken = await gw.post(b"{", "/v1/messages")
    async with gw.http.get(gw.url + "/v1/messages/batches") as r:
        unknown = await r.json()
    assert broken.json["error"]["type"] == "invalid_request_error" and unknown["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["/", "/v1/messages", "/v1/models", "/v1/chat/completions"])
async def test_head_probes_are_answered(setup, path) -> None:
    _, gw, _ = setup
    async with gw.http.head(gw.url + path) as r:
        assert r.status == 200


async def test_both_sdks_list_the_models(setup) -> None:
    _, gw, client = setup
    listed = [m async for m in client.models.list()]
    async with openai.AsyncOpenAI(base_url=gw.url + "/v1", api_key="x") as other:
        assert [m.id async for m in other.models.list()] == [m.id for m in listed] == ["m"]
        assert (await other.models.retrieve("m")).id == "m"
        with pytest.raises(openai.NotFoundError, match="Available: m"):
            await other.models.retrieve("of/nobody")
    assert listed[0].display_name == "m" and listed[0].type == "model" and (await client.models.retrieve("m")).id == "m"
    with pytest.raises(anthropic.NotFoundError, match="No model"):
        await client.models.retrieve("nobody")


async def test_arguments_that_are_no_json_are_an_error_when_whole_and_cut_off_ones_are_left_out(setup) -> None:
    up, _, client = setup
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a'}}
    up.script(Whole(message("x", "length", tool_calls=[call])), Whole(message("x", "tool_calls", tool_calls=[call])))
    got = await client.messages.create(**ASK)
    assert [b.type for b in got.content] == ["text"] and got.stop_reason == "max_tokens"
    with pytest.raises(anthropic.InternalServerError, match="no JSON object"):
        await client.messages.create(**ASK)


async def test_every_translation_is_in_the_header_and_the_record(setup) -> None:
    up, gw, _ = setup
    up.script(Whole(message()))
    body = ASK | {
        "context_management": {"edits": []},
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    }
    got = await gw.post(body, "/v1/messages", x_claude_code_session_id="5f2c")
    (record,) = await gw.records()
    assert "messages.context_management" in got.headers["x-moorage-decisions"].split(",")
    assert record["dialect"] == "messages" and json.loads(record["received"]["body"]) == body
    assert record["session"]["source"] == "header:x-claude-code-session-id"
    sent = up.requests[0]
    assert sent.path == "/v1/chat/completions" and b"cache_control" not in sent.body
    assert {"message": 0, "edge": "end", "kind": "client_breakpoint", "weight": 0.9} in sent.json["moorage"]["anchors"]


async def test_thinking_words_reach_the_engine_in_its_own_spelling(setup) -> None:
    up, gw, _ = setup
    up.script(Whole(message()))
    asked = [{"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2048}]
    for thinking in asked:
        await gw.post(ASK | {"thinking": thinking, "output_config": {"effort": "low"}}, "/v1/messages")
    off, on, budget = (r.json for r in up.requests)
    assert off["chat_template_kwargs"] == {"enable_thinking": False} and "thinking" not in off and "output_config" not in off
    assert on["chat_template_kwargs"] == {"enable_thinking": True} and on["reasoning_effort"] == "low" and "thinking" not in on
    assert budget["thinking"] == {"type": "enabled", "budget_tokens": 2048} and "output_config" not in budget


async def test_claude_codes_user_id_names_the_session(setup) -> None:
    up, gw, _ = setup
    up.script(Whole(message()))
    session = "10d6fc52-142c-4252-8182-7103a5793305"
    for user in (f"user_ab_account__session_{session}", json.dumps({"device_id": "x", "session_id": session})):
        await gw.post(ASK | {"metadata": {"user_id": user}}, "/v1/messages")
    assert [r["session"]["id"] for r in await gw.records(2)] == [session] * 2


async def test_counting_asks_the_upstream_and_else_estimates_aloud(setup) -> None:
    up, gw, client = setup
    body = {k: v for k, v in ASK.items() if k != "max_tokens"}
    up.script(Whole({"count": 41, "max_model_len": 100, "tokens": []}))
    assert (await client.messages.count_tokens(**body, tools=TOOLS, system="s")).input_tokens == 41
    asked = up.requests[0]
    assert asked.path == "/v1/tokenize" and [m["role"] for m in asked.json["messages"]] == ["system", "user"]
    assert len(asked.json["tools"]) == 2 and "moorage" not in asked.json
    for unable in (Whole({"detail": "Not Found"}, 404), Whole({"tokens": []}), Whole(b"<html>")):
        up.script(unable)
        got = await gw.post(body | {"system": "x" * 350}, "/v1/messages/count_tokens")
        assert 100 <= got.json["input_tokens"] < 130
        assert "count_tokens.estimate" in got.headers["x-moorage-decisions"]
    refused = await gw.post(body | {"model": "nope"}, "/v1/messages/count_tokens")
    assert refused.status == 404 and refused.json["error"]["type"] == "not_found_error"
    assert [r["dialect"] for r in await gw.records(5)] == ["count_tokens"] * 5


async def test_embeddings_pass_through(setup) -> None:
    up, gw, _ = setup
    raw = b'{ "data":[{"embedding":[0.10],"index":0}], "model":"m" }'
    up.script(Whole(raw))
    got = await gw.post(b'{"model":"m", "input":["a"]}', "/v1/embeddings")
    assert got.body == raw and up.requests[0].path == "/v1/embeddings" and up.requests[0].body == b'{"model":"m", "input":["a"]}'
    assert (await gw.post({"model": "m"}, "/v1/embeddings")).status == 400
