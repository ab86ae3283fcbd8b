"""Whose request is this: session, agent and kind of turn, from what agents already send.

Explicit ids win, in the order below; without one the beginning of the conversation is its identity, because an agent resends it
every turn. Ids are client data: they are cut, and whoever prints them quotes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import orjson

from gateway.conversations import folded
from gateway.turn import Session, Turn

MAX_ID = 128
STEADY_CHARS = 8192  # of a system prompt; agents that share so much of it differ in their first question
KEEP_STEADY = 64  # system prompts; an agent sends the same one in every conversation, and finding its lines takes 0.1 ms
HEADERS = (
    "x-moorage-session",
    "x-claude-code-session-id",
    "session-id",  # codex
    "session_id",  # codex, older
    "conversation_id",  # codex, older
    "x-opencode-session",
    "x-session-affinity",
    "x-session-id",
)
AGENTS = (
    ("claude-cli", "claude-code"),
    ("claude-code", "claude-code"),
    ("codex", "codex"),
    ("opencode", "opencode"),
    ("openclaw", "openclaw"),
)
_NO_NUMBER = re.compile(r"^[^0-9\n]+$", re.M)
_CLAUDE_USER = re.compile(r"session_(?:id\W+)?([0-9a-fA-F-]{36})")  # as a suffix, or inside a JSON object


def stage(turn: Turn) -> Turn:
    session = identify(turn.received.headers, turn.body)
    if turn.caller.key != "anonymous" and session.id:
        # One key's sessions are not another's, also when agents on two desks choose the same id.
        session = Session(f"{turn.caller.key}/{session.id}", session.source, session.agent, session.turn_class)
    return turn.but(session=session)


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> Session:
    """The session of a chat body that came with these (lower-case) headers."""
    id, source = _explicit(headers, body)
    if not id and "messages" in body:
        id, source = _beginning(body["messages"]), "conversation"
    agent = headers.get("user-agent", "").lower()
    agent = next((name for mark, name in AGENTS if mark in agent), "")
    return Session(id[:MAX_ID], source, agent, turn_class(body))


def _explicit(headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, str]:
    for name in HEADERS:
        if value := headers.get(name):
            return value, f"header:{name}"
    hints = body.get("moorage")
    if isinstance(hints, dict) and isinstance(hints.get("session"), str) and hints["session"]:
        return hints["session"], "body:moorage.session"
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        if isinstance(value := metadata.get("session_id"), str) and value:
            return value, "body:metadata.session_id"
        if isinstance(value := metadata.get("user_id"), str) and (found := _CLAUDE_USER.search(value)):
            return found[1], "body:metadata.user_id"
    if isinstance(value := body.get("user"), str) and (found := _CLAUDE_USER.search(value)):
        return found[1], "body:user"
    value = body.get("prompt_cache_key")
    return (value, "body:prompt_cache_key") if isinstance(value, str) and value else ("", "")


def _beginning(messages: list[dict[str, Any]]) -> str:
    """A hash of the first user message and of what stays the same before it: a clock in the system prompt makes no session."""
    return folded(messages, "beginning", "", partial(_begun, messages))


def _begun(messages: list[dict[str, Any]], before: str, known: int) -> str:
    """`before` is what the first `known` messages gave, which is all there is to it once a user has spoken in them."""
    first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), None)
    if before and first is not None and first < known:
        return before
    first = first or 0
    head = [[m.get("role"), _steady(_text(m.get("content")))] for m in messages[:first]]
    head += [[m.get("role"), _text(m.get("content"))] for m in messages[first : first + 1]]
    return "c-" + hashlib.blake2b(orjson.dumps(head), digest_size=12).hexdigest()


def _text(content: Any) -> Any:
    """Only the text: cache marks on parts move from turn to turn and are no identity."""
    return [p.get("text") for p in content if isinstance(p, dict)] if isinstance(content, list) else content


def _steady(content: Any) -> Any:
    """The lines without a number in the first part of a system prompt: clocks, counters and nonces all have one."""
    if isinstance(content, list):
        return [_steady(part) for part in content]
    return _steady_lines(content[:STEADY_CHARS]) if isinstance(content, str) else content


@lru_cache(KEEP_STEADY)
def _steady_lines(text: str) -> list[str]:
    return _NO_NUMBER.findall(text)


def turn_class(body: Mapping[str, Any]) -> str:
    """first | user | tool_result | side. A request without tools from an agent that has some is a side request (a title)."""
    messages = body.get("messages")
    if not messages:
        return "side"
    if messages[-1].get("role") == "tool":
        return "tool_result"
    if any(m.get("role") == "assistant" for m in messages):
        return "user"
    return "first" if body.get("tools") else "side"
