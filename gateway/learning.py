"""What each agent does to its context, learned from its own requests, and what follows for the hints.

Every request is compared with its session's previous one. The edits an agent was seen to make raise the weight of the anchors
that save the work when it makes them again, and stand in `Hints.expect`, so that the engine prepares for them. Only
fingerprints are kept, never text.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from engine.protocol import AnchorHint
from gateway.conversations import folded
from gateway.diagnostics.compare import Part, common, kind_of, parts_of, tool_parts
from gateway.tools import derived
from gateway.turn import Turn

KEEP_SESSIONS = 2000  # a fingerprint of a 200-message conversation is ~60 KB
KEEP_AGENTS = 256
# Fingerprints kept in all: 1,000 conversations of 200 messages. Without it, 2,000 sessions full of short calls would be 16 GB.
KEEP_BYTES = 64 << 20
PART_BYTES = 160  # of one part without its text, measured
MAX_PARTS = 4000  # longer conversations are not learned from; nothing of that size was seen in 48,658 real requests
MORE = frozenset({"reasoning_content", "reasoning", "tool_calls"})  # where a message has parts beside its text
TEXT = (str, type(None))
SHORT = 2000  # tool calls up to this length stay text, so that a re-serialised one is recognised

WINDOW = 200  # requests after which half of what was seen is forgotten: agents change with their releases
PRIOR = 8.0  # requests a prior weight counts for
EXPECT_SHARE = 0.02  # an edit seen this often is worth preparing for; a wasted preparation costs a few hundred tokens

# Which anchors save the work of which edit: (kind of anchor, its edge).
SAVED_BY = {
    "append": {("turn", "end"), ("tool_result", "end")},
    "reasoning_stripped": {("thinking", "start")},
    "tool_call_rewritten": {("thinking", "start"), ("turn", "end"), ("tool_result", "end")},
    "tool_output_replaced": {("turn", "end"), ("thinking", "start")},
    "compaction": {("system", "end")},
    "rewind": {("user", "start"), ("turn", "end")},
    "message_changed": {("user", "start"), ("turn", "end")},
    "clock": {("system", "end"), ("user", "start")},
    "system_changed": {("tools", "end")},
}
SAVES: dict[tuple[str, str], list[str]] = {}  # the same, the other way round
for _edit, _anchors in SAVED_BY.items():
    for _anchor in _anchors:
        SAVES.setdefault(_anchor, []).append(_edit)


@dataclass(slots=True)
class Agent:
    """Edits of one agent; `seen` counts its requests that had a predecessor, both fading over WINDOW."""

    edits: Counter[str] = field(default_factory=Counter)
    seen: float = 0.0

    def add(self, kind: str) -> None:
        self.seen += 1
        self.edits[kind] += 1
        if self.seen >= WINDOW:
            self.seen /= 2
            for name in self.edits:
                self.edits[name] /= 2

    def share(self, kind: str) -> float:
        return self.edits[kind] / self.seen if self.seen else 0.0

    def weight(self, kind: str, edge: str, prior: float) -> float:
        """An anchor's prior weight, moved towards how often this agent made an edit which the anchor would save."""
        used = sum(self.edits[edit] for edit in SAVES.get((kind, edge), ()))
        return round(min(1.0, (PRIOR * prior + used) / (PRIOR + self.seen)), 3)


class Learning:
    """A stage behind `anchors`: remembers, classifies, weighs. Bounded; the least recently used sessions and agents go."""

    def __init__(self, sessions: int = KEEP_SESSIONS, agents: int = KEEP_AGENTS, keep_bytes: int = KEEP_BYTES) -> None:
        self._limits = sessions, agents, keep_bytes
        self._size = 0
        self._sessions: OrderedDict[str, Print] = OrderedDict()
        self._agents: OrderedDict[str, Agent] = OrderedDict()

    def stage(self, turn: Turn) -> Turn:
        """The turn with learned weights and expectations in its hints."""
        session = turn.session
        if not session.id or session.turn_class == "side" or "messages" not in turn.body:
            return turn
        agent = self._agent(session.agent or turn.caller.key)
        before = self._sessions.get(session.id)
        now = fingerprint(turn.body, before)
        if now is not None:
            self._remember(session.id, now)
            if before is not None:
                agent.add(classify(before, now))
        if not agent.seen:
            return turn
        weights = {(a.kind, a.edge, a.weight): 0.0 for a in turn.hints.anchors}  # many anchors, few kinds
        for kind, edge, prior in weights:
            weights[kind, edge, prior] = agent.weight(kind, edge, prior)
        anchors = tuple([_weighing(a, weights[a.kind, a.edge, a.weight]) for a in turn.hints.anchors])
        expect = tuple(sorted(k for k in SAVED_BY if k != "append" and agent.share(k) >= EXPECT_SHARE))
        return turn.but(hints=msgspec.structs.replace(turn.hints, anchors=anchors, expect=expect))

    def _agent(self, name: str) -> Agent:
        agent = self._agents.setdefault(name, Agent())
        self._agents.move_to_end(name)
        if len(self._agents) > self._limits[1]:
            self._agents.popitem(last=False)
        return agent

    def _remember(self, id: str, now: Print) -> None:
        """Keep `now` as the session's newest request."""
        before = self._sessions.pop(id, None)
        self._sessions[id] = now
        self._size += now.size - (before.size if before else 0)
        while len(self._sessions) > self._limits[0] or (self._size > self._limits[2] and len(self._sessions) > 1):
            self._size -= self._sessions.popitem(last=False)[1].size


