"""A scripted model behind chat completions, for real coding agents: it calls the tools they offer and answers in the end.

A step is `Say(text)` or `Do(thought, text, calls)`, a call a mapping from every tool name an agent may have for it to that tool's
arguments. Calls of one step are parallel, and their fragments interleave on the wire. A request without tools gets a title.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, finish, message, reasoning, tool_call, usage

Call = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Do:
    thought: str
    text: str
    calls: Sequence[Call]


def pieces(text: str, size: int = 9) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)] or [""]


class ScriptedModel(FakeUpstream):
    """A FakeUpstream that answers by its script. `said` are the assistant messages it made, as chat history has them."""

    def __init__(self, steps: Sequence[Say | Do]) -> None:
        super().__init__()
        self.steps = list(steps)
        self.said: list[dict[str, Any]] = []
        self._ids = itertools.count()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.answers = [self._answer(body)]
        return await super()._post(request)

    def _answer(self, body: dict[str, Any]) -> Stream | Whole:
        if "messages" not in body or not body.get("tools"):
            step: Say | Do = Say("A short title")
        else:
            step = self.steps.pop(0) if self.steps else Say("There is nothing left to do.")
        counts = usage(len(json.dumps(body)) // 4, 20, 7)
        if isinstance(step, Say):
            said = {"role": "assistant", "content": step.text}
            parts = [*map(content, pieces(step.text)), finish("stop")]
        else:
            offered = {t["function"]["name"] for t in body["tools"]}
            calls = [self._call(call, offered) for call in step.calls]
            said = {"role": "assistant", "content": step.text, "reasoning_content": step.thought, "tool_calls": calls}
            parts = [*map(reasoning, pieces(step.thought)), *map(content, pieces(step.text)), *_interleaved(calls)]
            parts.append(finish("tool_calls"))
        if body.get("tools"):
            self.said.append(said)
        if body.get("stream"):
            return Stream([*parts, counts])
        more = {k: v for k, v in said.items() if k not in ("role", "content")}
        return Whole(message(said["content"], "tool_calls" if "tool_calls" in said else "stop", **more))

    def _call(self, call: Call, offered: set[str]) -> dict[str, Any]:
        name = next((n for n in call if n in offered), None)
        assert name is not None, f"none of {list(call)} among {sorted(offered)}"
        arguments = json.dumps(call[name])
        return {"id": f"call_{next(self._ids)}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _interleaved(calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for i, call in enumerate(calls):
        yield tool_call(i, "", call["id"], call["function"]["name"])
    fragments = [[tool_call(i, p) for p in pieces(c["function"]["arguments"])] for i, c in enumerate(calls)]
    for row in itertools.zip_longest(*fragments):
        yield from (f for f in row if f is not None)
