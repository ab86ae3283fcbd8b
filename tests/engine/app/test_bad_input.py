"""Whatever a client sends, it gets a 4xx with a message that names the field; never a 500, never silence."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ipc import Control, frame
from engine.supervisor import EngineState
from engine.text.tokenizer import Tokenizer
from tests.support.fake_engine import answer, api
from tests.support.text import tool

HI = [{"role": "user", "content": "hi"}]
CASES = [
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "reasoning_content": 7}]}, "messages[0].reasoning_content"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 7}]}, "messages[0].tool_call_id"),
    ({"messages": HI, "temperature": "hot"}, "temperature"),
    ({"messages": HI, "temperature": -1}, "temperature"),
    ({"messages": HI, "temperature": True}, "temperature"),
    ({"messages": HI, "top_p": 1.5}, "top_p"),
    ({"messages": HI, "top_k": 1.5}, "top_k"),
    ({"messages": HI, "min_p": -0.1}, "min_p"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "max_tokens": "many"}, "max_tokens"),
    ({"messages": HI, "max_completion_tokens": -5}, "max_completion_tokens"),
    ({"messages": HI, "n": 0}, "n"),
    ({"messages": HI, "n": 1000}, "n"),
    ({"messages": HI, "seed": "x"}, "seed"),
    ({"messages": HI, "stop": [7]}, "stop[0]"),
    ({"messages": HI, "stop": [""]}, "stop"),
    ({"messages": HI, "stop": ["x"] * 65}, "stop"),
    ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"999999": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"5": 1000}}, "logit_bias"),
    ({"messages": HI, "logit_bias": [1]}, "logit_bias"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    ({"messages": HI, "stream": "yes"}, "stream"),
    ({"messages": HI, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"messages": HI, "tools": "x"}, "tools"),
    ({"messages": HI, "tools": [{}]}, "tools[0].function"),
    ({"messages": HI, "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"messages": HI, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"messages": HI, "tool_choice": "sometimes"}, "tool_choice"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HI, "response_format": {"type": "yaml"}}, "response_format"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format"),
    (
        {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}},
        "response_format",
    ),
    ({"messages": HI, "reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": HI, "thinking": {"budget_tokens": "x"}}, "thinking.budget_tokens"),
    ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": HI, "chat_template_kwargs": 7}, "chat_template_kwargs"),
    ({"messages": HI, "moorage": {"anchors": 7}}, "moorage"),
    ({"messages": HI, "moorage": {"anchors": [{"message": "x"}]}}, "moorage"),
    ({"messages": HI, "moorage": {"anchors": [{"message": 0, "weight": 2}]}}, "moorage"),
    ({"messages": HI, "moorage": {"priority": 10**30}}, "moorage"),
    ({"messages": HI, "moorage": {"priority": -100}}, "moorage"),
]


async def test_every_wrong_field_is_named(dirs):
    async with api(dirs["json_calls"], answer("x")) as server:
        for body, param in CASES:
            for stream in (False, True):
                reply = await server.post("/v1/chat/completions", **{"stream": stream, **body})
                assert reply.status_code == 400, (body, reply.text)
                error = reply.json()["error"]
                assert error["param"] == param, (body, error)
                assert error["type"] == "invalid_request_error" and error["message"] and "\n" not in error["message"]
        assert not server.engine.streams
        assert (await server.chat()).status_code == 200, "and the server is as well as before"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"7", b"null", b'{"messages": ', b"\xff\xfe", b'{"a": 1e999}', b"[" * 100000, b'{"\xff": 1}']
)
async def test_bodies_that_are_no_json_object(dirs, data):
    async with api(dirs["plain"], answer("x")) as server:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/tokenize"):
            reply = await server.http.post(path, content=data)
            assert reply.status_code == 400 and reply.json()["error"]["code"] in ("invalid_json", "missing_field"), reply.text


@pytest.mark.parametrize("depth", [300, 600, 900, 2000])
async def test_bodies_that_are_nested_deeply(dirs, depth):
    """Whatever is done with an object inside a body walks into it; none of these walks may end in a traceback."""
    deep = '{"a":' * depth + "1" + "}" * depth
    places = (
        '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]',
        '"chat_template_kwargs":{"x":%s}',
        '"response_format":{"type":"json_schema","json_schema":{"schema":%s}}',
        '"reasoning":%s',
        '"moorage":{"x":%s}',
        '"metadata":%s',
    )
    call = (
        '"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]},{"role":"tool","content":"x"}]'
    )
    bodies = ['{"messages":[{"role":"user","content":"hi"}],%s}' % (p % deep) for p in places] + ["{%s}" % (call % deep)]
    async with api(dirs["json_calls"], answer("x")) as server:
        for body in bodies:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/tokenize"):
                reply = await server.http.post(path, content=body)
                assert reply.status_code < 500, (path, body[:80], reply.text)


@pytest.mark.parametrize("name", ["a\r\nx-evil: 1", "a\nb", "a\x00b", "a\x7fb", "größe", "a" * 5000])
@pytest.mark.parametrize("stream", [False, True])
async def test_field_names_reach_the_header_as_one_harmless_line(dirs, name, stream):
    async with api(dirs["json_calls"], answer("x")) as server:
        reply = await server.chat(stream=stream, **{name: 1})
    told = reply.headers["x-moorage-ignored"]
    assert reply.status_code == 200 and "x-evil" not in reply.headers
    assert told.isascii() and told.isprintable() and told.startswith(name[0])


async def test_a_client_that_leaves_while_it_sends_is_no_error_of_ours(dirs, caplog):
    async with api(dirs["json_calls"], answer("x")) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http.base_url.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()
        while "moorage_disconnects_total 1.0" not in (metrics := (await server.http.get("/metrics")).text):
            await asyncio.sleep(0.01)
    assert 'status="499"' in metrics and 'status="500"' not in metrics
    assert not [r for r in caplog.records if r.exc_info]


async def test_a_number_too_large_for_the_engine_is_refused(dirs, monkeypatch):
    async with api(dirs["json_calls"], answer("x")) as server:

        async def control(verb, timeout=30.0, **args):
            frame(Control(id="c", verb=verb, args=args))

        monkeypatch.setattr(server.engine, "control", control)
        reply = await server.post("/v1/cache/rebuild", state_bytes=10**30)
    assert reply.status_code == 400 and "too large" in reply.json()["error"]["message"]


async def test_a_body_that_is_too_large(dirs, monkeypatch):
    monkeypatch.setattr("engine.api.requests.MAX_BODY", 1000)
    async with api(dirs["plain"], answer("x")) as server:
        assert (await server.chat("x" * 2000)).status_code == 413

        async def chunks():
            for _ in range(10):
                yield b" " * 500

        assert (await server.http.post("/v1/chat/completions", content=chunks())).status_code == 413


async def test_context_too_long_says_limit_and_length(dirs):
    async with api(dirs["plain"], answer("x")) as server:
        server.engine.state = EngineState(phase="ready", max_context=50, vocab=700)
        reply = await server.chat("word " * 200)
        count = (await server.post("/v1/tokenize", messages=[{"role": "user", "content": "word " * 200}])).json()["count"]
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(count) in error["message"] and "50 tokens" in error["message"]


@pytest.mark.parametrize("unit", ["a", "hello world ", "<|im_end|>", "\n", "🚀"])
@pytest.mark.parametrize("where", ["content", "system", "tool", "argument", "prompt", "tokenize"])
async def test_megabytes_that_cannot_fit_are_refused_without_being_encoded(dirs, monkeypatch, unit, where):
    """One thread encodes for everybody: a pasted file must not keep the others waiting for minutes."""
    size, encoded, real = 1_000_000, [], Tokenizer.encode_plain

    def encode(self, text, first=False):
        encoded.append(len(text))
        return real(self, text, first)

    monkeypatch.setattr(Tokenizer, "encode_plain", encode)
    monkeypatch.setattr("engine.app.MOST_COUNTED", 8192)
    huge = unit * (size // len(unit))
    call = {"function": {"name": "f", "arguments": {"x": huge}}}
    bodies = {
        "content": {"messages": [{"role": "user", "content": huge}]},
        "system": {"messages": [{"role": "system", "content": huge}, *HI]},
        "tool": {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "description": huge}}]},
        "argument": {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]},
        "prompt": {"prompt": huge},
        "tokenize": {"prompt": huge},
    }
    path = {"prompt": "/v1/completions", "tokenize": "/v1/tokenize"}.get(where, "/v1/chat/completions")
    async with api(dirs["json_calls"], answer("x")) as server:
        encoded.clear()
        reply = await server.post(path, **bodies[where])
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded", reply.text[:200]
    assert "at least" in reply.json()["error"]["message"] and sum(encoded) < size / 2


async def test_unknown_models_paths_and_methods(dirs):
    async with api(dirs["plain"], answer("x")) as server:
        wrong = await server.chat(model="gpt-9")
        assert wrong.status_code == 404 and wrong.json()["error"]["code"] == "model_not_found" and "tiny" in wrong.text
        assert (await server.http.get("/v1/models/gpt-9")).status_code == 404
        for reply, status in ((await server.http.get("/nowhere"), 404), (await server.http.get("/v1/completions"), 405)):
            assert reply.status_code == status and reply.json()["error"]["message"]


async def test_the_template_s_refusal_is_told(dirs):
    async with api(dirs["xml_calls"], answer("x")) as server:
        reply = await server.post("/v1/chat/completions", messages=[{"role": "system", "content": "x"}])
    assert reply.status_code == 400 and "No user query found in messages." in reply.json()["error"]["message"]


async def test_tools_for_a_template_without_them_are_refused(dirs):
    async with api(dirs["plain"], answer("x")) as server:
        assert (await server.chat(tools=[tool()])).json()["error"]["param"] == "tools"
        assert (await server.chat(tools=[tool()], tool_choice="none")).status_code == 200


ARGUMENTS = [r'{"a": "\ud800"}', '{"a": 1234567890123456789012345}', "[" * 2500, '{"a": NaN}', '{"a": 1e999}', "null", "7"]


@pytest.mark.parametrize("arguments", ARGUMENTS)
async def test_strange_arguments_in_history_are_rendered_somehow(dirs, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
    history = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "\x00"}]
    odd = tool()
    odd["function"]["parameters"]["maximum"] = 10**30
    for name in ("json_calls", "xml_calls"):
        async with api(dirs[name], answer("x")) as server:
            reply = await server.post("/v1/chat/completions", messages=history, tools=[odd])
            metrics = (await server.http.get("/metrics")).text
        assert reply.status_code == 200, reply.text
        repaired = not arguments.startswith('{"a"') or "ud800" in arguments
        assert ('outcome="history_repaired"' in metrics) == repaired


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    sorted({k for body, _ in CASES for k in body} | {"prompt", "echo", "suffix", "user", "think", "output_config"})
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"])},
    optional={"content": JSON, "tool_calls": JSON, "name": JSON, "reasoning_content": JSON, "tool_call_id": JSON},
)
BODY = st.dictionaries(FIELDS, JSON, max_size=5).flatmap(
    lambda body: st.one_of(
        st.just(body), st.lists(MESSAGE, max_size=3).map(lambda m: {**body, "messages": m}), st.just({**body, "messages": HI})
    )
)


async def test_random_bodies_get_2xx_or_4xx(dirs):
    """Bodies near the valid ones: right field names, random values."""
    bodies: list[dict] = []

    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
    @given(BODY)
    def collect(body):
        bodies.append(body)

    collect()
    async with api(dirs["json_calls"], answer("x")) as server:
        for body in bodies:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/tokenize"):
                reply = await server.http.post(path, content=json.dumps(body))
                assert reply.status_code < 500, (path, body, reply.text)
                if reply.status_code >= 400:
                    assert reply.json()["error"]["message"]
