"""Chat completions over HTTP with the OpenAI SDK: shapes, streams, thoughts, tools, usage."""

import asyncio
import json

import openai
import pytest

from engine.ipc import RequestError
from tests.support.fake_engine import answer, api
from tests.support.text import tool

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]


async def test_a_whole_answer(dirs):
    async with api(dirs["json_calls"], answer("Hello there.")) as server:
        made = await server.openai.chat.completions.create(model="tiny", messages=HI)
    choice = made.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Hello there.", "assistant", "stop")
    assert choice.message.tool_calls is None and choice.logprobs is None
    count = len(server.engine.requests[0].tokens)
    used = made.usage.model_dump()
    assert (used["prompt_tokens"], used["total_tokens"]) == (count, count + used["completion_tokens"])
    assert used["prompt_tokens_details"]["cached_tokens"] == count // 2
    assert used["completion_tokens_details"]["reasoning_tokens"] == 0
    assert used["moorage"]["common"] == count // 2 and used["moorage"]["source"] == "ram"


async def test_a_stream_has_openai_s_shape(dirs):
    async with (
        api(dirs["xml_calls"], answer("Let me think.\n</think>\n\nHi.")) as server,
        server.http.stream(
            "POST", "/v1/chat/completions", json={"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
        ) as reply,
    ):
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in reply.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Let me think."
    assert "".join(d.get("content", "") for d in deltas) == "Hi."
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-2:] == [None, "stop"]
    assert chunks[-1]["choices"] == [] and all(c["usage"] is None for c in chunks[:-1])
    used = chunks[-1]["usage"]
    assert 0 < used["completion_tokens_details"]["reasoning_tokens"] < used["completion_tokens"]
    assert used["moorage"]["prompt"] == used["prompt_tokens"]


async def test_the_sdk_s_stream_helper_assembles_thoughts_and_calls(dirs):
    text = f"<think>\nI read.\n</think>\n\nReading.\n{CALL}\n{CALL.replace('a.py', 'b.py')}"
    async with (
        api(dirs["json_calls"], answer(text)) as server,
        server.openai.chat.completions.stream(
            model="tiny", messages=HI, tools=[tool()], stream_options={"include_usage": True}
        ) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Reading." and final.choices[0].finish_reason == "tool_calls"
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"path": "a.py"}, {"path": "b.py"}]
    assert len({c.id for c in message.tool_calls}) == 2 and {c.function.name for c in message.tool_calls} == {"read_file"}
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 4, "arguments must stream"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_whole_answer_equals_the_streamed_one(dirs, stream):
    text = f"<think>\nhm\n</think>\n\nOk.\n{CALL}"
    async with api(dirs["json_calls"], answer(text)) as server:
        whole = (await server.chat(tools=[tool()])).json()["choices"][0]["message"]
        reply = await server.chat(tools=[tool()], stream=True)
    content, thought, arguments = "", "", ""
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            content += delta.get("content") or ""
            thought += delta.get("reasoning_content") or ""
            arguments += "".join(c["function"].get("arguments", "") for c in delta.get("tool_calls", []))
    assert (content, thought, arguments) == (
        whole["content"], whole["reasoning_content"], whole["tool_calls"][0]["function"]["arguments"],
    )  # fmt: skip


async def test_n_choices_and_seeds(dirs):
    async with api(dirs["plain"], answer("Hello")) as server:
        made = await server.openai.chat.completions.create(model="tiny", messages=HI, n=3, seed=7)
        async for chunk in await server.openai.chat.completions.create(model="tiny", messages=HI, n=2, stream=True):
            assert chunk.choices[0].index in (0, 1)
    assert [c.index for c in made.choices] == [0, 1, 2] and {c.message.content for c in made.choices} == {"Hello"}
    assert [r.sampling.seed for r in server.engine.requests[:3]] == [7, 8, 9]
    assert made.usage.completion_tokens == sum(len(server.engine.encode("Hello")) + 1 for _ in range(3))


async def test_logprobs_cover_every_sampled_token(dirs):
    async with api(dirs["plain"], answer("Größe 🚀")) as server:
        made = await server.openai.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
        chunks = [
            c async for c in await server.openai.chat.completions.create(model="tiny", messages=HI, logprobs=True, stream=True)
        ]
    entries = made.choices[0].logprobs.content
    assert bytes(b for e in entries for b in e.bytes).decode() == "Größe 🚀"
    assert entries[0].logprob == -0.5 and entries[0].top_logprobs[1].logprob == -9999.0
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices and c.choices[0].logprobs) == len(entries)


