"""Answer: what came back, as seen while it flowed. It is what the record, the metrics and the limits learn from.

It observes what the *upstream* sent, per output channel and with each channel's own first-token time; what filters then
changed on the way to the client is in `decisions`. Nothing here holds a byte back or changes one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gateway import glance
from gateway.calls import Call, Calls
from gateway.config import Deployment
from gateway.errors import Refusal
from gateway.sse import Chunk, parse
from gateway.turn import Decision

# Text kept of one channel. 16 MiB is 4 M tokens, more than any model writes; beyond it a broken upstream loops.
MAX_CHANNEL_CHARS = 16 << 20

# Delta field -> channel name. `reasoning` is what vLLM and OpenRouter call it, `text` is /v1/completions.
CHANNELS = {
    "content": "content",
    "reasoning_content": "reasoning_content",
    "reasoning": "reasoning_content",
    "refusal": "refusal",
    "text": "content",
}


@dataclass(slots=True)
class Channel:
    """One output channel of one choice. Times are seconds on the turn's monotonic clock."""

    first: float = 0.0
    last: float = 0.0
    chunks: int = 0
    chars: int = 0
    parts: list[str] = field(default_factory=list)

    def add(self, text: str, at: float) -> None:
        if not self.chunks:
            self.first = at
        self.last = at
        self.chunks += 1
        if self.chars < MAX_CHANNEL_CHARS:
            self.parts.append(text)
        self.chars += len(text)

    def extend(self, texts: list[str], at: float) -> None:
        """`add` for each of `texts`."""
        chars = self.chars + sum(map(len, texts))
        if not self.chunks or chars >= MAX_CHANNEL_CHARS:
            for text in texts:
                self.add(text, at)
            return
        self.last = at
        self.chunks += len(texts)
        self.parts += texts
        self.chars = chars

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Attempt:
    """One try at one deployment. `sent` is the body as sent, byte for byte."""

    deployment: Deployment
    sent: bytes
    at: float
    status: int = 0
    seconds: float = 0.0
    error: Refusal | None = None


