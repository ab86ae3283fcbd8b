"""Did the model obey? The answer side of thinking, streaming and not.

Two jobs. A thought written into the content (`<think>...` at its beginning, from upstreams without a reasoning parser) is moved
to `reasoning_content`, an empty one vanishes, an unclosed one stays reasoning. And thinking that comes although it is off is a
violation: stripped, an error, or only logged, as configured; counted in every case.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gateway.answer import Answer
from gateway.errors import UpstreamError
from gateway.filters import Again
from gateway.policy.thinking import say_no_think
from gateway.sse import Chunk
from gateway.turn import Decision, Turn

OPEN, CLOSE = "<think>", "</think>"
FIELDS = ("reasoning_content", "reasoning")


def watch(turn: Turn, answer: Answer) -> ThinkingWatch | None:
    return ThinkingWatch(turn, answer) if "messages" in turn.body else None


class Inline:
    """The beginning of one choice's content: text in, (reasoning, content) out. States: start -> inside -> after -> plain."""

    __slots__ = ("held", "empty", "state")

    def __init__(self) -> None:
        self.state = "start"
        self.empty = False  # an empty thought stood here
        self.held = ""

    def feed(self, text: str) -> tuple[str, str]:
        if self.state == "plain":
            return "", text
        self.held += text
        if self.state == "start":
            seen = self.held.lstrip()
            if OPEN.startswith(seen) and seen != OPEN:  # the empty string too
                return "", ""
            if not seen.startswith(OPEN):
                return "", self.flush()[1]
            self.state, self.empty, self.held = "inside", True, seen[len(OPEN) :]
        thought = self._thought() if self.state == "inside" else ""
        return thought, self._after() if self.state == "after" else ""

    def _thought(self) -> str:
        """As much of the thought as is certain; its leading white space is dropped, and with it an empty thought."""
        thought, closed, rest = self.held.partition(CLOSE)
        if closed:
            self.state, self.held = "after", rest
        else:
            keep = _overlap(self.held, CLOSE)
            thought, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        if self.empty:
            thought = thought.lstrip()
            self.empty = not thought
        return thought

    def _after(self) -> str:
        """Content behind a thought begins with its first visible character."""
        text, self.held = self.held.lstrip(), ""
        if text:
            self.state = "plain"
        return text

    def flush(self) -> tuple[str, str]:
        """The stream ended, or the beginning turned out to be plain: what is held, as (reasoning, content)."""
        held, self.held = self.held, ""
        inside, self.state = self.state == "inside", "plain"
        return (held, "") if inside else ("", held)


