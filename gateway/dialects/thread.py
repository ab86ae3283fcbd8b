"""A chat history in the making: what the other dialects' readers write their conversation into.

It owns the rules that every translation shares: the system text comes first, neighbours of one role are one message, a call's
results follow it at once whatever stood between them, and a system message in mid-conversation becomes what a chat template can
render. Whatever of this changes the meaning or the order is noted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.protocol import AnchorHint
from gateway.errors import Refusal
from gateway.turn import Decision

# Between two texts of one role that were separate blocks or messages. Texts of one assistant answer are joined without it,
# because they are one text that a call or a thought had parted.
GAP = "\n\n"
# How agents themselves mark system text inside a user message.
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
# Client cache marks: a mark with an hour to live is a stronger promise to come back than one of five minutes.
MARK, LONG_MARK = 0.9, 1.0
TOOLS = -1  # the message number of the tools block in an AnchorHint


class Notes:
    """Decisions of one reading: each rule once, with the number of times it applied."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._found: Counter[tuple[str, str]] = Counter()

    def add(self, rule: str, reason: str) -> None:
        self._found[rule, reason] += 1

    def decisions(self) -> tuple[Decision, ...]:
        return tuple(
            Decision(self._stage, rule, reason if count == 1 else f"{reason} ({count} times)")
            for (rule, reason), count in self._found.items()
        )


class Thread:
    """Chat messages, built from the front. `notes` gets what was changed on the way."""

    def __init__(self, notes: Notes) -> None:
        self.messages: list[dict[str, Any]] = []
        self._notes = notes
        self._owners: dict[str, dict[str, Any]] = {}  # call id -> the assistant message that made the call
        self._marks: dict[int, tuple[dict[str, Any], float]] = {}  # id(message) -> (message, weight)
        self._newest: dict[str, Any] | None = None
        self._tools_mark = 0.0

    def system(self, text: str) -> None:
        """System or developer text. Only the head of a conversation can hold it in every chat template."""
        if not text:
            return
        if all(m["role"] == "system" for m in self.messages):
            self._text("system", text)
        else:
            self._notes.add("late_system", "a system message in mid-conversation became a marked part of a user message")
            self._text("user", REMINDER.format(text))

    def user(self, text: str) -> None:
        if text:
            self._text("user", text)

    def _text(self, role: str, text: str) -> None:
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += GAP + text
        else:
            self.messages.append({"role": role, "content": text})
        self._newest = self.messages[-1]

    def _assistant(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        self._newest = self.messages[-1]
        return self._newest

    def said(self, text: str) -> None:
        """Text of the assistant, joined to what it said before in the same turn."""
        if text:
            self._assistant()["content"] += text

    def thought(self, text: str) -> None:
        if text:
            message = self._assistant()
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def foreign_thought(self, block: dict[str, Any]) -> None:
        """A thought that another provider signed: only that provider can check it, so its block goes along as it came."""
        self._assistant().setdefault("thinking_blocks", []).append(block)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        message = self._assistant()
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)
        self._owners[call_id] = message

    def result(self, call_id: str, text: str, at: str) -> None:
        """A call's result, put right behind its call. Raises Refusal when nobody made that call."""
        owner = self._owners.get(call_id)
        if owner is None:
            raise Refusal(
                400,
                f"{at} is the result of a call {call_id[:80]!r} that no earlier message makes",
                "Send the call before its result, or leave the result out",
                code="orphan_result",
                param=at,
            )
        place = len(self.messages)
        while self.messages[place - 1] is not owner:
            place -= 1
        while place < len(self.messages) and self.messages[place]["role"] == "tool":
            place += 1
        if place != len(self.messages):
            self._notes.add("result_order", "text between a call and its result was moved behind the result")
        self._newest = {"role": "tool", "tool_call_id": call_id, "content": text}
        self.messages.insert(place, self._newest)

    def mark(self, cache_control: Any) -> None:
        """The client's cache mark on what was added last."""
        if isinstance(cache_control, dict) and self._newest is not None:
            weight = max(weight_of(cache_control), self._marks.get(id(self._newest), (None, 0.0))[1])
            self._marks[id(self._newest)] = (self._newest, weight)

    def mark_tools(self, cache_control: dict[str, Any]) -> None:
        self._tools_mark = max(self._tools_mark, weight_of(cache_control))

    def breakpoints(self) -> tuple[AnchorHint, ...]:
        """The cache marks as message positions."""
        found = [(TOOLS, self._tools_mark)] if self._tools_mark else []
        found += [(i, self._marks[id(m)][1]) for i, m in enumerate(self.messages) if id(m) in self._marks]
        return tuple(AnchorHint(message=i, edge="end", kind="client_breakpoint", weight=w) for i, w in found)


def weight_of(cache_control: dict[str, Any]) -> float:
    return LONG_MARK if cache_control.get("ttl") == "1h" else MARK


def media(kind: str, at: str) -> Refusal:
    """What a client is told about content that is no text."""
    return Refusal(
        400,
        f"{at} holds {kind}, and the models behind this gateway read text only",
        "Leave it out, or describe it in words; in a running session go back to before it was attached",
        code="unsupported_content",
        param=at,
    )


def must(value: Any, kind: type, at: str) -> Any:
    """`value` if it is a `kind`. Raises Refusal."""
    if not isinstance(value, kind):
        words = {str: "a string", list: "a list", dict: "an object"}
        raise Refusal(400, f"`{at}` must be {words[kind]}", param=at)
    return value