def _weighing(a: AnchorHint, weight: float) -> AnchorHint:
    return AnchorHint(message=a.message, edge=a.edge, kind=a.kind, weight=weight)


@dataclass(frozen=True, slots=True)
class Print:
    """A request's fingerprint: the parts of its tools and, message by message, a digest and the parts, their text hashed."""

    tools: tuple[Part, ...]
    digests: list[int]
    messages: list[tuple[Part, ...]]
    sizes: list[int]  # about how many bytes each message's parts take

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def parts(self) -> list[Part]:
        return [*self.tools, *(part for message in self.messages for part in message)]


def fingerprint(body: Mapping[str, Any], before: Print | None = None) -> Print | None:
    """The fingerprint of a body, None beyond MAX_PARTS. What it shares with `before` is taken from there."""
    tools, messages = body.get("tools"), body.get("messages")
    known = derived(tools, "fingerprint", lambda: tuple(map(_hashed, tool_parts(tools))))
    said = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    if len(known) + len(said) > MAX_PARTS:
        return None
    digests = folded(messages if len(said) == len(messages or ()) else said, "digests", [], partial(_digests, said))
    same = _common(before.digests, digests) if before else 0
    parts = before.messages[:same] if before else []
    parts += [_parts(i, said[i]) for i in range(same, len(said))]
    sizes = before.sizes[:same] if before else []
    sizes += [PART_BYTES * len(message) + sum([len(part.text) for part in message]) for message in parts[same:]]
    return Print(known, digests, parts, sizes) if len(known) + sum(map(len, parts)) <= MAX_PARTS else None


def _digests(said: list[Mapping[str, Any]], before: list[int], first: int) -> list[int]:
    return [*before, *[_digest(m) for m in said[first:]]]


def _digest(message: Mapping[str, Any]) -> int:
    """The same for messages that read the same. Others may read the same too; their parts then show it."""
    get = message.get
    said, calls = get("content"), get("tool_calls")
    thought = get("reasoning_content") or get("reasoning")
    if not isinstance(said, TEXT) or not isinstance(thought, TEXT):
        said, thought = repr(said), repr(thought)
    return hash((get("role"), said, thought, repr(calls) if calls else None))


def _common(old: list[int], new: list[int]) -> int:
    if new[: len(old)] == old:
        return len(old)
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(new))


def _parts(i: int, message: Mapping[str, Any]) -> tuple[Part, ...]:
    """The parts of a message, their text hashed. Most messages have nothing but a role and a text."""
    role, text = message.get("role"), message.get("content")
    if type(text) is str and text and type(role) is str and role and message.keys().isdisjoint(MORE):
        return Part("", i, role, "head", f'"{hash(role):x}"'), Part("", i, role, "content", f'"{hash(text):x}"')
    return tuple(map(_hashed, parts_of(i, message)))


def _hashed(part: Part) -> Part:
    if part.what == "call" and len(part.text) <= SHORT:
        return part
    return Part("", part.message, part.role, part.what, f'"{hash(part.text):x}"')  # JSON, as the text of a tool is


def classify(before: Print, now: Print) -> str:
    """The kind of the edit that made `now` out of `before`, as in `diagnostics.compare`."""
    if before.tools == now.tools and _common(before.digests, now.digests) == len(before.digests):
        return "append"
    old, new = before.parts(), now.parts()
    same = common(old, new)
    return "append" if same == len(old) else kind_of(old, new, same)
