"""The streaming core under all output grammars: a buffer, a generator that asks for more text, and events.

A grammar is a generator over `Source`. It consumes text in an order that depends on the text only, never on how it was cut
into pieces, so any chunking gives the same events (adjacent text events joined) as the whole text at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

from engine.text.literals import any_of

T = TypeVar("T")
Grammar = Generator[None, None, T]


@dataclass(frozen=True)
class Text:
    """Visible answer text."""

    text: str


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    text: str


Event = Text | Thought | CallStart | CallArguments


class Malformed(Exception):
    """The text is not what the grammar demands; nothing of it has been turned into a call yet."""


class Markers:
    """A set of literal texts to look for, and how much of a text's end may be the beginning of one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(dict.fromkeys(t for t in texts if t))
        self._find = re.compile(any_of(self.texts)) if self.texts else None
        self._heads = frozenset(t[:n] for t in self.texts for n in range(1, len(t)))
        self._longest = max((len(t) - 1 for t in self.texts), default=0)

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._find.search(text, start) if self._find else None

    def held(self, text: str, start: int) -> int:
        """Length of the longest end of text[start:] that is the beginning of a marker."""
        for n in range(min(self._longest, len(text) - start), 0, -1):
            if text[-n:] in self._heads:
                return n
        return 0


class Source:
    """Text that has arrived and was not consumed. Grammars `yield` when they need more; `ended` says there is none."""

    def __init__(self) -> None:
        self.buffer, self.at, self.ended = "", 0, False
        self.record: list[str] | None = None  # what was consumed since recording began, for falling back to plain text

    def feed(self, text: str) -> None:
        self.buffer = self.buffer[self.at :] + text
        self.at = 0

    def take(self, count: int) -> str:
        text = self.buffer[self.at : self.at + count]
        self.at += len(text)
        if self.record is not None:
            self.record.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Undo a `take`."""
        self.buffer, self.at = text + self.buffer[self.at :], 0

    def rest(self) -> int:
        return len(self.buffer) - self.at

    def need(self, count: int = 1) -> Grammar[bool]:
        """Wait for `count` characters. False at the end of the text."""
        while self.rest() < count:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Grammar[str]:
        """The next character, "" at the end."""
        return self.buffer[self.at] if (yield from self.need()) else ""

    def skip_space(self, emit: Callable[[str], object] | None = None) -> Grammar[str]:
        """Consume whitespace (into `emit`); returns the character behind it ("" at the end)."""
        while True:
            char = yield from self.peek()
            if not char or not char.isspace():
                return char
            space = self.take(1)
            if emit:
                emit(space)

    def starts(self, literal: str) -> Grammar[bool]:
        """Whether the next text is `literal`, waiting only as long as that is undecided. Consumes nothing."""
        while True:
            have = self.buffer[self.at : self.at + len(literal)]
            if not literal.startswith(have):
                return False
            if have == literal:
                return True
            if self.ended:
                return False
            yield

    def until(self, markers: Markers, emit: Callable[[str], None]) -> Grammar[str]:
        """Hand text to `emit` up to the first marker, consume the marker and return it; "" at the end of the text."""
        while True:
            found = markers.search(self.buffer, self.at)
            if found:
                if found.start() > self.at:
                    emit(self.take(found.start() - self.at))
                return self.take(len(found[0]))
            hold = 0 if self.ended else markers.held(self.buffer, self.at)
            ready = self.rest() - hold
            if ready:
                emit(self.take(ready))
            if self.ended:
                return ""
            yield


class TrimmedEnd:
    """Passes text on but keeps trailing whitespace back until something visible follows, or drops it."""

    def __init__(self, emit: Callable[[str], None], lead: str | None = None) -> None:
        """`lead` = characters to drop at the beginning."""
        self._emit, self._lead, self._kept = emit, lead, ""
        self.visible = False

    def __call__(self, text: str) -> None:
        if not self.visible and self._lead and not self._kept:
            text = text.lstrip(self._lead)
        text = self._kept + text
        body = text.rstrip()
        self._kept = text[len(body) :]
        if body:
            self.visible = True
            self._emit(body)

    def flush(self) -> None:
        if self._kept:
            self._emit(self._kept)
        self._kept = ""

    def drop(self) -> None:
        self._kept = ""
