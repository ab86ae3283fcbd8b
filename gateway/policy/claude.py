"""What only Claude behind a provider understands: cache marks and thoughts that its provider signed.

For such a deployment the marks a client set are put back where it set them; for every other one signed blocks are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from engine.protocol import AnchorHint
from gateway.config import Deployment
from gateway.conversations import folded
from gateway.edits import ABSENT, Edit
from gateway.turn import Decision

HOUR_WEIGHT = 1.0  # the weight of a mark with an hour to live


def is_claude(deployment: Deployment) -> bool:
    return deployment.kind == "provider" and ("claude" in deployment.model or deployment.model.startswith("anthropic/"))


def mark(body: Mapping[str, Any], breakpoints: Iterable[AnchorHint]) -> tuple[Decision, ...]:
    """The client's cache marks as a provider of Claude takes them."""
    changes = []
    for hint in breakpoints:
        control = {"type": "ephemeral"} | ({"ttl": "1h"} if hint.weight >= HOUR_WEIGHT else {})
        path = ("tools",) if hint.message < 0 else ("messages", hint.message, "content")
        before = body.get("tools") if hint.message < 0 else body["messages"][hint.message].get("content")
        parts = [{"type": "text", "text": before}] if isinstance(before, str) and before else before
        if isinstance(parts, list) and parts:
            changes.append(Edit(path, before, [*parts[:-1], parts[-1] | {"cache_control": control}]))
    return (Decision("route", "cache_marks", "the client's cache marks, for the provider", tuple(changes)),) if changes else ()


def unsigned(body: Mapping[str, Any]) -> tuple[Decision, ...]:
    """Signed blocks of another provider left out: a plain server reads the thought itself, in `reasoning_content`."""
    messages = body["messages"]
    found = folded(messages, "thinking_blocks", (), partial(_with_blocks, messages))
    changes = [Edit(("messages", i, "thinking_blocks"), messages[i]["thinking_blocks"], ABSENT) for i in found]
    return (Decision("route", "thinking_blocks", "only their own provider can check them", tuple(changes)),) if changes else ()


def _with_blocks(messages: list[dict[str, Any]], found: tuple[int, ...], first: int) -> tuple[int, ...]:
    return (*found, *[i for i in range(first, len(messages)) if "thinking_blocks" in messages[i]])
