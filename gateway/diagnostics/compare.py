"""Where does a request depart from an earlier one, and what kind of edit is that? A pure function over two chat bodies.

A body is read in the order every template renders it: tools, then messages. What comes first in a prompt decides what can be
reused, so the first departure is the cause and everything behind it a consequence. Cache marks and parameters that no template
renders are not part of a prompt and are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from msgspec import Struct

# Kinds of departure, each with what a user can do about it.
REMEDIES = {
    "append": "",
    "identical": "",
    "clock": "Volatile text stands in the prompt's head; set normalise.clock or normalise.environment to move or pin it",
    "system_changed": "The system prompt changed; keep it constant and put what changes into the newest message",
    "tools_reordered": "The same tools in another order; switch on normalise.tool_order",
    "tools_rewritten": "The same tools written differently; switch on normalise.tool_schemas",
    "tools_changed": "Tools were added or removed; a changed tool list always costs the whole prompt",
    "reasoning_stripped": "The client drops old thoughts; the engine prepares for it, allow it the time between two turns",
    "tool_call_rewritten": "The client re-serialises tool calls; send the arguments as they were received",
    "tool_output_replaced": "The client replaces old tool results; expected for long conversations",
    "compaction": "The client compacted its history; expected when its context is full",
    "rewind": "The user went back to an earlier turn; expected",
    "message_changed": "A past message changed; if nobody edited it, look at what the client injects there",
    "thinking_changed": "Thinking was switched between turns, which changes the prompt; switch on normalise.pin_thinking",
    "other_session": "This is another conversation; nothing of it was sent before in this session",
}

SHOWN = 60  # characters of evidence on each side of a departure

_VOLATILE = re.compile(
    r"\d{1,2}:\d{2}(:\d{2})?|\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{2,4}|today'?s date|current (date|time)|cch=|cc_version"
    r"|total_tokens|tokens? (left|used|remaining)|nonce|timestamp|uptime|[0-9a-f]{8}-[0-9a-f]{4}-",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Departure:
    """`place` names the first difference, `message` its index in the newer body (-1 = tools), `offset` characters into its text.

    `kept` counts the characters of prompt text before it, `total` those of the newer body.
    """

    kind: str
    place: str = ""
    message: int = 0
    offset: int = 0
    before: str = ""
    after: str = ""
    kept: int = 0
    total: int = 0

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind]


class Part(Struct, frozen=True):
    """One piece of a prompt. `what`: tool | head | content | reasoning | call."""

    place: str
    message: int
    role: str
    what: str
    text: str


def parts(body: Mapping[str, Any]) -> list[Part]:
    """The prompt text of a chat body, piece by piece in rendered order. Odd bodies are read as far as they hold text."""
    return [*tool_parts(body.get("tools")), *message_parts(body.get("messages"))]


def tool_parts(tools: Any) -> list[Part]:
    out = []
    for i, tool in enumerate(_dicts(tools)):
        plain = {k: v for k, v in tool.items() if k != "cache_control"}
        out.append(Part(f"tools[{i}]", -1, "tools", "tool", orjson.dumps(plain).decode()))
    return out


def message_parts(messages: Any) -> list[Part]:
    return [part for i, message in enumerate(_dicts(messages)) for part in parts_of(i, message)]


def parts_of(i: int, message: Mapping[str, Any]) -> list[Part]:
    """The parts of the message at place `i`."""
    role, place = str(message.get("role") or ""), f"messages[{i}]"
    out = [Part(place, i, role, "head", role)]
    name, thought = thought_of(message)
    if thought:
        out.append(Part(f"{place}.{name}", i, role, "reasoning", thought))
    if text := text_of(message.get("content")):
        out.append(Part(f"{place}.content", i, role, "content", text))
    return out + [Part(f"{place}.tool_calls[{j}]", i, role, "call", text) for j, text in enumerate(calls_of(message))]


def thought_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """(the name of the field with the thought, the thought), empty when there is none."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(text := message.get(name), str) and text:
            return name, text
    return "", ""


def calls_of(message: Mapping[str, Any]) -> list[str]:
    """Name and arguments of each call of the message."""
    out = []
    for call in _dicts(message.get("tool_calls")):
        function = call.get("function") if isinstance(call.get("function"), dict) else {}
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        out.append(f"{function.get('name')} {text}")
    return out


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Departure:
    """What became of the prompt `before` in `after`. `append` = all of it is still there, in place."""
    old, new = parts(before), parts(after)
    total = sum(len(p.text) for p in new)
    same = common(old, new)
    kept = sum(len(p.text) for p in new[:same])
    if same == len(old):
        if _thinking(before) != _thinking(after):
            return Departure("thinking_changed", "thinking", 0, 0, _thinking(before), _thinking(after), kept, total)
        kind = "identical" if same == len(new) else "append"
        return Departure(kind, new[same].place if same < len(new) else "", kept=kept, total=total)
    kind = kind_of(old, new, same)
    if same == len(new):  # the newer one is a beginning of the older one
        last = new[-1] if new else Part("", 0, "", "", "")
        return Departure(kind, last.place, last.message, len(last.text), _cut(old[same].text, 0), "", kept, total)
    at = _differ(old[same].text, new[same].text) if old[same].what == new[same].what else 0
    texts = _cut(old[same].text, at), _cut(new[same].text, at)
    where = old[same] if old[same].role == "tools" else new[same]  # a tool that is gone stands in no newer part
    return Departure(kind, where.place, where.message, at, *texts, kept + at, total)


