"""/v1/responses through the real gateway: the official openai SDK parses everything, and every ending is an honest one."""

import itertools
import json

import openai
import pytest

from gateway.dialects import thoughts
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, chunk, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Gateway, settings

TOOLS = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}]},
    {"type": "custom", "name": "apply_patch", "description": "Patch"},
]
ASK = {"model": "m", "input": "weather?", "tools": TOOLS}
RAW = ASK | {"stream": True, "store": False}
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
        openai.AsyncOpenAI(base_url=gw.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield up, gw, client


CALLS = [
    tool_call(0, '{"city":', "c1", "weather"),
    tool_call(1, "{", "c2", "agents__spawn"),
    tool_call(0, '"Rome"}'),
    tool_call(1, "}"),
    tool_call(2, '{"input":"*** \\"x\\""}', "c3", "apply_patch"),
]
ALL = [reasoning("let me "), reasoning("see"), content("Look"), content("ing"), *CALLS, finish("tool_calls")]
COUNTS = usage(9, 7, 4, completion_tokens_details={"reasoning_tokens": 3})


async def test_the_sdk_streams_thoughts_text_and_every_kind_of_call(setup) -> None:
    up, _, client = setup
    up.script(Stream([*ALL, COUNTS]))
    async with client.responses.stream(**ASK) as stream:
        kinds = [e.type async for e in stream]
        final = await stream.get_final_response()
    thought, text, weather, spawn, patch = final.output
    assert thought.content[0].text == "let me see" and thought.summary == []
    assert final.output_text == text.content[0].text == "Looking"
    assert (weather.call_id, weather.name, weather.arguments) == ("c1", "weather", '{"city":"Rome"}')
    assert (spawn.name, spawn.namespace, spawn.arguments) == ("spawn", "agents", "{}")
    assert (patch.type, patch.call_id, patch.input) == ("custom_tool_call", "c3", '*** "x"')
    assert final.status == "completed" and final.model == "m" and {o.status for o in final.output} == {"completed"}
    counts = final.usage
    assert (counts.input_tokens, counts.input_tokens_details.cached_tokens, counts.total_tokens) == (9, 4, 16)
    assert counts.output_tokens_details.reasoning_tokens == 3
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"


async def test_the_whole_sequence_of_events(setup) -> None:
    up, gw, _ = setup
    up.script(Stream([*ALL, COUNTS]))
    got = await gw.post(RAW, "/v1/responses")
    names = [line[7:].decode() for line in got.body.split(b"\n") if line.startswith(b"event: ")]
    assert [e["type"] for e in got.events] == names and [e["sequence_number"] for e in got.events] == list(range(len(names)))
    item, text, fc = "response.output_item.", "response.output_text.", "response.function_call_arguments."
    assert [name for name, _ in itertools.groupby(names)] == [
        "response.created",
        "response.in_progress",
        f"{item}added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        f"{item}done",
        f"{item}added",
        "response.content_part.added",
        f"{text}delta",
        f"{text}done",
        "response.content_part.done",
        f"{item}done",
        *[f"{item}added", f"{fc}delta", f"{fc}done", f"{item}done"] * 2,
        f"{item}added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        f"{item}done",
        "response.completed",
    ]
    added = [e["output_index"] for e in got.events if e["type"] == f"{item}added"]
    done = [e["item"] for e in got.events if e["type"] == f"{item}done"]
    assert added == [0, 1, 2, 3, 4] and got.events[-1]["response"]["output"] == done


async def test_thoughts_go_out_as_a_summary_when_one_was_asked_for_and_come_back_from_their_seal(setup) -> None:
    up, _, client = setup
    up.script(
        Stream([reasoning("th"), content("A"), tool_call(0, '{"x": 1}', "c1", "weather"), content("B"), finish("tool_calls")])
    )
    more = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False}
    async with client.responses.stream(**ASK, **more) as stream:
        kinds = [e.type async for e in stream]
        final = await stream.get_final_response()
    assert "response.reasoning_summary_text.delta" in kinds and "response.reasoning_text.delta" not in kinds
    thought = final.output[0]
    assert thought.summary[0].text == "th" and thought.encrypted_content == thoughts.seal("th")
    history = [o.model_dump(exclude_none=True) for o in final.output]
    history[0]["summary"] = []  # as agents do that keep the sealed thought only
    up.script(Stream([content("done"), finish()]))
    items = [
        {"role": "user", "content": "weather?"},
        *history,
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    async with client.responses.stream(**ASK | {"input": items}, **more) as stream:
        assert (await stream.get_final_response()).output_text == "done"
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"x": 1}'}}
    assert up.requests[1].json["messages"] == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "AB", "reasoning_content": "th", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]


