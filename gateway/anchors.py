"""Message structure -> semantic-anchor hints: where this agent may cut, edit or grow its context next.

A pure reading of one request. What an agent was seen to do before (and the weights that follow from it) is added by whoever
remembers sessions; here the weights are the priors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.protocol import AnchorHint, Hints
from gateway.conversations import places
from gateway.turn import Turn

# The engine checks each hint by rendering the conversation up to it; far more than it can keep states for is waste.
MAX_ANCHORS = 48

# Priors: how likely the next request parts from this one here. Learned weights replace them.
TOOLS, SYSTEM, LAST_USER, TOOL_RESULT, TURN, THINKING = 0.8, 0.9, 0.9, 0.6, 0.5, 0.3


def stage(turn: Turn) -> Turn:
    session = turn.session
    anchors = derive(turn.body, turn.breakpoints) if "messages" in turn.body else ()
    return turn.but(hints=Hints(session=session.id, agent=session.agent, turn_class=session.turn_class, anchors=anchors))


def derive(body: Mapping[str, Any], breakpoints: Iterable[AnchorHint] = ()) -> tuple[AnchorHint, ...]:
    """The anchors of a chat body, in message order. `message` -1 is the tools block.

    Always there: end of tools, end of the system head, start of the newest user message, client breakpoints. Then, newest
    first until MAX_ANCHORS: thoughts that a client may strip, tool results it may replace, every end of a turn.
    """
    messages = body["messages"]
    fixed = list(breakpoints)
    if body.get("tools"):
        fixed.append(AnchorHint(message=-1, edge="end", kind="tools", weight=TOOLS))
    head = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    if head:
        fixed.append(AnchorHint(message=head - 1, edge="end", kind="system", weight=SYSTEM))
    if users := places(messages, "user"):
        fixed.append(AnchorHint(message=users[-1], edge="start", kind="user", weight=LAST_USER))
    fixed = list(dict.fromkeys(fixed))[:MAX_ANCHORS]
    found = fixed + _moving(messages, MAX_ANCHORS - len(fixed))
    return tuple(sorted(found, key=lambda a: (a.message, a.edge == "end")))


def _moving(messages: list[dict[str, Any]], room: int) -> list[AnchorHint]:
    """Turn ends, tool results and thoughts, newest first, at most `room`."""
    out: list[AnchorHint] = []
    for i in range(len(messages) - 1, -1, -1):
        role = messages[i]["role"]
        following = messages[i + 1]["role"] if i + 1 < len(messages) else None
        if role == "assistant":
            out.append(AnchorHint(message=i, edge="end", kind="turn", weight=TURN))
            if messages[i].get("reasoning_content") or messages[i].get("reasoning"):
                out.append(AnchorHint(message=i, edge="start", kind="thinking", weight=THINKING))
        elif role == "tool":
            out.append(AnchorHint(message=i, edge="end", kind="tool_result", weight=TOOL_RESULT))
        elif role == "user" and following != "user":
            out.append(AnchorHint(message=i, edge="end", kind="turn", weight=TURN))
        if len(out) >= room:
            break
    return out[:room]
