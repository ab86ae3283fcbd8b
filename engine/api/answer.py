"""One request's answers: sampled tokens of each choice -> text, thoughts, calls, logprobs, usage. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.ipc import Done, Started, TokenLogprob, Tokens
from engine.protocol import MoorageUsage
from engine.text.detokenizer import Detokenizer
from engine.text.parser import OutputParser
from engine.text.stops import StopMatcher
from engine.text.stream import CallArguments, CallStart, Event, Text, Thought
from engine.text.tokenizer import Tokenizer


@dataclass
class Piece:
    """What one message of the engine added to a choice."""

    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass
class Choice:
    """One answer while it grows. `parser` None = raw completion text."""

    index: int
    detokenizer: Detokenizer
    stops: StopMatcher
    parser: OutputParser | None
    single_call: bool = False  # the client wants at most one tool call
    cut: bool = False  # a second one began
    usage: MoorageUsage | None = None
    completion: int = 0
    reasoning_tokens: int = 0
    finish: str = ""
    sampled: list[int] = field(default_factory=list)
    said: list[Event] = field(default_factory=list)  # everything that was shown

    @property
    def over(self) -> bool:
        """The answer is complete although the engine still samples: a stop string, or a second call that is not wanted."""
        return bool(self.stops.matched) or self.cut

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the answer (vLLM's name for it); None for the model's own end, a call or the limit."""
        return self.stops.matched or None

    @property
    def calls(self) -> bool:
        return any(isinstance(e, CallStart) for e in self.said)

    def prime(self, text: str) -> Piece:
        """Text that was put into the prompt but belongs to the answer (the opening of a forced tool call)."""
        return self._shown(Piece(self._keep(self.parser.feed(text) if self.parser else [])))

    def _shown(self, piece: Piece) -> Piece:
        self.said += piece.events
        return piece

    def started(self, message: Started) -> None:
        self.usage = message.usage

    def tokens(self, message: Tokens) -> Piece:
        out = Piece(logprobs=list(message.logprobs or []), tokens=message.tokens)
        self.sampled += message.tokens
        for token in message.tokens:
            self.completion += 1
            text = self.detokenizer.feed(token)
            thinking = self.parser is not None and self.parser.in_thought
            out.events += self._events(text)
            self.reasoning_tokens += thinking or (self.parser is not None and self.parser.in_thought)
            if self.over:
                break
        return self._shown(out)

    def _events(self, text: str) -> list[Event]:
        if self.parser is None:
            shown = self.stops.feed(text)
            return [Text(shown)] if shown else []
        return self._keep(self.parser.feed(text)) if text else []

    def _keep(self, events: list[Event]) -> list[Event]:
        """Run answer text through the stop strings and remember calls."""
        out: list[Event] = []
        for event in events:
            if self.over:
                break
            if isinstance(event, Text):
                shown = self.stops.feed(event.text)
                if shown:
                    out.append(Text(shown))
                continue
            if isinstance(event, CallStart):
                if self.single_call and event.index:
                    self.cut = True
                    break
                held = self.stops.flush()
                out += [Text(held)] if held else []
            out.append(event)
        return out

    def done(self, message: Done) -> Piece:
        """The engine ended this choice. What was held back comes out, unless a stop string ended it."""
        self.usage = message.usage
        self.completion = message.completion
        events: list[Event] = []
        if not self.over:
            tail = self.detokenizer.flush()
            events = self._events(tail) if tail else []
            if self.parser is not None:
                events += self._keep(self.parser.finish(truncated=message.reason == "length"))
        if not self.over:
            held = self.stops.flush()
            events += [Text(held)] if held else []
        piece = self._shown(Piece(events))
        self.sampled += [message.stop_id] if message.stop_id is not None else []
        self.finish = self._reason(message)
        return piece

    def _reason(self, message: Done) -> str:
        if self.stops.matched:
            return "stop"
        if message.reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"

    def arguments(self) -> list[tuple[str, str]]:
        """(call id, arguments text) of every call."""
        return [(c["id"], c["function"]["arguments"]) for c in message_of(self.said).get("tool_calls", [])]


def usage_of(prompt: int, choices: list[Choice]) -> dict[str, Any]:
    """The `usage` object of a request: prompt counted once, completions summed."""
    completion = sum(c.completion for c in choices)
    first = next((c.usage for c in choices if c.usage is not None), None) or MoorageUsage(prompt=prompt, common=0, new=prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": first.common},
        "completion_tokens_details": {"reasoning_tokens": sum(c.reasoning_tokens for c in choices)},
        "moorage": msgspec.to_builtins(first),
    }


def message_of(events: list[Event]) -> dict[str, Any]:
    """Events of a whole answer -> the `message` object of a response that does not stream."""
    content, thought, calls = [], [], []
    for event in events:
        match event:
            case Text(text):
                content.append(text)
            case Thought(text):
                thought.append(text)
            case CallStart(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content) if content or not calls else None}
    if thought:
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


class TextOffsets:
    """Where each token of one choice begins in its text. A character cut over several tokens belongs to the last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._prompt = Detokenizer(tokenizer, keep=tokenizer.control_ids)  # an echoed prompt shows them
        self._answer = Detokenizer(tokenizer)
        self._at = 0

    def prompt(self, tokens: list[int]) -> list[int]:
        """All of an echoed prompt, before the first of the answer."""
        offsets = [self._next(self._prompt, token) for token in tokens]
        self._at += len(self._prompt.flush())
        return offsets

    def answer(self, token: int) -> int:
        return self._next(self._answer, token)

    def _next(self, detokenizer: Detokenizer, token: int) -> int:
        at = self._at
        self._at += len(detokenizer.feed(token))
        return at


class LogprobWriter:
    """TokenLogprob -> the JSON of either endpoint."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes: Callable[[int], bytes] = tokenizer.token_bytes

    def text(self, token: int) -> str:
        """The token as text; tokens that are part of a character in OpenAI's `bytes:\\xe2\\x80` form."""
        raw = self._bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def chat(self, entry: TokenLogprob) -> dict[str, Any]:
        def one(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self.text(token), "logprob": _finite(logprob), "bytes": list(self._bytes(token))}

        top = [{**one(t, lp), "token_id": t} for t, lp in entry.top]
        return {**one(entry.token, entry.logprob), "token_id": entry.token, "top_logprobs": top}

    def legacy(self, entries: list[TokenLogprob | None], tokens: list[int], offsets: list[int]) -> dict[str, Any]:
        """`entries[i]` None = no logprob (the first prompt token). Token ids go beside the texts, which may be ambiguous."""
        return {
            "tokens": [self.text(t) for t in tokens],
            "token_ids": tokens,
            "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
            "top_logprobs": [None if e is None else {self.text(t): _finite(lp) for t, lp in e.top} for e in entries],
            "top_token_ids": [None if e is None else [[t, _finite(lp)] for t, lp in e.top] for e in entries],
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    """JSON has no -inf; a token that cannot be sampled gets OpenAI's floor."""
    return max(logprob, -9999.0)
