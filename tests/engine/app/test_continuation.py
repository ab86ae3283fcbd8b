"""The next turn is prepared where the client's history will part from the sampled tokens, and only there."""

import asyncio

import pytest

from engine.ipc import BACKGROUND
from tests.support.fake_engine import answer, api
from tests.support.text import tool

QUESTION = [{"role": "user", "content": "Read a.py. " * 20}]
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'


async def quiet(server):
    async with asyncio.timeout(5):
        while server.service.continuations._running:
            await asyncio.sleep(0.01)


def background(server):
    return server.engine.prepared


async def next_prompt(server, message, follower, **more):
    await server.chat(messages=[*QUESTION, message, follower], **more)
    return server.engine.requests[-1].tokens


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("strip", [True, False])
async def test_a_long_thought_before_a_call_is_prepared_for_the_client_that_strips_it(dirs, strip):
    """json_calls keeps thoughts inside a tool loop if the client sends them back; this client may not."""
    thought = "I have to look at the file first. " * 8
    async with api(dirs["json_calls"], answer(f"<think>\n{thought}\n</think>\n\n{CALL}{CALL}{CALL}")) as server:
        made = (await server.chat(messages=QUESTION, tools=[tool()])).json()["choices"][0]["message"]
        await quiet(server)
        live = server.engine.streams[0]
        sampled = live.request.tokens.tolist() + server.engine.encode(f"<think>\n{thought}\n</think>\n\n{CALL}{CALL}{CALL}")
        prepared = [r.tokens for r in background(server)]
        if strip:
            made.pop("reasoning_content")
        tokens = await next_prompt(
            server, made, {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "x"}, tools=[tool()]
        )
        known = max(shared(tokens, t) for t in [sampled, *prepared])
        assert shared(tokens, sampled) < known, "the calls are re-written with newlines between them: sampling did not do that"
        assert len(tokens) - known <= 32, "everything but the tool's result and the opening of the answer was known"


async def test_what_renders_as_it_was_sampled_is_not_computed_again(dirs):
    async with api(dirs["plain"], answer("A plain answer. " * 10)) as server:
        await server.chat(messages=QUESTION)
        await quiet(server)
        metrics = (await server.http.get("/metrics")).text
    assert not background(server) and 'moorage_next_turns_total{outcome="as sampled"} 1.0' in metrics


async def test_a_new_request_of_the_session_ends_the_preparation(dirs):
    slow = answer(f"<think>\n{'deep ' * 60}\n</think>\n\n{'So. ' * 30}")

    def script(engine, request):
        return answer(60.0)(engine, request) if request.priority <= BACKGROUND else slow(engine, request)

    async with api(dirs["json_calls"], script) as server:
        await server.chat(messages=QUESTION, moorage={"session": "s"})
        async with asyncio.timeout(5):
            while not background(server):
                await asyncio.sleep(0.01)
        await server.chat(messages=QUESTION, moorage={"session": "other"})
        first = next(s for s in server.engine.streams if s.request.priority <= BACKGROUND)
        assert not first.cancelled
        await server.chat(messages=QUESTION, moorage={"session": "s"})
        async with asyncio.timeout(5):
            while not first.cancelled:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("more", [{"moorage": {"priority": -1}}, {"n": 2}])
async def test_answers_without_a_next_turn_prepare_nothing(dirs, more):
    async with api(dirs["json_calls"], answer(f"<think>\n{'deep ' * 60}\n</think>\n\nok")) as server:
        await server.chat(messages=QUESTION, **more)
        await quiet(server)
    assert not background(server)
