"""What is reused changes no answer: after every kind of reuse, greedy tokens and next-token logits are those of a cold run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.engine.prefix.server import Server, serving
from tests.engine.prefix.talk import Message, opening, rounds, stripped, switch

pytestmark = pytest.mark.slow

LENGTHS = [63, 64, 65, 127, 128, 129, 255, 256, 257, 320, 400]  # around page and chunk borders
PROMPT = [(7 * n * n + 3 * n) % 690 for n in range(400)]
TOLERANCE = 1e-3  # of a logit, float32 kernels


@dataclass
class Cold:
    """What a server that reuses nothing says, asked once for each prompt."""

    server: Server
    known: dict[tuple[int, ...], tuple[list[int], np.ndarray]] = field(default_factory=dict)

    async def says(self, tokens: list[int]) -> tuple[list[int], np.ndarray]:
        key = tuple(tokens)
        if key not in self.known:
            await self.server.engine.control("cache.rebuild", options={"flush": "all"})
            ids, logits, usage = await said(self.server, tokens)
            assert usage["common"] == 0
            self.known[key] = ids, logits
        return self.known[key]


async def said(server: Server, tokens: list[int], count: int = 8) -> tuple[list[int], np.ndarray, dict]:
    """Greedy tokens, logits [V] of the first of them, and `usage.moorage`."""
    reply = await server.complete(tokens, max_tokens=count, logprobs=1, ignore_eos=True)
    return reply["choices"][0]["logprobs"]["token_ids"], server.engine.first_logits[-1], reply["usage"]["moorage"]


async def same(server: Server, cold: Cold, tokens: list[int], source: str, least: int) -> None:
    true_ids, true_logits = await cold.says(tokens)
    ids, logits, usage = await said(server, tokens)
    assert usage["source"] == source and usage["common"] >= least, usage
    assert ids == true_ids
    assert far(logits, true_logits) <= TOLERANCE


def far(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two rows of logits, in which the same tokens must be banned."""
    assert (np.isfinite(a) == np.isfinite(b)).all()
    return float(np.abs(a[np.isfinite(a)] - b[np.isfinite(b)]).max())


async def stored(server: Server) -> None:
    while server.prefix.tick():
        server.prefix.disk.collect(wait_s=10)


async def test_reuse_is_exact_to_the_last_token(model: Path, tmp_path: Path) -> None:
    disk = {"kv_disk": str(tmp_path / "kv"), "kernels": "reference"}
    async with serving(model, kernels="reference") as other:
        cold = Cold(other)
        answer, _ = await cold.says(PROMPT)
        again = [*PROMPT, *answer, 5, 6, 7]  # the answer sent back, and more: what the next turn is
        async with serving(model, clean=False, **disk) as server:
            await said(server, PROMPT[: LENGTHS[0]])
            for before, n in zip(LENGTHS, LENGTHS[1:], strict=False):
                await same(server, cold, PROMPT[:n], "ram", before - 1)
            await same(server, cold, PROMPT, "ram", 399)  # the same again
            await same(server, cold, [*PROMPT[:200], *PROMPT[100:300]], "ram", 128)  # resumes before the edit
            await same(server, cold, again, "ram", 407)
            await stored(server)
            await server.engine.control("cache.rebuild", options={"flush": "ram"})
            await same(server, cold, again, "disk", 407)
            await same(server, cold, again, "ram", 410)
        async with serving(model, **disk) as server:  # killed
            await same(server, cold, [*again, 8], "disk", 407)
        async with serving(model, **disk) as server:  # ended in order
            await same(server, cold, [*again, 8, 9], "disk", 407)


async def test_a_prefix_of_a_running_request_is_exact(model: Path) -> None:
    async with serving(model, kernels="reference") as other, serving(model, kernels="reference") as server:
        running = asyncio.create_task(said(server, PROMPT, count=60))
        while not server.engine.first_logits:
            await asyncio.sleep(0.001)
        await same(server, Cold(other), [*PROMPT, 5, 6], "live", 300)
        await running


async def test_a_prepared_turn_is_exact(model: Path) -> None:
    """Canonical continuation: the thought was sampled, the client strips it, the engine computed the rest meanwhile."""

    async def speaks(server: Server, messages: list[Message]) -> tuple[str, np.ndarray, dict]:
        reply = await server.chat(messages, max_tokens=8, **switch(False))
        message = reply["choices"][0]["message"]
        text = f"{message['content']} {len(message.get('tool_calls', ()))}"
        return text, server.engine.first_logits[-1], reply["usage"]["moorage"]

    async with serving(model, kernels="reference") as server:
        messages = opening()
        await rounds(server, messages, 2, stripped, thinking=True)
        await rounds(server, messages, 1, stripped, first=2)
        text, logits, usage = await speaks(server, messages)
        assert usage["new"] < 250, usage
        await server.engine.control("cache.rebuild", options={"flush": "all"})
        true_text, true_logits, usage = await speaks(server, messages)
        assert usage["common"] == 0 and text == true_text
        assert far(logits, true_logits) <= TOLERANCE
