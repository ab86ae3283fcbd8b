"""The same request as the same bytes: what differs between two requests without a difference in meaning is taken out.

Every rule is on or off per model, key and route (`config.NormaliseRule`), and what it does is a decision. Rules that lose nothing
are on by default; those that may tell the model an older time, or tell it later in the prompt, are off until somebody wants them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import msgspec

from gateway.config import NormaliseRule
from gateway.conversations import folded, marked
from gateway.edits import ABSENT, Edit, apply
from gateway.policy.volatile import KINDS, cut, put, stable
from gateway.store import Store
from gateway.tools import Tools, derived
from gateway.turn import Decision, Thinking, Turn

SYSTEM = ("system", "developer")
EVERY_KIND = tuple((name, kind.hints) for name, kind in KINDS.items())
EVERYWHERE = tuple((name, kind.hints) for name, kind in KINDS.items() if kind.everywhere)
GAP = "\n\n"
KEEP_RULES = 256  # as many as a configuration may have
# A pin holds while its session lives; agents that come back after a night are at their first request again.
PIN_TTL_S = 12 * 3600.0

# The customary order of a tool's keys; others follow by name. What stands in `properties` keeps its order: it means something.
KEYS = str.split(
    """
    type function $schema $id $ref name description strict parameters enum const default format items properties required
    """
)
ORDER = {name: place for place, name in enumerate(KEYS)}


def decide(body: Mapping[str, Any], rule: NormaliseRule) -> tuple[Decision, ...]:
    """What needs no memory: cache marks, tools, and volatile text that is dropped or moved."""
    out = []
    steps, actions = _steps(rule)
    for step in steps:
        if (done := step(body)) is not None:
            out.append(done)
            body = apply(body, done.edits)
    looked: Any = None
    for kind, action in actions:
        if body["messages"] is not looked:
            looked = body["messages"]
            holding = folded(looked, "may hold", {}, partial(_holding, looked))
        if kind in holding and (done := _volatile(body, kind, action, holding[kind])) is not None:
            out.append(done)
            body = apply(body, done.edits)
    return tuple(out)


@lru_cache(KEEP_RULES)
def _steps(
    rule: NormaliseRule,
) -> tuple[list[Callable[[Mapping[str, Any]], Decision | None]], list[tuple[str, str]]]:
    """(what is done with marks and tools, what with which kind of volatile text)"""
    steps: list[Callable[[Mapping[str, Any]], Decision | None]] = []
    if rule.cache_marks:
        steps.append(_cache_marks)
    if rule.tool_order or rule.tool_schemas:
        steps.append(partial(_tools, rule=rule))
    return steps, [(kind, action) for kind in KINDS if (action := getattr(rule, kind)) in ("drop", "move")]


class Normaliser:
    """The stage. Pins are first-seen values, kept per session in a `Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def stage(self, turn: Turn) -> Turn:
        if "messages" not in turn.body:
            return turn
        rule = turn.policy.normalise
        turn = turn.decide(*decide(turn.body, rule))
        if turn.session.id and turn.session.turn_class != "side":  # a title request is no part of the conversation
            for kind in KINDS:
                if getattr(rule, kind) == "pin":
                    turn = await self._pin_text(turn, kind)
            if rule.pin_thinking:
                turn = await self._pin_thinking(turn)
        return turn

    async def _pin_text(self, turn: Turn, kind: str) -> Turn:
        edits: list[Edit] = []
        for i, message in _spoken(turn.body, SYSTEM):
            fresh = []
            for text in _texts(message):
                found = cut(text, kind)[1]
                first = await self._first(turn, kind, stable(text), found) if found else found
                fresh.append(put(text, kind, first) if len(first) == len(found) and first != found else text)
            edits += _rewritten(i, message, fresh)
        return (
            turn.decide(Decision("normalise", f"{kind}.pin", "as at the session's first request", tuple(edits)))
            if edits
            else turn
        )

    async def _pin_thinking(self, turn: Turn) -> Turn:
        """The mode of the first request with this system prompt: another one renders every message anew."""
        if turn.thinking.source.startswith("policy"):
            return turn
        system = "".join(stable(t) for _, m in _spoken(turn.body, SYSTEM) for t in _texts(m))
        now = turn.thinking
        first = Thinking(*await self._first(turn, "thinking", system, (now.mode, now.budget, now.effort)), source=now.source)
        if first == now:
            return turn
        return turn.but(thinking=first).decide(Decision("normalise", "thinking.pin", f"{now} -> {first}, as the session began"))

    async def _first(self, turn: Turn, kind: str, context: str, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """The value that this session had in this place at first; `value` itself when it is new."""
        place = hashlib.blake2b(context.encode("utf-8", "replace"), digest_size=12).hexdigest()
        name = f"pin/{turn.session.id}/{kind}/{place}"
        known = await self._store.get(name)
        await self._store.put(name, known or msgspec.json.encode(value), PIN_TTL_S)  # again, so that it lives as the session does
        return tuple(msgspec.json.decode(known)) if known else value


# --- volatile text


def _volatile(body: Mapping[str, Any], kind: str, action: str, places: list[int]) -> Decision | None:
    changes: list[Edit] = []
    moved: list[str] = []
    for i in places:
        message = body["messages"][i]
        pairs = [cut(text, kind) for text in _texts(message)]
        if any(found for _, found in pairs) and any(rest for rest, _ in pairs):  # nothing becomes an empty message
            changes += _rewritten(i, message, [rest for rest, _ in pairs])
            moved += [piece.strip("\n") for _, found in pairs for piece in found]
    if not changes:
        return None
    if action == "drop":
        return Decision("normalise", f"{kind}.drop", "taken out of the prompt", tuple(changes))
    end = _at_the_end(apply(body, changes), GAP.join(moved))
    return Decision("normalise", f"{kind}.move", "moved to the end of the prompt", (*changes, end)) if end else None


def _holding(messages: list[dict[str, Any]], found: dict[str, list[int]], first: int) -> dict[str, list[int]]:
    """Where something of each kind may stand; kinds that stand nowhere are left out."""
    found = {kind: places[:] for kind, places in found.items()}
    for i in range(first, len(messages)):
        kinds = EVERY_KIND if (role := messages[i]["role"]) in SYSTEM else EVERYWHERE if role == "user" else ()
        texts = _texts(messages[i]) if kinds else ()
        for kind, hints in kinds:
            if any([hint in text for text in texts for hint in hints]):
                found.setdefault(kind, []).append(i)
    return found


def _at_the_end(body: Mapping[str, Any], text: str) -> Edit | None:
    """Behind everything else, where its change costs nothing; None when the end is the assistant's own text."""
    at = len(body["messages"]) - 1
    message = body["messages"][at]
    if message["role"] not in ("user", "tool"):
        return None
    content = message.get("content")
    after = [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content or ''}{GAP}{text}"
    return Edit(("messages", at, "content"), content, after)


def _spoken(body: Mapping[str, Any], roles: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((i, m) for i, m in enumerate(body["messages"]) if m["role"] in roles)


def _texts(message: dict[str, Any]) -> list[str]:
    """The texts of a message, part by part; "" for parts that have none."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [p["text"] if isinstance(p, dict) and isinstance(p.get("text"), str) else "" for p in parts]


def _rewritten(at: int, message: dict[str, Any], texts: list[str]) -> list[Edit]:
    """The edit that gives a message these texts; a part that has become empty goes."""
    content, before = message.get("content"), _texts(message)
    if texts == before:
        return []
    if isinstance(content, str):
        return [Edit(("messages", at, "content"), content, texts[0])]
    parts = []
    for part, old, new in zip(content, before, texts, strict=True):
        if new == old:
            parts.append(part)
        elif new:
            parts.append(part | {"text": new})
    return [Edit(("messages", at, "content"), content, parts)]


# --- cache marks and tools


def _cache_marks(body: Mapping[str, Any]) -> Decision | None:
    """Marks move from message to message while the text stays; their places are known as breakpoints by now."""
    changes = []
    for i in marked(body["messages"]):
        message = body["messages"][i]
        if "cache_control" in message:
            changes.append(Edit(("messages", i, "cache_control"), message["cache_control"], ABSENT))
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(p, dict) and "cache_control" in p for p in content):
            changes.append(Edit(("messages", i, "content"), content, [_unmarked(p) for p in content]))
    if change := derived(body.get("tools"), "unmarked", partial(_unmarked_tools, body.get("tools"))):
        changes.append(change)
    return Decision("normalise", "cache_marks", "they became anchor hints", tuple(changes)) if changes else None


def _unmarked(part: Any) -> Any:
    marked = isinstance(part, dict) and "cache_control" in part
    return {k: v for k, v in part.items() if k != "cache_control"} if marked else part


def _unmarked_tools(tools: Any) -> Edit | None:
    marked = isinstance(tools, list) and any(isinstance(t, dict) and "cache_control" in t for t in tools)
    return Edit(("tools",), tools, Tools([_unmarked(t) for t in tools])) if marked else None


def _tools(body: Mapping[str, Any], rule: NormaliseRule) -> Decision | None:
    tools = body.get("tools")
    name = ("ordered", rule.tool_schemas, rule.tool_order)
    return derived(tools, name, partial(_ordered, tools, rule)) if isinstance(tools, list) else None


def _ordered(tools: list[Any], rule: NormaliseRule) -> Decision | None:
    if not all(isinstance(t, dict) for t in tools):
        return None
    fresh = Tools([_canonical(t) for t in tools] if rule.tool_schemas else tools)
    if rule.tool_order:
        fresh.sort(key=_tool_name)
    if all(a is b for a, b in zip(tools, fresh, strict=True)):
        return None
    return Decision("normalise", "tools", "in the order of their names and keys", (Edit(("tools",), tools, fresh),))


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else ""


def _canonical(value: Any, named: bool = False) -> Any:
    """A tool with its keys in the customary order, the same object when they are; `named` = its keys are names, not keywords."""
    if isinstance(value, list):
        fresh = [_canonical(v) for v in value]
        return value if all(a is b for a, b in zip(value, fresh, strict=True)) else fresh
    if not isinstance(value, dict):
        return value
    keys = list(value) if named else sorted(value, key=lambda k: (ORDER.get(k, len(ORDER)), k))
    fresh = {k: _canonical(value[k], named=k in ("properties", "$defs", "definitions") and not named) for k in keys}
    same = list(value) == keys and all(fresh[k] is value[k] for k in keys)
    return value if same else fresh
