"""Sampled text -> answer, thought and tool calls, while it streams. One core; the grammars live in `toolformats`.

Nothing is lost: every character comes out as answer, thought, call, or was a tag or the whitespace around one. A call that
cannot be read becomes answer text and is counted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from engine.text import toolformats
from engine.text.stream import CallArguments, CallStart, Event, Grammar, Malformed, Markers, Source, Text, Thought, TrimmedEnd

ToolFormat = Literal["json", "xml", "glm", "mistral", "bare", "none"]
Reader = Callable[[toolformats.Call], Grammar[None]]


@dataclass(frozen=True)
class OutputStyle:
    """How one model writes. `think_open`/`think_close` are "" for models without thoughts."""

    think_open: str = ""
    think_close: str = ""
    tools: ToolFormat = "none"
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"


@dataclass
class Findings:
    """What went wrong or was put right in one answer; each is logged and counted by the caller."""

    malformed: int = 0  # calls that became text
    broken: int = 0  # calls whose arguments are no valid JSON
    repaired: int = 0  # control characters escaped inside JSON strings
    calls_in_thought: int = 0

    def add(self, other: Findings) -> None:
        self.malformed += other.malformed
        self.broken += other.broken
        self.repaired += other.repaired


def new_call_id(tools: ToolFormat) -> str:
    """Mistral's templates demand nine letters or digits; everybody else takes OpenAI's form."""
    return secrets.token_hex(5)[:9] if tools == "mistral" else f"call_{secrets.token_hex(12)}"


class OutputParser:
    """Feed text in, take events out. `tools` None = the request offered no tools, so call syntax is plain text."""

    def __init__(self, style: OutputStyle, *, opened: bool = False, tools: list[dict[str, Any]] | None = None) -> None:
        """`opened` = the prompt already opened the thought."""
        self.style = style
        self.findings = Findings()
        self.calls = 0
        self.in_thought = opened and bool(style.think_open)
        self.thought_seen = self.in_thought
        self._offered = tools
        self._schemas = {t["function"]["name"]: _properties(t) for t in tools or []}
        self._tools = style.tools if tools else "none"
        self._src = Source()
        self._events: list[Event] = []
        self._drafts = ""  # calls written inside a closed thought
        self._answered = self._truncated = False
        self._lead: str | None = None
        self._run = self._main()
        self._done = False
        self._advance()

    def feed(self, text: str) -> list[Event]:
        self._src.feed(text)
        return self._advance()

    def finish(self, truncated: bool = False) -> list[Event]:
        """The answer ended. `truncated` = by a limit: half a call inside a thought is then no call."""
        self._truncated = truncated
        self._src.ended = True
        events = self._advance()
        if not self._done:
            raise AssertionError("a grammar did not stop at the end of its text")
        return events

    def _advance(self) -> list[Event]:
        if not self._done:
            try:
                next(self._run)
            except StopIteration:
                self._done = True
        events, self._events = _joined(self._events), []
        return events

    # --- states

    def _main(self) -> Grammar[None]:
        if self.in_thought:
            yield from self._thought()
        elif self.style.think_open:
            yield from self._maybe_thought()
        yield from self._answer()
        if self._drafts and not self._answered and not self.calls and not self._truncated:
            # The turn holds nothing but calls drafted inside its thought: they are what the model wants done.
            self._replay(self._drafts, into_thought=False)

    def _maybe_thought(self) -> Grammar[None]:
        """Whitespace before an opening tag is dropped; before anything else it is answer text."""
        space: list[str] = []
        yield from self._src.skip_space(space.append)
        if (yield from self._src.starts(self.style.think_open)):
            self._src.take(len(self.style.think_open))
            self.in_thought = self.thought_seen = True
            yield from self._thought()
        else:
            self._src.put_back("".join(space))

    def _thought(self) -> Grammar[None]:
        opener = self.style.call_open if self._tools in ("json", "xml", "glm") else ""
        markers = Markers([self.style.think_close, opener])
        out = TrimmedEnd(lambda t: self._events.append(Thought(t)), lead="\n")
        while True:
            marker = yield from self._src.until(markers, out)
            if marker == self.style.think_close:
                break
            if not marker:
                out.flush()
                return
            if (yield from self._draft(opener, out)):
                return
        out.drop()
        self.in_thought = False
        self._lead = "\n"

    def _draft(self, opener: str, out: TrimmedEnd) -> Grammar[bool]:
        """A call opens inside a thought. It is an action if the answer ends behind it, else part of the thought.

        Returns True at the end of the text.
        """
        src, held = self._src, [opener]
        close = Markers([self.style.call_close, self.style.think_close])
        while True:
            if (yield from src.skip_space(held.append)) not in ("{", "<") and self._tools != "glm":
                break  # the thought only mentions the tag
            marker = yield from src.until(close, held.append)
            if marker == self.style.think_close:
                src.put_back(marker)
                break
            held.append(marker)
            if not marker or not (yield from src.skip_space(held.append)) or not (yield from src.starts(opener)):
                break
            held.append(src.take(len(opener)))
        text = "".join(held)
        if (yield from src.peek()):
            out(text)
            if (yield from src.starts(self.style.think_close)):
                self._drafts = text
            return False
        if self._truncated:
            out(text)
            out.flush()
        else:
            out.drop()
            self.in_thought = False
            self._replay(text, into_thought=True)
        return True

    def _replay(self, text: str, into_thought: bool) -> None:
        """Read calls out of text held back from a thought. What is no call goes `into_thought`, or was shown already."""
        inner = OutputParser(replace(self.style, think_open="", think_close=""), tools=self._offered)
        inner.calls = self.calls
        for event in inner.feed(text) + inner.finish():
            if not isinstance(event, Text):
                self._events.append(event)
            elif into_thought:
                self._events.append(Thought(event.text))
        self.findings.calls_in_thought += inner.calls - self.calls
        self.findings.add(inner.findings)
        self.calls = inner.calls

    def _answer(self) -> Grammar[None]:
        src = self._src
        openers = self._openers()
        markers = Markers(openers)
        if self._tools == "bare":
            space: list[str] = []
            if (yield from src.skip_space(space.append)) == "{":
                yield from self._call("{", self._bare, TrimmedEnd(self._text))
            else:
                src.put_back("".join(space))
        while True:
            out = TrimmedEnd(self._text, lead=self._lead)
            marker = yield from src.until(markers, out)
            if not marker:
                out.flush()
                return
            yield from self._call(marker, openers[marker], out)

    def _call(self, marker: str, read: Reader, before: TrimmedEnd) -> Grammar[None]:
        """Read one call whose opening `marker` was found behind the text `before`; text again if it is none."""
        src = self._src
        src.record = [] if marker == "{" else [marker]
        call = self._new_call(only=self._schemas if marker in ("{", "```json") else None)
        try:
            yield from read(call)
        except Malformed:
            if not call.started:
                self.findings.malformed += marker not in ("{", "```json")  # JSON is a legitimate answer
                before.flush()
                self._text("".join(src.record or []))
                src.record, self._lead = None, None
                return
            call.broken = True
        src.record = None
        yield from self._finish_call(call, marker)
        self._lead = "\n"

    def _new_call(self, only: Container[str] | None = None) -> toolformats.Call:
        return toolformats.Call(self._start, self._arguments, self._schemas, only)

    def _finish_call(self, call: toolformats.Call, marker: str) -> Grammar[None]:
        """Consume the closing tag. Text before it belongs to broken arguments, or is told as answer text."""
        close = self.style.call_close if marker == self.style.call_open else ""
        if close and not (yield from self._closed(close)):
            yield from self._src.until(Markers([close]), call.write if call.raw_tail else call.stray.append)
        elif call.raw_tail:
            yield from self._src.until(Markers([]), call.write)
        stray = "".join(call.stray)
        if stray.strip(" \t\r\n}"):
            call.broken = True
            self._text(stray)
        self.findings.broken += call.broken
        self.findings.repaired += call.repaired

    def _closed(self, close: str) -> Grammar[bool]:
        yield from self._src.skip_space()
        if not (yield from self._src.starts(close)):
            return False
        self._src.take(len(close))
        return True

    def _openers(self) -> dict[str, Reader]:
        tagged: dict[str, Reader] = {self.style.call_open: self._tagged}
        kinds: dict[str, dict[str, Reader]] = {
            "none": {},
            "json": tagged,
            "xml": {**tagged, toolformats.FUNCTION: self._untagged_xml},
            "glm": tagged,
            "mistral": {"[TOOL_CALLS]": self._mistral},
            "bare": {"```json": self._fenced, **tagged},
        }
        return kinds[self._tools]

    # --- what may follow an opening

    def _tagged(self, call: toolformats.Call) -> Grammar[None]:
        """Behind the opening tag: JSON, XML or GLM, told apart by what follows."""
        char = yield from self._src.skip_space()
        if char == "{":
            yield from toolformats.json_call(self._src, call)
        elif char == "<" and (yield from self._src.starts(toolformats.FUNCTION)):
            self._src.take(len(toolformats.FUNCTION))
            yield from toolformats.xml_call(self._src, call, self.style.call_close)
        elif self._tools == "glm" and char:
            yield from toolformats.glm_call(self._src, call, self.style.call_close)
        else:
            raise Malformed

    def _untagged_xml(self, call: toolformats.Call) -> Grammar[None]:
        """Qwen3-Coder at times forgets the opening `<tool_call>`; its closing tag may still come."""
        yield from toolformats.xml_call(self._src, call, self.style.call_close)
        yield from self._closed(self.style.call_close)

    def _mistral(self, call: toolformats.Call) -> Grammar[None]:
        """`[TOOL_CALLS]` then a JSON list of calls, or `name[ARGS]{...}`."""
        src = self._src
        if (yield from src.skip_space()) != "[":
            yield from toolformats.named_call(src, call, "[ARGS]")
            return
        src.take(1)
        yield from toolformats.json_call(src, call)
        while not call.raw_tail and (yield from src.skip_space()) == ",":
            src.take(1)
            src.record = [","]
            yield from self._call("", partial(toolformats.json_call, src), TrimmedEnd(self._text))
        yield from self._closed("]")

    def _fenced(self, call: toolformats.Call) -> Grammar[None]:
        yield from toolformats.json_call(self._src, call)
        yield from self._closed("```")

    def _bare(self, call: toolformats.Call) -> Grammar[None]:
        yield from toolformats.json_call(self._src, call)

    # --- events

    def _text(self, text: str) -> None:
        if text:
            self._answered = self._answered or not text.isspace()
            self._events.append(Text(text))

    def _start(self, name: str) -> None:
        self._src.record = None  # a started call is never taken back
        self._events.append(CallStart(self.calls, new_call_id(self._tools), name))
        self.calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self.calls - 1, text))


def _properties(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool["function"].get("parameters") or {}
    found = parameters.get("properties")
    return found if isinstance(found, dict) else {}


def _joined(events: list[Event]) -> list[Event]:
    """Adjacent events of one kind become one: a token's worth of text is one delta."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Text | Thought) and type(last) is type(event):
            out[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            out[-1] = CallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out