@dataclass(slots=True)
class Answer:
    """Everything known about one answer. `outcome` ends as ok | refused | error | died | cancelled."""

    started: float  # the turn's `received.started`
    status: int = 0  # what the client got; 0 = nothing
    outcome: str = ""
    error: Refusal | None = None
    decisions: list[Decision] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    channels: dict[tuple[int, str], Channel] = field(default_factory=dict)  # (choice, channel name)
    tool_calls: list[tuple[int, Call]] = field(default_factory=list)  # (choice, call), as they began
    finish: dict[int, str] = field(default_factory=dict)  # choice -> finish_reason
    usage: dict[str, Any] | None = None
    upstream_id: str = ""
    first_byte: float = 0.0
    ended: float = 0.0
    upstream_bytes: int = 0
    done: bool = False  # [DONE] was seen
    malformed: int = 0  # events that were no JSON objects
    keepalives: int = 0
    _calls: dict[int, Calls[Call]] = field(default_factory=dict, compare=False)  # by choice

    def decide(self, *decisions: Decision) -> None:
        """Note what a filter did to the answer, or found in it."""
        self.decisions += decisions

    @property
    def complete(self) -> bool:
        """The upstream said it was finished; without this a stream that ends has died.

        [DONE] says so behind anything. Without it, every choice that was begun must have its reason.
        """
        if self.done:
            return bool(self.finish or self.channels)
        return bool(self.finish) and all(choice in self.finish for choice, _ in self.channels)

    def ms(self, at: float) -> float | None:
        """A moment as milliseconds since the request came in; None if it never was."""
        return round((at - self.started) * 1000, 3) if at else None

    def channel(self, name: str, choice: int = 0) -> Channel | None:
        return self.channels.get((choice, name))

    def observe(self, chunks: Iterable[Chunk], at: float) -> None:
        """Take in streamed chunks that arrived at monotonic time `at`."""
        for chunk in chunks:
            data = chunk.data
            if data is None:
                self.done = self.done or chunk.done
                self.malformed += chunk.malformed
                continue
            self._common(data)
            for choice in _dicts(data.get("choices")):
                delta = choice.get("delta")
                self._choice(choice, delta if isinstance(delta, dict) else choice, at)

    def glance(self, block: bytes, at: float, bare: tuple[bytes, bool] | None = None) -> list[glance.Event] | None:
        """`observe` for a block that nobody parsed, without parsing more of it than is kept. `bare`: it `without_done`, if known.

        What was seen of each event but [DONE], None when it took a full parse.
        """
        bare = bare or glance.without_done(block)
        events = glance.events(bare[0]) if bare else None
        if events is None:
            self.observe(parse(block), at)
            return None
        self.done = self.done or bare[1]
        texts: list[str] = []  # of choice 0, not yet in its channel
        for event in events:
            if event.usage is not None:
                self.usage = event.usage
            if not self.upstream_id:
                self.upstream_id = event.id or ""
            for choice in event.choices:
                delta = choice.delta or choice
                if delta.content:
                    if choice.index == 0:
                        if not texts:
                            self._channel(0, "content")  # channels stand in the order in which they began
                        texts.append(delta.content)
                    else:
                        self._channel(choice.index, "content").add(delta.content, at)
                if delta.reasoning_content or delta.reasoning or delta.refusal or delta.text or delta.tool_calls:
                    if texts:
                        self._channel(0, "content").extend(texts, at)
                        texts = []
                    self._glanced(choice.index, delta, at)
                if choice.finish_reason is not None:
                    self.finish[choice.index] = choice.finish_reason
        if texts:
            self._channel(0, "content").extend(texts, at)
        return events

    def _glanced(self, index: int, delta: glance.Delta, at: float) -> None:
        """The rarer fields of a delta."""
        thought = delta.reasoning_content or delta.reasoning
        for name, text in (("reasoning_content", thought), ("refusal", delta.refusal), ("content", delta.text)):
            if text:
                self._channel(index, name).add(text, at)
        for place, call in enumerate(_dicts(delta.tool_calls)):
            self._tool_call(index, place, call, at)

    def observe_whole(self, data: dict[str, Any], at: float) -> None:
        """Take in a non-streamed answer."""
        self._common(data)
        for choice in _dicts(data.get("choices")):
            message = choice.get("message")
            self._choice(choice, message if isinstance(message, dict) else choice, at)
        self.done = True

    def _common(self, data: dict[str, Any]) -> None:
        usage = data.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        if not self.upstream_id and isinstance(data.get("id"), str):
            self.upstream_id = data["id"]

    def _choice(self, choice: dict[str, Any], delta: dict[str, Any], at: float) -> None:
        index = choice.get("index")
        index = index if isinstance(index, int) else 0
        for name, value in delta.items():
            if value and name in CHANNELS and isinstance(value, str):
                if name == "reasoning" and isinstance(said := delta.get("reasoning_content"), str) and said:
                    continue  # servers between two names send the same thought under both
                self._channel(index, CHANNELS[name]).add(value, at)
            elif name == "tool_calls" and value:
                for place, call in enumerate(_dicts(value)):
                    self._tool_call(index, place, call, at)
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish[index] = reason

    def _channel(self, choice: int, name: str) -> Channel:
        channel = self.channels.get((choice, name))
        if channel is None:
            channel = self.channels[choice, name] = Channel()
        return channel

    def _tool_call(self, choice: int, place: int, piece: dict[str, Any], at: float) -> None:
        calls = self._calls.get(choice)
        if calls is None:
            calls = self._calls[choice] = Calls()
        call, text = calls.take(place, piece, partial(self._new_call, choice))
        call.parts.append(text)
        self._channel(choice, "tool_calls").add(text, at)

    def _new_call(self, choice: int) -> Call:
        call = Call()
        self.tool_calls.append((choice, call))
        return call

    def forget(self) -> None:
        """The upstream is asked again: what it said so far does not count. Decisions and attempts stay."""
        self.channels.clear()
        self.tool_calls.clear()
        self._calls.clear()
        self.finish.clear()
        self.usage, self.upstream_id, self.first_byte, self.done = None, "", 0.0, False

    def end(self, outcome: str, error: Refusal | None = None) -> None:
        """Close the books; the first end counts."""
        if not self.outcome:
            self.outcome, self.error = outcome, error
            self.ended = time.perf_counter()


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []
