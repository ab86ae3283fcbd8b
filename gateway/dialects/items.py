"""A chat answer as a sequence of items, each one begun, said and ended before the next begins.

Chat completions send thoughts, text and parallel calls as fragments that may interleave; Messages and Responses know blocks and
items in an order. `Items` turns the one into the other without waiting longer than that order needs: text and thoughts end when
something else begins, a call when its arguments are a complete JSON object or the answer is over. The events depend on the
chunks alone and never on how the network grouped them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.calls import Calls, Closing
from gateway.errors import UpstreamError

Kind = Literal["thinking", "text", "refusal", "call"]
Verb = Literal["begin", "say", "end"]

# Delta field -> kind of item, in the order they are looked at within one chunk. `reasoning`: vLLM, OpenRouter.
CHANNELS: tuple[tuple[str, Kind], ...] = (
    ("reasoning_content", "thinking"),
    ("reasoning", "thinking"),
    ("content", "text"),
    ("refusal", "refusal"),
)


@dataclass(slots=True, eq=False)
class Item:
    """One thought, text or call. `parts` is everything said, `held` what did not go on yet."""

    kind: Kind
    number: int
    id: str = ""
    name: str = ""
    signature: str = ""  # of a thought, when the upstream is one that signs
    parts: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    closing: Closing = field(default_factory=Closing)
    begun: bool = False
    ended: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, text: str) -> None:
        if text:
            self.parts.append(text)
            self.held.append(text)

    def complete(self) -> bool:
        """Can nothing more belong to it, once something else has begun?"""
        if self.kind != "call":
            return True
        return self.closing.whole(self.parts)


Event = tuple[Verb, Item, str]


class Items:
    """Feed the parsed chunks of one answer, take events. Only the first choice counts: neither dialect has more."""

    def __init__(self) -> None:
        self.finish_reason = ""
        self.stopped_by: Any = None  # the stop sequence that ended the answer, from upstreams that say it
        self.usage: dict[str, Any] = {}
        self.called = False
        self.count = 0  # items so far
        self._queue: deque[Item] = deque()
        self._calls: Calls[Item] = Calls()

    def feed(self, data: dict[str, Any]) -> Iterator[Event]:
        """The events of one chunk. Raises UpstreamError when an ended call goes on."""
        if isinstance(usage := data.get("usage"), dict):
            self.usage = usage
        choices = data.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and not choice.get("index"):
                delta = choice.get("delta")
                self._take(delta if isinstance(delta, dict) else {})
                self._end_of(choice)
        yield from self._drain()

    def whole(self, data: dict[str, Any]) -> list[Item]:
        """The items of a non-streamed answer: thought, text, calls."""
        if isinstance(usage := data.get("usage"), dict):
            self.usage = usage
        choices = data.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        message = choice.get("message")
        self._take(message if isinstance(message, dict) else {})
        self._end_of(choice)
        for item in self._queue:
            item.ended = True
        return list(self._queue)

    def finish(self) -> Iterator[Event]:
        """The answer is over: everything that was held, in order."""
        yield from self._drain(last=True)

    def _end_of(self, choice: dict[str, Any]) -> None:
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = reason
            self.stopped_by = next((choice[k] for k in ("stop_reason", "matched_stop") if isinstance(choice.get(k), str)), None)

    def _take(self, delta: dict[str, Any]) -> None:
        seen = set()
        for name, kind in CHANNELS:
            text = delta.get(name)
            if isinstance(text, str) and text and kind not in seen:
                seen.add(kind)
                self._last_of(kind).add(text)
        for block in _dicts(delta.get("thinking_blocks")):
            if isinstance(signature := block.get("signature"), str) and signature:
                self._last_of("thinking").signature = signature
        for place, call in enumerate(_dicts(delta.get("tool_calls"))):
            self._call(place, call)

    def _last_of(self, kind: Kind) -> Item:
        """The item that a fragment of this kind goes on with, a new one after anything else."""
        if self._queue and self._queue[-1].kind == kind:
            return self._queue[-1]
        return self._new(kind)

    def _new(self, kind: Kind) -> Item:
        item = Item(kind, self.count)
        self.count += 1
        self._queue.append(item)
        return item

    def _new_call(self) -> Item:
        self.called = True
        return self._new("call")

    def _call(self, place: int, piece: dict[str, Any]) -> None:
        item, text = self._calls.take(place, piece, self._new_call)
        if item.ended and text.strip():
            message = "The upstream went on with a tool call that was complete"
            raise UpstreamError(502, message, kind="protocol", retryable=False, code="upstream_tool_call")
        if not item.ended:
            item.add(text)

    def _drain(self, last: bool = False) -> Iterator[Event]:
        while self._queue:
            item = self._queue[0]
            if not item.begun:
                if item.kind == "call" and not item.name and not last:
                    return
                item.begun = True
                yield "begin", item, ""
            for text in item.held:
                yield "say", item, text
            item.held.clear()
            if not last and (len(self._queue) == 1 or not item.complete()):
                return
            self._queue.popleft()
            item.ended = True
            yield "end", item, ""


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []
