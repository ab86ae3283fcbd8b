"""What each agent does to its context, learned from its own requests, and what follows for the hints.

Every request is compared with its session's previous one, once its answer is over: no client waits for it. The edits an agent
was seen to make raise the weight of the anchors that save the work when it makes them again, and stand in `Hints.expect`, so
that the engine prepares for them. Only fingerprints are kept, never text.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from engine.protocol import AnchorHint
from gateway.answer import Answer
from gateway.conversations import folded
from gateway.diagnostics.compare import Part, calls_of, common, kind_of, text_of, thought_of, tool_parts
from gateway.tools import derived
from gateway.turn import Turn

KEEP_SESSIONS = 2000  # a fingerprint of a 200-message conversation is ~35 KB
KEEP_AGENTS = 256
# Fingerprints kept in all: 1,000 conversations of 200 messages. Without it, 2,000 sessions full of short calls would be 16 GB.
KEEP_BYTES = 64 << 20
SAID_BYTES, CALL_BYTES = 110, 100  # of a message and of a call without its text, measured
MAX_PARTS = 4000  # longer conversations are not learned from; nothing of that size was seen in 48,658 real requests
MORE = frozenset({"reasoning_content", "reasoning", "tool_calls"})  # where a message has parts beside its text
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

    def weight(self, kind: str, edge: str, prior: float) -> float:
        """An anchor's prior weight, moved towards how often this agent made an edit which the anchor would save."""
        used = sum([self.edits[edit] for edit in SAVES.get((kind, edge), ())])
        return round(min(1.0, (PRIOR * prior + used) / (PRIOR + self.seen)), 3)


class Learning:
    """A stage behind `anchors` that weighs, an after-step that remembers and classifies.

    Bounded; the least recently used sessions and agents go.
    """

    def __init__(self, sessions: int = KEEP_SESSIONS, agents: int = KEEP_AGENTS, keep_bytes: int = KEEP_BYTES) -> None:
        self._limits = sessions, agents, keep_bytes
        self._size = 0
        self._sessions: OrderedDict[str, Print] = OrderedDict()
        self._agents: OrderedDict[str, Agent] = OrderedDict()

    def stage(self, turn: Turn) -> Turn:
        """The turn with learned weights and expectations in its hints."""
        if not _teaches(turn) or not (agent := self._agent(turn)).seen:
            return turn
        weights = {(a.kind, a.edge, a.weight): 0.0 for a in turn.hints.anchors}  # many anchors, few kinds
        for kind, edge, prior in weights:
            weights[kind, edge, prior] = agent.weight(kind, edge, prior)
        anchors = tuple([_weighing(a, weights[a.kind, a.edge, a.weight]) for a in turn.hints.anchors])
        enough = EXPECT_SHARE * agent.seen
        expect = tuple(sorted([k for k, n in agent.edits.items() if n >= enough and k != "append" and k in SAVED_BY]))
        return turn.but(hints=msgspec.structs.replace(turn.hints, anchors=anchors, expect=expect))

    def learn(self, turn: Turn, answer: Answer | None = None) -> None:
        """The after-step: what became of the session's previous request in this one, which is its newest from now on."""
        if not _teaches(turn) or (now := fingerprint(turn.body)) is None:
            return
        before = self._sessions.get(turn.session.id)
        self._remember(turn.session.id, now)
        if before is not None:
            self._agent(turn).add(classify(before, now))

    def _agent(self, turn: Turn) -> Agent:
        name = turn.session.agent or turn.caller.key
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


def _teaches(turn: Turn) -> bool:
    """A request of a session that came through all stages up to here, where hints are made; refused ones teach nothing."""
    return bool(turn.hints.session) and turn.session.turn_class != "side" and "messages" in turn.body


def _weighing(a: AnchorHint, weight: float) -> AnchorHint:
    return AnchorHint(message=a.message, edge=a.edge, kind=a.kind, weight=weight)


class Said(Struct, frozen=True, gc=False):
    """The fingerprint of a message: hashes of its texts, 0 where there is none, and its calls, of which short ones stay text."""

    role: str
    content: int
    thought: int = 0
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Print:
    """A request's fingerprint: the parts of its tools, its messages, and about how many bytes those take."""

    tools: tuple[Part, ...]
    messages: list[Said]
    size: int

    def parts(self) -> list[Part]:
        return [*self.tools, *(part for i, said in enumerate(self.messages) for part in _parts(i, said))]


def fingerprint(body: Mapping[str, Any]) -> Print | None:
    """The fingerprint of a body, None beyond MAX_PARTS."""
    tools, messages = body.get("tools"), body.get("messages")
    known = derived(tools, "fingerprint", lambda: tuple(map(_hashed, tool_parts(tools))))
    messages = messages if isinstance(messages, list) else []
    if len(known) + len(messages) > MAX_PARTS:
        return None
    said, parts, size = folded(messages, "said", ([], 0, 0), partial(_all_said, messages))
    return Print(known, said, size) if len(known) + parts <= MAX_PARTS else None


def _all_said(messages: list[Any], before: tuple[list[Said], int, int], first: int) -> tuple[list[Said], int, int]:
    """(what each message says, how many parts those have, about how many bytes they take)"""
    said, parts, size = before
    fresh = [_said(m) for m in messages[first:] if isinstance(m, dict)]
    calls = [call for one in fresh for call in one.calls]
    parts += len(fresh) + sum([(one.content != 0) + (one.thought != 0) for one in fresh]) + len(calls)
    size += SAID_BYTES * len(fresh) + CALL_BYTES * len(calls) + sum(map(len, calls))
    return [*said, *fresh], parts, size


def _said(message: Mapping[str, Any]) -> Said:
    """Most messages have nothing but a role and a text."""
    role, text = message.get("role"), message.get("content")
    role = role if type(role) is str else str(role or "")
    content = hash(text if type(text) is str else text_of(text)) if text else 0
    if message.keys().isdisjoint(MORE):
        return Said(role, content)
    return Said(role, content, hash(thought_of(message)[1]), tuple(map(_call, calls_of(message))))


def _call(text: str) -> str:
    return text if len(text) <= SHORT else f'"{hash(text):x}"'


def _parts(i: int, said: Said) -> Iterator[Part]:
    """The parts of the message at place `i` as `compare` would have them, without their text."""
    role = said.role
    yield Part("", i, role, "head", f'"{hash(role):x}"')
    for what, text in (("reasoning", said.thought), ("content", said.content)):
        if text:
            yield Part("", i, role, what, f'"{text:x}"')
    for call in said.calls:
        yield Part("", i, role, "call", call)


def _hashed(part: Part) -> Part:
    text = _call(part.text) if part.what == "call" else f'"{hash(part.text):x}"'  # JSON, as the text of a tool is
    return Part("", part.message, part.role, part.what, text)


def classify(before: Print, now: Print) -> str:
    """The kind of the edit that made `now` out of `before`, as in `diagnostics.compare`."""
    if before.tools == now.tools and now.messages[: len(before.messages)] == before.messages:
        return "append"
    old, new = before.parts(), now.parts()
    same = common(old, new)
    return "append" if same == len(old) else kind_of(old, new, same)
