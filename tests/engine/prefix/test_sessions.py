"""Neighbours over HTTP: side requests and other users between the turns of a conversation leave it whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.engine.prefix.conftest import DEMO, tiny
from tests.engine.prefix.server import Server, serving
from tests.engine.prefix.talk import ROUND, SLACK, SYSTEM, ask, conversation, opening, rounds, switch

pytestmark = pytest.mark.slow


async def twelve_side_requests(server: Server, words: int, turn: int = 0) -> None:
    """Titles of the same session, and sub-agents and other users that send `words` words nobody sends again."""
    for n in range(6):
        title = [SYSTEM, {"role": "user", "content": f"Write a title for chat {turn}.{n}. " * (n + 1)}]
        await server.chat(title, max_tokens=4, **switch(False))
        other = [{"role": "user", "content": f"Sub-agent {n}: " + " ".join(f"word{turn}{n}x{i}" for i in range(words))}]
        await server.chat(other, max_tokens=4, moorage={"session": f"side{n}" if n % 2 else "s"}, **switch(False))


async def test_twelve_side_requests_leave_the_conversation_whole(model: Path) -> None:
    async with serving(model) as server:
        messages = await conversation(server)
        await twelve_side_requests(server, 10)
        usage = await ask(server, messages)
        assert usage["lost"] <= SLACK and usage["source"] in ("ram", "live"), usage


LONG = 30_000  # tokens
LEAN = {"num_attention_heads": 1, "num_key_value_heads": 1}  # attention is what such a prompt costs: one head of it
SHAPES = {"attention": {**LEAN, "num_hidden_layers": 1}, "window": {}, "hybrid": LEAN, "demo": {}}


@pytest.fixture(scope="module", params=sorted(SHAPES))
def lean(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return DEMO if kind == "demo" else tiny(kind, tmp_path_factory.mktemp(f"lean-{kind}"), **SHAPES[kind])


def budget(server: Server) -> int:
    return int(server.prefix.status()["ram"]["pages"]) * server.prefix.page


@pytest.mark.timeout(900)  # 17 prompts of attention over 30K tokens, on however slow a core
async def test_a_long_conversation_stays_whole_though_side_requests_fill_the_memory(lean: Path) -> None:
    """Memory for the conversation and a third more: the twelve requests between two turns push each other out, not it."""
    context, room = LONG + 2_000, LONG // 3  # what is protected is at most 80 %
    async with serving(lean, max_context=context, kv_bytes=64 << 20, prefill_chunk=512) as server:
        row = server.prefix.storage.row_bytes
        slot = server.prefix.storage.state_bytes
    kv_bytes = (LONG + room) * row + 60 * slot
    async with serving(lean, max_context=context, kv_bytes=kv_bytes, prefill_chunk=512, max_running=2) as server:
        line = "def step_{n}(value): return value + {n}  # line {n}\n"
        size = len(server.service.text.tokenizer.encode_plain(line.format(n=12345)))
        text = "".join(line.format(n=n) for n in range(10_000, 10_000 + (LONG - 1_000) // size))
        messages = opening("Read this file.\n" + text)
        first, _ = await rounds(server, messages, 2)
        assert 0.8 * LONG < first["prompt"] < LONG and budget(server) < LONG + room + 2_000, (first, budget(server))
        for turn in range(2, 5):
            await twelve_side_requests(server, 200, turn)
            (usage,) = await rounds(server, messages, 1, first=turn)
            assert usage["lost"] <= SLACK and usage["new"] <= ROUND + SLACK, (turn, usage)
        assert server.prefix.ram.counters["evicted"] > 0, "the neighbours were to compete for the memory"


async def test_users_side_by_side_lose_nothing(model: Path) -> None:
    """Four users at once, each with tool rounds and a second question of their own."""
    async with serving(model) as server:

        async def user(n: int) -> list[dict]:
            messages = opening(f"I am user {n}. Read my files.")
            seen = []
            for step in range(4):
                async with turn:
                    seen += await rounds(server, messages, 1, first=100 * n + step, moorage={"session": f"u{n}"})
            return seen

        turn = asyncio.Lock()  # a scripted answer belongs to the next request: users take turns, their sessions interleave
        for seen in await asyncio.gather(*(user(n) for n in range(4))):
            assert all(u["lost"] <= SLACK for u in seen), seen
            assert all(u["new"] <= ROUND + SLACK for u in seen[1:]), seen


async def test_users_at_the_same_moment_get_their_own_answers(model: Path) -> None:
    """Requests in flight together, sharing a prefix that one of them is still computing: what each would get alone."""
    prompts = [[*((7 * i * i + 3 * i) % 690 for i in range(300)), n, n + 1, n + 2] for n in range(4)]
    options = {"max_tokens": 6, "logprobs": 1, "ignore_eos": True}

    async def answer(server: Server, n: int) -> list[int]:
        return (await server.complete(prompts[n], f"u{n}", **options))["choices"][0]["logprobs"]["token_ids"]

    async with serving(model, kernels="reference") as server:
        alone = []
        for n in range(4):
            await server.engine.control("cache.rebuild", options={"flush": "all"})
            alone.append(await answer(server, n))
        await server.engine.control("cache.rebuild", options={"flush": "all"})
        assert await asyncio.gather(*(answer(server, n) for n in range(4))) == alone
        assert await asyncio.gather(*(answer(server, n) for n in range(4))) == alone