async def test_stop_strings_cut_the_answer_and_the_engine(dirs):
    async with api(dirs["plain"], answer("The quick brown fox", 5.0)) as server:
        begun = asyncio.get_running_loop().time()
        made = await server.openai.chat.completions.create(model="tiny", messages=HI, stop=["ck br", "zzz"])
        assert asyncio.get_running_loop().time() - begun < 4
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("The qui", "stop")
    assert server.engine.streams[0].cancelled == "stop string"


async def test_stop_strings_do_not_touch_thoughts(dirs):
    async with api(dirs["xml_calls"], answer("END here\n</think>\n\nFirst END second")) as server:
        made = (await server.chat(stop="END")).json()["choices"][0]["message"]
    assert (made["reasoning_content"], made["content"]) == ("END here", "First ")


async def test_the_limit_and_the_finish_reason(dirs):
    async with api(dirs["json_calls"], answer(f"<think>\nx\n</think>\n\n{CALL}")) as server:
        made = (await server.chat(max_tokens=12, tools=[tool()])).json()["choices"][0]
        long = await server.chat(max_completion_tokens=100000)
    assert made["finish_reason"] == "length" and server.engine.requests[0].max_new == 12
    room = 4096 - len(server.engine.requests[1].tokens)
    assert server.engine.requests[1].max_new == room and long.headers["x-moorage-clamped"] == f"max_tokens={room}"


async def test_sampling_parameters_reach_the_engine(dirs):
    asked = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "seed": 3, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": -100, "6": 2.5}, "min_tokens": 4,
        "moorage": {"session": "s1", "priority": 3},
    }  # fmt: skip
    async with api(dirs["plain"], answer("x")) as server:
        assert (await server.chat(**asked)).status_code == 200
    request = server.engine.requests[0]
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert getattr(request.sampling, name) == asked[name]
    assert request.sampling.logit_bias == {5: -100.0, 6: 2.5}
    assert (request.session, request.priority, request.min_new) == ("s1", 3, 4)
    assert request.stop_ids == server.service.text.stop_ids and request.anchors


async def test_ignored_fields_are_told(dirs):
    async with api(dirs["plain"], answer("x")) as server:
        options = {"include_usage": None, "continuous_usage_stats": True}
        reply = await server.chat(user="me", store=False, frobnicate=1, metadata=None, stream_options=options)
        metrics = (await server.http.get("/metrics")).text
        for i in range(150):
            await server.chat(**{f"field{i}": 1})
        crowded = (await server.http.get("/metrics")).text
    assert crowded.count("moorage_ignored_parameters_total{") <= 101, "clients cannot grow the metrics without bound"
    assert reply.headers["x-moorage-ignored"] == "frobnicate, store, user, stream_options.continuous_usage_stats"
    assert 'moorage_ignored_parameters_total{field="frobnicate"} 1.0' in metrics


# --- thinking


async def test_thinking_off_closes_the_thought_and_bans_the_tag(dirs):
    async with api(dirs["xml_calls"], answer("Hi.")) as server:
        reply = (await server.chat(chat_template_kwargs={"enable_thinking": False})).json()
        text = server.service.text
        assert text.tokenizer.decode(server.engine.requests[0].tokens).endswith("<think>\n\n</think>\n\n")
    assert server.engine.requests[0].sampling.banned == (text.tokenizer.id_of("<think>"),)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert "reasoning_content" not in reply["choices"][0]["message"]


async def test_a_thought_that_leaks_is_counted(dirs):
    async with api(dirs["json_calls"], answer("<think>sly</think>Hi.")) as server:
        reply = (await server.chat(reasoning_effort="none")).json()
        metrics = (await server.http.get("/metrics")).text
    assert reply["choices"][0]["message"]["content"] == "Hi."
    assert "moorage_thinking_leaks_total 1.0" in metrics