@pytest.mark.parametrize("checked", [False, True])
async def test_a_custom_tools_call_means_the_same_to_the_agent_and_to_the_model(up, tmp_path, checked: bool) -> None:
    """There: a function with one string and the grammar. Back: the free text itself. In the history: that call again."""
    patch = '*** Begin Patch\n+"é"\n'
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
    tool = {"type": "custom", "name": "apply_patch", "description": "Patch files", "format": grammar}
    call = tool_call(0, json.dumps({"input": patch}), "c7", "apply_patch")
    ask = {"model": "m", "tools": [tool], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    question = {"role": "user", "content": "patch it"}
    async with (
        Gateway(settings(up.base, **({} if checked else PLAIN)), tmp_path) as gw,
        openai.AsyncOpenAI(base_url=gw.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        up.script(Stream([call, finish("tool_calls")]))
        async with client.responses.stream(**ask, input=[question]) as stream:
            (made,) = (await stream.get_final_response()).output
        assert (made.type, made.name, made.call_id, made.input) == ("custom_tool_call", "apply_patch", "c7", patch)
        up.script(Stream([content("done"), finish()]))
        result = {"type": "custom_tool_call_output", "call_id": "c7", "output": "Success"}
        history = [question, made.model_dump(exclude_none=True), result]
        async with client.responses.stream(**ask | {"tool_choice": "auto"}, input=history) as stream:
            assert (await stream.get_final_response()).output_text == "done"
    first, second = (r.json for r in up.requests)
    (function,) = (t["function"] for t in first["tools"])
    assert function["name"] == "apply_patch" and all(
        text in function["description"] for text in ("Patch files", grammar["definition"])
    )
    assert function["parameters"]["required"] == ["input"] and function["parameters"]["properties"]["input"]["type"] == "string"
    assert first["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}
    asked, again, said = second["messages"]
    assert asked == question and second["tools"] == first["tools"]
    (past,) = again["tool_calls"]
    assert (past["id"], past["function"]["name"]) == ("c7", "apply_patch")
    assert json.loads(past["function"]["arguments"]) == {"input": patch}
    assert said == {"role": "tool", "tool_call_id": "c7", "content": "Success"}


async def test_the_sdk_reads_whole_answers(setup) -> None:
    up, _, client = setup
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
        {"id": "c2", "type": "function", "function": {"name": "apply_patch", "arguments": '{"input":"p"}'}},
    ]
    up.script(Whole(message("Hi", "tool_calls", reasoning_content="hm", tool_calls=calls)))
    got = await client.responses.create(**ASK, instructions="be", store=False)
    assert [o.type for o in got.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert got.output_text == "Hi" and got.output[3].input == "p" and got.usage.output_tokens == 2
    assert got.instructions == "be" and got.store is False and got.status == "completed"


async def test_structured_output_is_parsed_by_the_sdk(setup) -> None:
    up, _, client = setup
    up.script(Stream([content('{"a":'), content("1}"), finish()]))
    form = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    async with client.responses.stream(model="m", input="q", text={"format": form}) as stream:
        assert json.loads((await stream.get_final_response()).output_text) == {"a": 1}
    assert up.requests[0].json["response_format"]["json_schema"]["name"] == "s"


async def test_a_cut_off_answer_is_incomplete_and_a_cut_off_call_is_never_complete(setup) -> None:
    up, gw, client = setup
    for name, arguments in (("weather", '{"ci'), ("apply_patch", '{"input":"*** Beg')):
        up.script(Stream([content("a"), tool_call(0, arguments, "c1", name), finish("length")]))
        got = await gw.post(RAW, "/v1/responses")
        last = got.events[-1]
        assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [o["status"] for o in last["response"]["output"]] == ["completed", "incomplete"]
        assert "Beg" not in json.dumps([e for e in got.events if e["type"].startswith("response.custom")])
    up.script(Stream([content("a"), finish("length")]))
    async with client.responses.stream(**ASK) as stream:
        assert [e.type async for e in stream][-1] == "response.incomplete"


async def test_a_long_prefill_is_kept_alive_by_events_in_their_order(setup) -> None:
    up, gw, client = setup
    up.script(Stream([content("late"), finish()], head_delay=0.5))
    got = await gw.post(RAW, "/v1/responses")
    kinds = [e["type"] for e in got.events]
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 3] and kinds.count("response.created") == 1
    assert [e["sequence_number"] for e in got.events] == list(range(len(kinds)))
    async with client.responses.stream(**ASK) as stream:
        assert (await stream.get_final_response()).output_text == "late"


async def test_an_upstream_that_dies_ends_in_failed_and_never_in_completed(setup) -> None:
    up, gw, _ = setup
    up.script(Stream([content("Hel"), 0.05], die_after=2))
    got = await gw.post(RAW, "/v1/responses")
    last = got.events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed" and b"response.completed" not in got.body
    assert last["response"]["error"]["code"] == "server_error" and "broke off" in last["response"]["error"]["message"]


async def test_an_error_after_a_keepalive_says_what_agents_act_on(setup) -> None:
    up, gw, _ = setup
    up.script(Whole({"error": {"message": "too long", "code": "context_length_exceeded"}}, 400, head_delay=0.3))
    got = await gw.post(RAW, "/v1/responses")
    assert got.events[-1]["response"]["error"] == {"code": "context_length_exceeded", "message": "too long"}


async def test_errors_are_the_sdks_own(setup) -> None:
    up, gw, client = setup
    with pytest.raises(openai.NotFoundError, match="Available: m"):
        await client.responses.create(**ASK | {"model": "other"})
    with pytest.raises(openai.BadRequestError, match="previous_response_id.*nothing is stored"):
        await client.responses.create(**ASK, previous_response_id="resp_1")
    up.script(Whole({"error": {"message": "busy"}}, 429, {"retry-after": "7"}))
    with pytest.raises(openai.RateLimitError, match="busy"):
        await client.responses.create(**ASK)
    for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            await act("resp_1")


async def test_custom_input_without_its_string(setup) -> None:
    up, gw, _ = setup
    up.script(Stream([tool_call(0, "*** Begin Patch", "c", "apply_patch"), finish("tool_calls")]))
    got = await gw.post(RAW, "/v1/responses")
    assert got.events[-1]["response"]["output"][0]["input"] == "*** Begin Patch"
    up.script(Stream([tool_call(0, '{"patch":"x"}', "c", "apply_patch"), finish("tool_calls")]))
    got = await gw.post(RAW, "/v1/responses")
    assert got.events[-1]["type"] == "response.failed" and "`input`" in got.events[-1]["response"]["error"]["message"]


async def test_refusals_have_their_own_channel(setup) -> None:
    up, _, client = setup
    up.script(Stream([chunk({"refusal": "I can"}), chunk({"refusal": "not"}), finish()]))
    async with client.responses.stream(**ASK) as stream:
        final = await stream.get_final_response()
    assert final.output[0].content[0].refusal == "I cannot"


async def test_codex_names_its_session_and_every_translation_is_said(setup) -> None:
    up, gw, _ = setup
    up.script(Whole(message()))
    body = ASK | {
        "store": False,
        "prompt_cache_key": "k1",
        "client_metadata": {"a": "b"},
        "tools": [*TOOLS, {"type": "web_search"}],
    }
    got = await gw.post(body, "/v1/responses")
    await gw.post(body, "/v1/responses", session_id="s1")
    records = await gw.records(2)
    assert [r["session"]["source"] for r in records] == ["body:prompt_cache_key", "header:session-id"]
    said = got.headers["x-moorage-decisions"].split(",")
    expected = ["namespace", "custom_tool", "builtin_tool", "client_metadata"]
    assert [s for s in said if s.startswith("responses.")] == [f"responses.{e}" for e in expected]
