"""OpenAI chat completions and, on the same writer, completions and embeddings: the wire form is the inner form, so bytes pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from engine.protocol import AnchorHint
from gateway import sse
from gateway.conversations import folded, marked
from gateway.dialects.base import ask_usage, loads, need_bool, need_model
from gateway.errors import Refusal
from gateway.sse import Chunk
from gateway.tools import KnownTools
from gateway.turn import Turn

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
DONE = b"data: [DONE]\n\n"


class Chat:
    """POST /v1/chat/completions."""

    name = "chat"
    upstream_path = "/v1/chat/completions"

    def __init__(self, known: KnownTools | None = None) -> None:
        self._known = known or KnownTools()

    def read(self, turn: Turn) -> Turn:
        body, raw, notes = loads(turn.received.body, self._known)
        check_messages(body.get("messages"))
        turn = turn.start(raw, body, need_model(body), need_bool(body, "stream"), *notes)
        marks = breakpoints(body)
        return ask_usage(turn.but(breakpoints=marks) if marks else turn)

    def writer(self, turn: Turn) -> ChatWriter:
        return ChatWriter()

    def refusal(self, refusal: Refusal) -> bytes:
        return orjson.dumps(refusal.openai())


class Completions(Chat):
    """POST /v1/completions: text or token ids in, text out. No messages, so no anchors and no thinking."""

    name = "completions"
    upstream_path = "/v1/completions"

    def read(self, turn: Turn) -> Turn:
        body, raw, notes = loads(turn.received.body, self._known)
        if "prompt" not in body:
            raise Refusal(400, "`prompt` is missing", "Send a string, a list of strings or a list of token ids", param="prompt")
        return ask_usage(turn.start(raw, body, need_model(body), need_bool(body, "stream"), *notes))


class Embeddings(Chat):
    """POST /v1/embeddings: passes through; no conversation, so nothing that belongs to one."""

    name = "embeddings"
    upstream_path = "/v1/embeddings"

    def read(self, turn: Turn) -> Turn:
        body, raw, notes = loads(turn.received.body, self._known)
        if "input" not in body:
            raise Refusal(400, "`input` is missing", "Send a string, a list of strings or a list of token ids", param="input")
        return turn.start(raw, body, need_model(body), False, *notes)


class ChatWriter:
    """Chunks go out as they came; changed ones are written anew."""

    passthrough = True

    def feed(self, chunks: Sequence[Chunk]) -> bytes:
        return b"".join(c.bytes() for c in chunks)

    def finish(self) -> bytes:
        return DONE

    def error(self, refusal: Refusal) -> bytes:
        # No [DONE] after it: a client that ignores the error must still notice that the stream broke off.
        return sse.event(refusal.openai())

    def keepalive(self) -> bytes:
        return sse.comment("keep-alive")

    def whole(self, answer: dict[str, Any]) -> bytes:
        return orjson.dumps(answer)


def check_messages(messages: Any) -> None:
    """The shape every later stage relies on: a non-empty list of objects with a known role. Raises Refusal."""
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "`messages` must be a non-empty list", param="messages")
    folded(messages, "checked", None, partial(_check_roles, messages))


def _check_roles(messages: list[Any], good: None, first: int) -> None:
    for i, message in enumerate(messages[first:], first):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            shown = f"unknown role {role[:40]!r}" if isinstance(role, str) else "no role"
            raise Refusal(
                400, f"messages[{i}] has {shown}", f"Use one of {', '.join(sorted(ROLES))}", param=f"messages[{i}].role"
            )


def breakpoints(body: dict[str, Any]) -> tuple[AnchorHint, ...]:
    """The client's own cache marks (`cache_control` on a message, one of its parts, or a tool)."""
    found = []
    tools = body.get("tools")
    if isinstance(tools, list) and any(isinstance(t, dict) and "cache_control" in t for t in tools):
        found.append(-1)
    found += marked(body["messages"])
    return tuple(AnchorHint(message=i, edge="end", kind="client_breakpoint", weight=0.9) for i in found)
