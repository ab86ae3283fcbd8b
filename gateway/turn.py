"""Turn: the one object that travels the pipeline, and the small values it is made of.

A Turn is frozen. A stage takes one and gives back another; the only way to change the body is `decide`, so whatever differs
between the body received and the body sent is, by construction, a Decision in the record. What comes back from the upstream
is not here but in `answer.Answer`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from engine.protocol import AnchorHint, Hints
from gateway.edits import ABSENT, Edit, apply
from gateway.tools import Tools, derived

if TYPE_CHECKING:
    from gateway.config import Policy
    from gateway.dialects.base import Dialect

# A changed prompt would otherwise stand in the record three times; the bodies themselves are recorded in full.
SHOWN_CHARS = 200


class Decision(Struct, frozen=True):
    """One thing a stage did or found. `stage.rule` names it in headers, logs and metrics; `edits` is what it changes.

    A decision without edits is an observation (a violation logged, a repaired tool call, a fallback).
    """

    stage: str
    rule: str
    reason: str = ""
    edits: tuple[Edit, ...] = ()

    def record(self) -> dict[str, Any]:
        """As it stands in the record; long values are cut."""
        out: dict[str, Any] = {"stage": self.stage, "rule": self.rule}
        if self.reason:
            out["reason"] = self.reason
        if self.edits:
            out["edits"] = [_shown(e) for e in self.edits]
        return out


def _shown(edit: Edit) -> dict[str, Any]:
    out: dict[str, Any] = {"path": ".".join(map(str, edit.path))}
    for name, value in (("before", edit.before), ("after", edit.after)):
        if value is ABSENT:
            continue
        if isinstance(value, Tools):  # the same in every request of an agent
            value = derived(value, "shown", partial(_begin, value, SHOWN_CHARS))
        elif isinstance(value, (dict, list)):
            value = _begin(value, SHOWN_CHARS)
        out[name] = value[:SHOWN_CHARS] + "..." if isinstance(value, str) and len(value) > SHOWN_CHARS else value
    return out


def _begin(value: Any, room: int) -> str:
    """At least the first `room` characters of what `repr` gives for a JSON value, without writing all of a long one."""
    if isinstance(value, str):
        return repr(value[: room + 1])
    if not isinstance(value, (dict, list)):
        return repr(value)
    pairs = isinstance(value, dict)
    out = "{" if pairs else "["
    for i, item in enumerate(value):
        out += (", " if i else "") + (f"{item!r}: " if pairs else "")
        out += _begin(value[item] if pairs else item, room - len(out))
        if len(out) > room:
            return out
    return out + ("}" if pairs else "]")


class Received(Struct, frozen=True, kw_only=True):
    """The request as it came: `body` after content-encoding was undone, header names in lower case."""

    route: str
    headers: Mapping[str, str]
    body: bytes
    content_encoding: str = ""
    peer: str = ""
    at: float = field(default_factory=time.time)  # wall clock, seconds
    started: float = field(default_factory=time.perf_counter)  # monotonic, seconds; the zero of every *_ms of the record


class Caller(Struct, frozen=True):
    """Who asks. `key` is the configured name of a key, never the key itself."""

    key: str = "anonymous"
    admin: bool = False


class Session(Struct, frozen=True):
    """Whose conversation this is. `source` says how it was known: header:NAME | body:NAME | conversation."""

    id: str = ""
    source: str = ""
    agent: str = ""
    turn_class: str = ""  # first | user | tool_result | side


class Thinking(Struct, frozen=True):
    """The one internal meaning of every thinking spelling. `mode` None = nobody said anything, the model's default holds."""

    mode: Literal["off", "on", "budget"] | None = None
    budget: int | None = None
    effort: str | None = None  # the client's word, for upstreams that take one
    source: str = ""  # client:SPELLING | policy:default | policy:force

    def __str__(self) -> str:
        return f"budget {self.budget}" if self.mode == "budget" else self.mode or "unset"


class Turn(Struct, frozen=True, kw_only=True):
    """One request on its way. The first stage (`Dialect.read`) fills body, raw, model and stream from `received`."""

    id: str
    received: Received
    dialect: Dialect
    raw: bytes = b""  # the chat completions body as bytes before any decision
    parsed: Mapping[str, Any] = field(default_factory=dict)  # the parse of `raw`, never changed
    body: Mapping[str, Any] = field(default_factory=dict)  # `parsed` with every decision so far applied
    model: str = ""  # the name the client asked for
    stream: bool = False
    wants_usage: bool = True  # False: a streaming client that did not ask for usage must not see it
    wire: Any = None  # what the dialect's own writer must know of the client's request; nobody else reads it
    breakpoints: tuple[AnchorHint, ...] = ()  # client cache marks, as message positions of `body`
    caller: Caller = Caller()
    policy: Policy | None = None  # the merged rules for this model, key and route
    session: Session = Session()
    thinking: Thinking = Thinking()
    hints: Hints = Hints()
    decisions: tuple[Decision, ...] = ()
    lease: Any = None  # what `limits.admit` holds for this turn until `limits.settle`

    def start(self, raw: bytes, parsed: dict[str, Any], model: str, stream: bool, *notes: Decision) -> Turn:
        """This turn with the chat body it begins with; `parsed` is the parse of `raw`. For `Dialect.read` only."""
        decisions = self.decisions + notes
        return replace(self, raw=raw, parsed=parsed, body=parsed, model=model, stream=stream, decisions=decisions)

    def decide(self, *decisions: Decision) -> Turn:
        """This turn with `decisions` noted and their edits made. The only way to change the body."""
        if not decisions:
            return self
        body = apply(self.body, [e for d in decisions for e in d.edits])
        return replace(self, body=body, decisions=self.decisions + decisions)

    def shared(self, name: str, value: Any) -> Turn:
        """This turn with an equal object in the place of `parsed[name]`, which no decision has touched yet."""
        parsed = {**self.parsed, name: value}
        return replace(self, parsed=parsed, body=parsed if self.body is self.parsed else {**self.body, name: value})

    def but(self, **fields: Any) -> Turn:
        """This turn with other fields; `body` is not among them."""
        assert "body" not in fields, "the body changes through decide()"
        return replace(self, **fields)


def new_id() -> str:
    """A request id: unique, sortable by time to the millisecond, safe in headers, file names and log lines. No secret."""
    return f"req_{time.time_ns() // 1_000_000:012x}{random.getrandbits(48):012x}"
