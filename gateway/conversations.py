"""Conversations known by their bytes: an agent sends all of its history with every request, and only the end of it is new.

A request whose messages begin with the very bytes of an earlier one gets the objects that were made of those; what stands behind
them is parsed. `folded` does the same for what is looked for in every message. Nobody changes a message in place, so
sharing is safe.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec

# JSON of conversations kept, and how many: 64 agents at work. They are looked through one by one, a comparison of bytes each.
KEEP_BYTES, KEEP = 16 << 20, 64
# Messages below this are parsed faster than found.
LONG = 8 << 10
KEY = b'"messages"'
TRIES = 4  # places where KEY may stand in tools before it stands in the body itself
# A conversation of which so much came again has gone on, the end of it edited: agents move cache marks and reminders.
REPLACED = 0.75
SAMPLE = 64  # bytes compared in the middle and at the end of a conversation before it is worth a closer look
LOOKS = 8  # closer looks a request; agents share long system prompts, and a look reads all of one
BLOCK = 16 << 10  # bytes that such a look compares at once

T = TypeVar("T")

_OPENS = re.compile(rb"\s*:\s*\[\s*")
_array = msgspec.json.Decoder(list[msgspec.Raw])


class Messages(list):
    """Messages, of which the first `known` are those of an earlier request. `earlier` are the facts of that one, `facts` ours."""

    __slots__ = ("earlier", "facts", "known")

    def __init__(self, messages: list[Any], known: int = 0, earlier: dict[Hashable, Any] | None = None) -> None:
        super().__init__(messages)
        self.known, self.earlier = known, earlier or {}
        self.facts: dict[Hashable, Any] = {}


def folded(messages: Any, name: Hashable, start: T, more: Callable[[T, int], T]) -> T:
    """What is found in all messages: `more(what was found in those before place i, i)`, beginning with `start` at 0.

    Of a beginning that an earlier request had, the findings are taken from there. `name` must say all else that they depend on.
    """
    if not isinstance(messages, Messages):
        return more(start, 0)
    if name not in messages.facts:
        known = name in messages.earlier
        messages.facts[name] = more(messages.earlier[name], messages.known) if known else more(start, 0)
    return messages.facts[name]


def places(messages: list[dict[str, Any]], role: str) -> tuple[int, ...]:
    """Where the messages of this role stand."""
    return folded(messages, ("role", role), (), partial(_places, messages, role))


def _places(messages: list[dict[str, Any]], role: str, found: tuple[int, ...], first: int) -> tuple[int, ...]:
    return (*found, *[i for i in range(first, len(messages)) if messages[i].get("role") == role])


def marked(messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """The places of messages with a cache mark, on themselves or on one of their parts."""
    return folded(messages, "marked", (), partial(_marked, messages))


def _marked(messages: list[dict[str, Any]], found: tuple[int, ...], first: int) -> tuple[int, ...]:
    fresh = []
    for i, message in enumerate(islice(messages, first, None), first):
        parts = message.get("content")
        if "cache_control" in message or (type(parts) is list and any([type(p) is dict and "cache_control" in p for p in parts])):
            fresh.append(i)
    return (*found, *fresh)


@dataclass(slots=True)
class Known:
    """A conversation: what stood between the brackets, as bytes and as what they mean."""

    text: bytes
    messages: Messages
    middle: bytes = b""  # SAMPLE bytes of `text`, as `end` is: to read them, and not it, is what makes looking cheap
    end: bytes = b""
    ends: list[int] = field(default_factory=list)  # of each message in `text`; made when first asked for

    def __post_init__(self) -> None:
        at = len(self.text) // 2
        self.middle, self.end = self.text[at : at + SAMPLE], self.text[-SAMPLE:]

    def goes_on(self, raw: bytes, start: int) -> bool:
        """Does all of the conversation stand in `raw` from `start` on?"""
        end = start + len(self.text)
        return raw[end - len(self.end) : end] == self.end and raw.startswith(self.text, start)

    def may_share(self, raw: bytes, start: int) -> bool:
        at = start + len(self.text) // 2
        return raw[at : at + SAMPLE] == self.middle

    def shared(self, raw: bytes, start: int) -> int:
        """How many messages `raw` has in common, from `start` on; 0 when it has not half of the conversation in common."""
        for at in range(0, len(self.text) // 2, BLOCK):  # most are others soon behind the system prompt
            if not raw.startswith(self.text[at : min(at + BLOCK, len(self.text) // 2)], start + at):
                return 0
        if not self.ends:
            self.ends = _ends(self.text)
        low, high = 0, len(self.ends)
        while low < high:
            half = (low + high + 1) // 2
            low, high = (half, high) if raw.startswith(self.text[: self.ends[half - 1]], start) else (low, half - 1)
        return low


def _ends(text: bytes) -> list[int]:
    """Where each message ends; between two of them stand a comma and white space."""
    ends, at = [], 0
    for span in _array.decode(b"[%s]" % text):
        span = bytes(span)
        at = text.index(span, at) + len(span)
        ends.append(at)
    return ends


@dataclass(frozen=True, slots=True)
class Cut:
    """A body in whose messages `mark` stands for those that are known."""

    rest: bytes
    mark: str
    begin: bytes  # the known messages' bytes
    known: Known  # the conversation that they are from
    count: int  # how many of its messages they are

    @property
    def whole(self) -> bool:
        return self.count == len(self.known.messages)

    def join(self, body: Any) -> bool:
        """Put the known messages in their place. False when the place was not the body's own, or is none."""
        found = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(found, list) or not found or found[0] != self.mark:
            return False
        before, fresh = self.known.messages, found[1:]
        if fresh or not self.whole:
            body["messages"] = Messages([*before[: self.count], *fresh], self.count, before.facts if self.whole else {})
        else:
            body["messages"] = before
        return True