async def test_a_model_that_cannot_stop_thinking_refuses_off(dirs):
    async with api(dirs["always_thinks"], answer("x</think>y")) as server:
        refused = await server.chat(thinking={"type": "disabled"})
        assert (await server.chat()).status_code == 200
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "thinking_cannot_be_disabled"


async def test_a_budget_reaches_the_engine(dirs):
    async with api(dirs["xml_calls"], answer("x</think>y")) as server:
        await server.chat(thinking={"type": "enabled", "budget_tokens": 32})
        tokenizer = server.service.text.tokenizer
    rule = server.engine.requests[0].thinking
    assert (rule.budget, rule.open_at_start, rule.open) == (32, True, tokenizer.id_of("<think>"))
    assert rule.close == (tokenizer.id_of("</think>"),)


async def test_asking_a_model_without_thoughts_to_think_is_told(dirs, tmp_path):
    async with api(dirs["plain"], answer("x")) as server:
        assert (await server.chat(reasoning_effort="none")).status_code == 200
        banned = server.engine.requests[0].sampling.banned
    assert banned == (server.service.text.tokenizer.id_of("<think>"),), "the vocabulary knows the tag, so it is banned"


# --- tools


async def test_an_answer_goes_on_where_the_request_began_it(dirs):
    begun = [*HI, {"role": "assistant", "content": "The quick <think>"}]
    async with api(dirs["json_calls"], answer(" brown fox")) as server:
        made = await server.post("/v1/chat/completions", messages=begun, continue_final_message=True)
        text = server.service.text.tokenizer.decode(server.engine.requests[0].tokens)
        both = await server.post("/v1/chat/completions", messages=begun, continue_final_message=True, add_generation_prompt=True)
        user = await server.post("/v1/chat/completions", messages=HI, continue_final_message=True)
        call = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
        calls = await server.post("/v1/chat/completions", messages=[*HI, call], continue_final_message=True)
        closed = await server.post("/v1/chat/completions", messages=begun, add_generation_prompt=False)
        ended = server.service.text.tokenizer.decode(server.engine.requests[-1].tokens)
    assert made.json()["choices"][0]["message"] == {"role": "assistant", "content": " brown fox"}, "no thought was opened by it"
    assert text.endswith("The quick <think>") and ended.rstrip().endswith("The quick <think><|im_end|>")
    assert [r.status_code for r in (made, both, user, calls, closed)] == [200, 400, 400, 400, 200]
    assert all(r.json()["error"]["param"] == "continue_final_message" for r in (both, user, calls))


async def test_tool_choice(dirs):
    async with api(dirs["json_calls"], answer('read_file", "arguments": {"path": "x"}}\n</tool_call>')) as server:

        def sent(i):
            return server.service.text.tokenizer.decode(server.engine.requests[i].tokens)

        off = {"tools": [tool()], "reasoning_effort": "none"}
        await server.chat(**off, tool_choice="none")
        assert "read_file" not in sent(0)
        made = (await server.chat(**off, tool_choice="required")).json()["choices"][0]
        assert sent(1).endswith('<tool_call>\n{"name": "') and made["finish_reason"] == "tool_calls"
        assert made["message"]["tool_calls"][0]["function"] == {"name": "read_file", "arguments": '{"path": "x"}'}
        server.engine.script = answer('{"path": "y"}}\n</tool_call>')
        named = {"type": "function", "function": {"name": "read_file"}}
        made = (await server.chat(**off, tool_choice=named)).json()["choices"][0]
        assert made["message"]["tool_calls"][0]["function"]["arguments"] == '{"path": "y"}'
        wrong = await server.chat(**off, tool_choice={"type": "function", "function": {"name": "nope"}})
        assert wrong.status_code == 400 and "nope" in wrong.json()["error"]["message"]
    async with api(dirs["xml_calls"], answer("x</think>y")) as server:
        open_thought = await server.chat(tools=[tool()], tool_choice="required")
        assert "x-moorage-not-enforced" not in open_thought.headers
        grammar, tokenizer = server.engine.requests[0].grammar, server.service.text.tokenizer
    assert (grammar.after, grammar.repeat) == (tokenizer.id_of("</think>"), False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_wants_one_call_gets_one(dirs, stream):
    async with api(dirs["json_calls"], answer(f"{CALL}\n{CALL}", 30.0)) as server:
        reply = await server.chat(tools=[tool()], parallel_tool_calls=False, stream=stream)
    assert reply.text.count("call_") == 1 and '"finish_reason":"tool_calls"' in reply.text
    assert server.engine.streams[0].cancelled == "second tool call"


async def test_history_renders_the_arguments_the_model_wrote(dirs):
    """The client re-serialises; the prompt holds the model's own key order again."""
    own = '{"n": 1, "path": "é"}'
    call = f'<tool_call>\n{{"name": "read_file", "arguments": {own}}}\n</tool_call>'
    async with api(dirs["json_calls"], answer(call)) as server:
        made = (await server.chat(tools=[tool()])).json()["choices"][0]["message"]["tool_calls"][0]
        assert made["function"]["arguments"] == own

        async def prompt_with(arguments):
            history = [
                *HI,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{**made, "function": {"name": "read_file", "arguments": arguments}}],
                },
                {"role": "tool", "tool_call_id": made["id"], "content": "r"},
            ]
            await server.chat(messages=history, tools=[tool()])
            return server.service.text.tokenizer.decode(server.engine.requests[-1].tokens)

        for arguments in (own, '{"path":"\\u00e9","n":1}', {"path": "é", "n": 1}):
            assert call in await prompt_with(arguments)
        assert '"arguments": {"path": "é", "n": 2}' in await prompt_with('{"path":"é","n":2}'), "an edit is rendered as sent"


# --- errors while it runs


DEAD = RequestError(id="", status=502, message="the engine was killed by SIGKILL: retry in a moment", code="engine_restarted")


async def test_an_engine_that_dies_in_mid_stream_never_looks_finished(dirs):
    async with api(dirs["plain"], answer("Hello", DEAD)) as server:
        reply = await server.chat(stream=True)
        with pytest.raises(openai.APIError, match="SIGKILL"):
            async for _ in await server.openai.chat.completions.create(model="tiny", messages=HI, stream=True):
                pass
        whole = await server.chat()
    assert "[DONE]" not in reply.text and '"finish_reason":"stop"' not in reply.text
    last = json.loads(reply.text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_restarted" and len(reply.text.split("data: ")) > 3
    assert whole.status_code == 502 and whole.json()["error"]["code"] == "engine_restarted"


async def test_a_bug_in_mid_stream_is_told_to_the_client(dirs, monkeypatch):
    def broken(self, token):
        raise KeyError("a bug")

    monkeypatch.setattr("engine.text.detokenizer.Detokenizer.feed", broken)
    async with api(dirs["plain"], answer(1.0, "Hello")) as server:  # the pause lets the stream begin before it breaks
        reply = await server.chat(stream=True)
    last = [line for line in reply.text.splitlines() if line.startswith("data: ")][-1]
    assert reply.status_code == 200 and json.loads(last[6:])["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_by_the_engine_has_its_own_status(dirs, stream):
    full = RequestError(id="", status=429, message="the queue is full", code="queue_full")
    async with api(dirs["plain"], answer(full)) as server:
        reply = await server.chat(stream=stream)
    assert reply.status_code == 429 and reply.headers["retry-after"]
    assert reply.json()["error"] == {
        "message": "the queue is full",
        "type": "rate_limit_error",
        "code": "queue_full",
        "param": None,
    }


@pytest.mark.parametrize("body", [{"stream": True}, {}, {"stream": True, "n": 2}])
async def test_a_client_that_leaves_cancels_at_once(dirs, body):
    async with api(dirs["plain"], answer("Hello", 60.0)) as server:
        task = asyncio.create_task(server.chat(**body))
        while len(server.engine.streams) < body.get("n", 1):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        async with asyncio.timeout(5):
            while not all(s.cancelled for s in server.engine.streams):
                await asyncio.sleep(0.01)
            while "moorage_disconnects_total 1.0" not in (await server.http.get("/metrics")).text:
                await asyncio.sleep(0.01)


async def test_a_long_prefill_keeps_the_connection_alive(dirs):
    async with api(dirs["plain"], answer("Hello", prefill_s=0.4)) as server:
        server.service.keep_alive_s, server.service.refusal_s = 0.05, 0.01
        reply = await server.chat(stream=True)
    before, _, after = reply.text.partition("data: ")
    assert before.count(": keep-alive\n\n") >= 3 and "[DONE]" in after