def _overlap(text: str, mark: str) -> int:
    """How many last characters of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


# The first text in a block: neither white space nor an escape nor what may become a tag.
_PLAIN = re.compile(rb'"content": ?"(?!")(.)', re.S)


def _begins_plainly(block: bytes) -> bool:
    """Does the first text in this block show that the content begins without a thought? False when it takes a parse to know."""
    found = _PLAIN.search(block)
    return found is not None and found[1] not in b" <\\\t\r\n" and b'"reasoning' not in block


class ThinkingWatch:
    """An AnswerFilter. Once the content has begun and thinking is allowed, it wants nothing more."""

    def __init__(self, turn: Turn, answer: Answer) -> None:
        self._turn = turn
        self._rule = turn.policy.thinking
        self._off = turn.thinking.mode == "off"
        self._answer = answer
        self._inline: dict[int, Inline] = {}
        self._single = turn.body.get("n") in (None, 1)
        self._began = False  # every choice seen so far is past its beginning
        self._sent = False  # the client has seen content or a call: too late to ask again
        self._retried = self._violated = False
        self._last: dict[str, Any] = {}

    def wants(self, block: bytes) -> bool:
        if not self._began and self._single and _begins_plainly(block):
            self._inline.setdefault(0, Inline()).state = "plain"
            self._began = self._sent = True
        if not self._began or (self._off and b'"reasoning' in block):
            return True
        return b'"reasoning":"' in block or b'"reasoning": "' in block

    def feed(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        out = [c if c.data is None else self._chunk(c) for c in chunks]
        self._began = bool(self._inline) and all(i.state == "plain" for i in self._inline.values())
        return [c for c in out if c is not None]

    def _chunk(self, chunk: Chunk) -> Chunk | None:
        """The chunk that goes on; None when nothing of it is left."""
        choices = chunk.data.get("choices")
        if not isinstance(choices, list) or not choices:
            return chunk
        self._last = chunk.data
        fresh = [self._choice(c, "delta") for c in choices]
        if all(a is b for a, b in zip(fresh, choices, strict=True)):
            return chunk
        return Chunk.of(chunk.data | {"choices": fresh}) if chunk.data.get("usage") or any(map(_says, fresh)) else None

    def _choice(self, choice: Any, field: str, last: bool = False) -> Any:
        """`choice` with its delta (or message) put right; the same object when it was right already."""
        delta = choice.get(field) if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            return choice
        index = choice.get("index")
        inline = self._inline.setdefault(index if isinstance(index, int) else 0, Inline())
        came = next((delta[f] for f in FIELDS if isinstance(delta.get(f), str) and delta[f]), "")
        text = delta["content"] if isinstance(delta.get("content"), str) else ""
        if came and inline.state == "start":
            inline.state = "plain"  # this upstream separates thoughts itself; tags in its content are content
        moved, content = inline.feed(text) if text else ("", "")
        if last or delta.get("tool_calls") or choice.get("finish_reason"):
            rest = inline.flush()
            moved, content = moved + rest[0], content + rest[1]
        thought = came + moved
        if thought and self._off:
            thought = self._violation(thought)
        self._sent = self._sent or bool(content or thought or delta.get("tool_calls"))
        if content == text and thought == (delta.get(FIELDS[0]) or ""):
            return choice
        fresh = {k: v for k, v in delta.items() if k != FIELDS[0] and (thought or k not in FIELDS)}
        if content or (text and field == "message"):
            fresh["content"] = content
        else:
            fresh.pop("content", None)
        if thought:
            fresh[FIELDS[0]] = thought
        return choice | {field: fresh}

    def _violation(self, thought: str) -> str:
        """Thinking came although it is off: what of it goes on. Raises as the rule says."""
        if not self._violated:
            self._violated = True
            self._answer.decide(Decision("thinking", f"violation.{self._rule.on_violation}", "the model thought although off"))
        refusal = UpstreamError(
            502,
            "The model produced thinking although thinking is off",
            "Use a model whose template can turn thinking off, or set policies.thinking.on_violation: strip",
            kind="protocol",
            retryable=False,
            code="thinking_violation",
        )
        if self._rule.retry and not self._sent and not self._retried:
            self._retried = True
            raise Again(
                refusal, Decision("thinking", "retry", "asked once more, in stricter form", say_no_think(self._turn.body))
            )
        if self._rule.on_violation == "error":
            raise refusal
        return thought if self._rule.on_violation == "log" else ""

    def finish(self) -> Sequence[Chunk]:
        out = []
        for index in [i for i, inline in self._inline.items() if inline.state != "plain" or inline.held]:
            rest = self._choice({"index": index, "delta": {}, "finish_reason": None}, "delta", last=True)
            if rest["delta"]:
                out.append(Chunk.of(self._last | {"choices": [rest]}))
        self._flags()
        return out

    def _flags(self) -> None:
        if any(i.empty and i.state != "start" for i in self._inline.values()):
            self._answer.decide(Decision("thinking", "empty_thought", "an empty thought was taken out of the content"))
        thinking, usage = self._turn.thinking, self._answer.usage or {}
        details = usage.get("completion_tokens_details")
        used = details.get("reasoning_tokens") if isinstance(details, dict) else None
        if thinking.mode == "budget" and isinstance(used, int) and used > thinking.budget:
            note = f"{used} tokens of thinking, {thinking.budget} were allowed; this upstream does not hold budgets"
            self._answer.decide(Decision("thinking", "over_budget", note))
        spoke = {c for c, name in self._answer.channels if name in ("content", "tool_calls")}
        for choice, reason in self._answer.finish.items():
            if reason == "length" and choice not in spoke and (choice, "reasoning_content") in self._answer.channels:
                self._answer.decide(Decision("thinking", "ate_output", "thinking used up all output tokens; raise max_tokens"))

    def whole(self, data: dict[str, Any]) -> dict[str, Any]:
        choices = data.get("choices")
        if not isinstance(choices, list):
            return data
        fresh = [self._choice(c, "message", last=True) for c in choices]
        self._flags()
        same = all(a is b for a, b in zip(fresh, choices, strict=True))
        return data if same else data | {"choices": fresh}

    def restart(self) -> None:
        self._inline.clear()
        self._began = self._violated = False


def _says(choice: Any) -> bool:
    """Is anything left in this choice that a client needs?"""
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    return bool(choice.get("finish_reason")) or bool(isinstance(delta, dict) and delta)