class KnownConversations:
    """Those seen lately by one gateway, the newest last."""

    def __init__(self, keep_bytes: int = KEEP_BYTES, keep: int = KEEP) -> None:
        self._limits = keep_bytes, keep
        self._known: list[Known] = []
        self._size = 0
        self._mark = secrets.token_hex(16)  # nobody can write it into a body

    def cut(self, raw: bytes) -> Cut | None:
        """`raw` without the messages that are known; None when none are."""
        start = _start(raw) if self._known and len(raw) >= LONG else 0
        if not start:
            return None
        known = max((k for k in self._known if k.goes_on(raw, start)), key=lambda k: len(k.text), default=None)
        if known is not None:
            count, begin = len(known.messages), known.text
        else:
            newest = islice((k for k in reversed(self._known) if k.may_share(raw, start)), LOOKS)
            count, known = max(((k.shared(raw, start), k) for k in newest), key=lambda found: found[0], default=(0, None))
            if known is None or not count:
                return None
            begin = known.text[: known.ends[count - 1]]
        rest = b'%s"%s"%s' % (raw[:start], self._mark.encode(), raw[start + len(begin) :])
        return Cut(rest, self._mark, begin, known, count)

    def keep(self, raw: bytes, span: bytes, messages: Any, cut: Cut | None) -> Any:
        """Remember these messages, whose JSON text is `span`. Of a cut body it holds the mark. The messages to go on with."""
        size = len(memoryview(span)) + (len(cut.begin) if cut is not None else 0)
        if not LONG <= size <= self._limits[0] or not isinstance(messages, list):
            return messages
        text = bytes(memoryview(span)[1:-1]).strip()
        if cut is not None:
            text = cut.begin + text[len(cut.mark) + 2 :]
            if len(cut.begin) >= REPLACED * len(cut.known.text):
                self._drop(cut.known)
        messages = messages if isinstance(messages, Messages) else Messages(messages)
        self._known.append(Known(text, messages))
        self._size += len(text)
        while self._size > self._limits[0] or len(self._known) > self._limits[1]:
            self._drop(self._known[0])
        return messages

    def _drop(self, known: Known) -> None:
        place = next((i for i, k in enumerate(self._known) if k is known), None)
        if place is not None:
            self._size -= len(self._known.pop(place).text)


def _start(raw: bytes) -> int:
    """Where the first message stands in what looks like the body's list of messages; 0 when nothing does."""
    at = -1
    for _ in range(TRIES):
        at = raw.find(KEY, at + 1)
        if at < 1:
            return 0
        if raw[max(0, at - SAMPLE) : at].rstrip()[-1:] in (b"{", b",") and (opened := _OPENS.match(raw, at + len(KEY))):
            return opened.end()
    return 0
