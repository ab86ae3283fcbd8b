"""What the engine is asked to hold sampling to, seen from HTTP."""

import json

import pytest
from llguidance import LLMatcher

from tests.support.fake_engine import answer, api
from tests.support.text import tool

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("template", ["json_calls", "xml_calls"])
async def test_calls_are_held_to_the_tools_from_their_opening_on(dirs, template) -> None:
    async with api(dirs[template], answer("ok")) as server:
        reply = await server.chat(tools=[tool("read_file", path="string", limit="integer")])
        grammar, opener = server.engine.requests[0].grammar, server.service.text.tokenizer.id_of("<tool_call>")
    assert reply.status_code == 200 and "x-moorage-not-enforced" not in reply.headers
    assert (grammar.after, grammar.repeat) == (opener, True)
    assert "read_file" in grammar.lark and not LLMatcher.validate_grammar(grammar.lark)


async def test_without_tools_nothing_is_held(dirs) -> None:
    async with api(dirs["json_calls"], answer("ok")) as server:
        await server.chat()
        await server.chat(tools=[tool()], tool_choice="none")
        await server.chat(response_format={"type": "text"})
    assert [r.grammar for r in server.engine.requests] == [None] * 3


async def test_a_schema_that_cannot_be_held_is_said(dirs) -> None:
    odd = tool()
    odd["function"]["parameters"]["properties"]["path"] = {"type": "string", "minLength": "long"}
    async with api(dirs["json_calls"], answer("ok")) as server:
        reply = await server.chat(tools=[odd])
    assert reply.headers["x-moorage-not-enforced"] == "tools.read_file"
    assert server.engine.requests[0].grammar is not None


@pytest.mark.parametrize("kind, schema", [({"type": "json_object"}, {"type": "object"}), (FORMAT, SCHEMA)])
async def test_response_format_begins_behind_the_thought(dirs, kind, schema) -> None:
    async with api(dirs["xml_calls"], answer('x</think>{"city": "Rome"}')) as server:
        made = await server.chat(response_format=kind)
        await server.chat(response_format=kind, reasoning_effort="none")
        end = server.service.text.tokenizer.id_of("</think>")
    assert json.loads(made.json()["choices"][0]["message"]["content"]) == {"city": "Rome"}
    thinking, plain = (r.grammar for r in server.engine.requests)
    assert (thinking.after, plain.after) == (end, None) and thinking.lark == plain.lark
    assert not thinking.repeat and json.dumps(schema)[1:-1] in thinking.lark


async def test_response_format_and_tools_exclude_each_other(dirs) -> None:
    async with api(dirs["json_calls"], answer("ok")) as server:
        both = await server.chat(tools=[tool()], response_format=FORMAT)
        none = await server.chat(tools=[tool()], tool_choice="none", response_format=FORMAT)
    assert both.status_code == 400 and both.json()["error"]["param"] == "response_format"
    assert none.status_code == 200 and server.engine.requests[0].grammar is not None