def common(old: Sequence[Part], new: Sequence[Part]) -> int:
    """How many parts both begin with."""
    same = 0
    while same < min(len(old), len(new)) and _equal(old[same], new[same]):
        same += 1
    return same


def _equal(a: Part, b: Part) -> bool:
    return a.text == b.text and a.what == b.what and a.role == b.role


def kind_of(old: Sequence[Part], new: Sequence[Part], at: int) -> str:
    """The kind of the first departure, where `old[at]` exists and differs from `new[at]` (which may not exist)."""
    a = old[at]
    if at >= len(new):
        return "rewind"
    b = new[at]
    if "tools" in (a.role, b.role):
        return _tools_kind(old, new)
    if a.message == b.message == 0 and a.what == b.what == "head":
        return "other_session"
    if a.role in ("system", "developer") and b.role == a.role and a.what == "content":
        return "clock" if _is_volatile(a.text, b.text) else "system_changed"
    if a.what == "reasoning" and at + 1 < len(old) and _continues(old[at + 1], b):
        return "reasoning_stripped"
    if a.what == b.what == "content" and a.role == b.role == "assistant" and _strip_thought(a.text) == _strip_thought(b.text):
        return "reasoning_stripped"
    if a.what == b.what == "call" and _same_call(a.text, b.text):
        return "tool_call_rewritten"
    if a.what == b.what == "content" and a.role == b.role == "tool":
        return "tool_output_replaced"
    return _history_kind(old, new, at)


def _history_kind(old: Sequence[Part], new: Sequence[Part], at: int) -> str:
    """Compaction, rewind or a changed message, told apart by what survives behind the departure."""
    a, b = old[at], new[at]
    rest_old, rest_new = sum(len(p.text) for p in old[at:]), sum(len(p.text) for p in new[at:])
    first = next((p.message for p in old if p.role not in ("tools", "system", "developer")), 0)
    known = {p.text for p in old[at + 1 :] if p.what == "content" and len(p.text) > 8}
    survives = sum(p.text in known for p in new[at:] if p.what == "content")
    last_new = new[-1].message
    if a.message == first and not survives and (rest_new * 2 >= rest_old or b.message == last_new):
        return "other_session"
    if b.message == last_new and b.role == "user" and not survives and a.message != first:
        return "rewind"  # the newer one ends here, with something else to say
    if old[-1].message - a.message > last_new - b.message and (survives or rest_new * 2 < rest_old):
        return "compaction"
    same_place = a.role == b.role and a.what == b.what and (survives or a.message == old[-1].message)
    if same_place and _is_volatile(a.text, b.text):
        return "clock"
    return "message_changed" if same_place or survives else "rewind"


def _tools_kind(old: Sequence[Part], new: Sequence[Part]) -> str:
    a, b = ([p.text for p in side if p.role == "tools"] for side in (old, new))
    if sorted(a) == sorted(b):
        return "tools_reordered"
    canonical = [sorted(orjson.dumps(orjson.loads(t), option=orjson.OPT_SORT_KEYS) for t in side) for side in (a, b)]
    return "tools_rewritten" if canonical[0] == canonical[1] else "tools_changed"


def _is_volatile(a: str, b: str) -> bool:
    """Do the texts differ in one short place only, and does a clock, a counter or a nonce stand there?"""
    head = _differ(a, b)
    tail = _differ(a[head:][::-1], b[head:][::-1])
    return max(len(a), len(b)) - head - tail <= 400 and any(_touches(t, head, len(t) - tail) for t in (a, b))


def _touches(text: str, start: int, end: int) -> bool:
    """Does a volatile pattern overlap text[start:end]? Two characters of slack: the sign between a word and its number."""
    low = max(0, start - SHOWN)
    found = _VOLATILE.finditer(text[low : end + SHOWN])
    return any(m.start() + low < end + 2 and m.end() + low > start - 2 for m in found)


def _continues(a: Part, b: Part) -> bool:
    """Is `b` what stood behind the thought?"""
    return a.what == b.what and a.role == b.role and (a.text == b.text or (a.what == "call" and _same_call(a.text, b.text)))


def _same_call(a: str, b: str) -> bool:
    (name_a, _, args_a), (name_b, _, args_b) = a.partition(" "), b.partition(" ")
    try:
        return name_a == name_b and orjson.loads(args_a) == orjson.loads(args_b)
    except orjson.JSONDecodeError:
        return False


def _strip_thought(text: str) -> str:
    return re.sub(r"\A\s*<think>.*?</think>\s*", "", text, flags=re.S).strip()


def _thinking(body: Mapping[str, Any]) -> str:
    """What the upstream was told of thinking: templates and providers write some of it into the prompt."""
    kwargs = body.get("chat_template_kwargs")
    value = kwargs.get("enable_thinking") if isinstance(kwargs, dict) else None
    words = [] if value is None else ["on" if value else "off"]
    words += [f"{name} {body[name]}" for name in ("reasoning_effort", "thinking", "reasoning") if body.get(name) is not None]
    return ", ".join(words)[: 2 * SHOWN] or "unset"


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(p.get("text") or "") for p in _dicts(content))


def _differ(a: str, b: str) -> int:
    """The length of the common beginning; halves instead of characters, because contents are long."""
    if a == b:
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a.startswith(b[:middle]) else (low, middle - 1)
    return low


def _cut(text: str, at: int) -> str:
    return text[max(0, at - SHOWN) : at + SHOWN]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []
