"""How long is this prompt? Asked of the upstream that would answer it; estimated, and said so, when none can tell."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import orjson

from gateway.exchange import Exchange
from gateway.turn import Decision, Turn
from gateway.upstream.base import prepare

# Code and English take 3 to 4.5 bytes a token in today's vocabularies. Rather too many than too few: agents compact their
# context by this number, and too late is an error where too early is only early.
BYTES_PER_TOKEN = 3.5
# What a rendered prompt is made of, and what /tokenize takes.
RENDERED = ("model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class Counting(Exchange):
    """An exchange that asks for no answer. `run` sends `{"input_tokens": n}`."""

    async def run(self) -> None:
        count = None
        base = self.turn
        async with aclosing(self._router.attempts(base)) as deployments:
            async for deployment in deployments:
                self.turn, _ = prepare(base, deployment)
                body = orjson.dumps({k: self.turn.body[k] for k in RENDERED if k in self.turn.body})
                count = await self._upstreams[deployment.kind].tokenize(deployment, body)
                break
        if count is None:
            count = estimate(self.turn)
            self._answer.decide(Decision("count_tokens", "estimate", "no upstream can count; estimated from the text's length"))
        self._answer.end("ok")
        await self._client.whole(200, orjson.dumps({"input_tokens": count}), (*self.turn.decisions, *self._answer.decisions))


def estimate(turn: Turn) -> int:
    """Tokens of a chat body's texts and tools, at least 1."""
    size = sum(map(_size, turn.body["messages"])) + len(orjson.dumps(turn.body.get("tools", "")))
    return max(1, round(size / BYTES_PER_TOKEN))


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 0
