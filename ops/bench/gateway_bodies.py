"""The requests `gateway.py` sends, and what a right answer to them is. Deterministic: every target gets the same bytes."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import sse_upstream

PIECE = 1500  # characters of one message; a file or a command's output as agents send them
MODELS = {"plain": "bench", "calls": "bench-calls", "chunks": "bench-chunks", "paced": "bench-paced"}
TEXT = 'the request handler returns self.value = compute(path, "name") if not found: raise KeyError def größe → test_1 /usr\n\n'
WORDS = TEXT.split(" ")


TURNS = 12  # requests of one conversation
SESSION = "session 00000000"  # stands in every first question; the load client counts its conversations here


@cache
def session(kilobytes: float) -> tuple[bytes, ...]:
    """The requests of one conversation, from this much text in its messages on; each adds a call and what came of it."""
    messages = _messages(int(kilobytes * 1000) + (TURNS - 1) * PIECE)
    messages[1] = messages[1] | {"content": f"{SESSION}: {messages[1]['content']}"}
    return tuple(_request("plain", messages[: len(messages) - 2 * left]) for left in range(TURNS - 1, -1, -1))


@cache
def body(kind: str, kilobytes: float) -> bytes:
    """A chat request of an agent with this much text in its messages; `calls` brings twelve tools."""
    return _request(kind, _messages(int(kilobytes * 1000)))


def _request(kind: str, messages: list[dict[str, Any]]) -> bytes:
    data: dict[str, Any] = {"model": MODELS[kind], "messages": messages, "stream": True}
    data |= {"temperature": 0.7, "max_tokens": 4096, "stream_options": {"include_usage": True}}
    if kind == "calls":
        data["tools"] = [_tool(name) for name in ("read", *(f"tool_{i}" for i in range(11)))]
    return json.dumps(data, ensure_ascii=False).encode()


def _messages(size: int) -> list[dict[str, Any]]:
    source = random.Random(size)
    out: list[dict[str, Any]] = [{"role": "system", "content": _text(source, min(size // 3, 12000))}]
    left, turn = size - len(out[0]["content"]), 0
    out.append({"role": "user", "content": _text(source, min(left, PIECE))})
    left -= min(left, PIECE)
    while left > 0:
        call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": "read", "arguments": f'{{"path":"src/{turn}.py"}}'},
        }
        out.append({"role": "assistant", "content": "I look at it.", "tool_calls": [call]})
        out.append({"role": "tool", "tool_call_id": call["id"], "content": _text(source, min(left, PIECE))})
        left -= PIECE
        turn += 1
    return out


def _text(source: random.Random, size: int) -> str:
    words = []
    while size > 0:
        words.append(source.choice(WORDS))
        size -= len(words[-1]) + 1
    return " ".join(words)


def _tool(name: str) -> dict[str, Any]:
    described = "Reads what stands at a path, from a line on; fails when there is nothing. " * 4
    properties = {
        "path": {"type": "string", "description": described},
        "line": {"type": "integer", "minimum": 1},
        "mode": {"type": "string", "enum": ["text", "bytes"]},
        "filters": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": described, "parameters": parameters}}


def check(kind: str, raw: str) -> None:
    """Stop the bench when an answer does not say what the upstream said."""
    events = []
    for line in raw.replace("\r\n", "\n").split("\n"):
        if line.startswith("data: {"):
            events.append(json.loads(line[6:]))
    deltas = [c["delta"] for e in events for c in e.get("choices", ())]
    text = "".join(d.get("content") or "" for d in deltas)
    calls = [c["function"] for d in deltas for c in d.get("tool_calls") or ()]
    arguments = "".join(c.get("arguments") or "" for c in calls)
    wanted = {
        "plain": ("".join(sse_upstream.WORDS), ""),
        "calls": ("".join(sse_upstream.WORDS[: -1 - len(sse_upstream.ARGUMENTS)]), "".join(sse_upstream.ARGUMENTS)),
        "chunks": ("".join(f"t{i} " for i in range(sse_upstream.CHUNK_EVENTS)), ""),
    }
    if kind in wanted and (text, arguments) != wanted[kind]:
        raise SystemExit(f"a wrong answer to {kind}: {text[:200]!r} {arguments[:200]!r}")
    if kind == "paced" and text.count("t") != sse_upstream.PACED_EVENTS:
        raise SystemExit(f"a paced answer lacks events: {text[:200]!r}")
