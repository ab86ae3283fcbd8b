"""Conversation -> prompt tokens and anchor offsets. Owns what is cached between requests of the same conversation.

A rendered prompt is a sequence of special tokens and plain pieces. A piece is encoded on its own (special tokens are hard
borders), so an unchanged piece is looked up instead of encoded: a 30K-token prompt of which 300 tokens are new costs a few
milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.ipc import Anchor
from engine.protocol import Hints
from engine.text.chat_template import ChatTemplate, TemplateError
from engine.text.escape import Escaper
from engine.text.tokenizer import Tokenizer, TooLong

# Text held by the piece cache. 32M characters is about 8M tokens: the live conversations of a team.
MAX_CACHED_CHARS = 32 << 20
# Shorter pieces cost less to encode than to look after.
MIN_CACHED_CHARS = 16
# What an entry costs beside its text: dictionary slot, key, array header, LRU links.
ENTRY_CHARS = 256
_SENTINEL = "\ufdd4moorage\ufdd4"  # stands for "any user text"; noncharacters, so it is no text anyone sends


Ending = Literal["answer", "continue", "nothing"]  # what stands behind the last message of a prompt


def _stable(value: Any) -> bytes:
    """Bytes that are equal for equal JSON values; any integer is allowed."""
    return json.dumps(value).encode()


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    anchors: tuple[Anchor, ...]
    suffix: str  # what the template wrote behind the last message to start the answer; all of it when one is continued
    starts: tuple[int, ...] = ()  # token offset of each message's turn; -1 for one without text of its own
    dropped_anchors: int = 0  # hints that do not hold: the truncated conversation renders differently


class PieceCache:
    """Bounded LRU of plain text -> tokens."""

    def __init__(self, tokenizer: Tokenizer, max_chars: int = MAX_CACHED_CHARS) -> None:
        self._tokenizer, self._max = tokenizer, max_chars
        self._known: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._chars = 0

    def encode(self, text: str, first: bool) -> Sequence[int]:
        if len(text) < MIN_CACHED_CHARS:
            return self._tokenizer.encode_plain(text, first)
        key = (text, first)
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            return found
        tokens = array("I", self._tokenizer.encode_plain(text, first))  # a list of 8M ints would take ten times as much
        self._known[key] = tokens
        self._chars += len(text) + ENTRY_CHARS
        while self._chars > self._max and len(self._known) > 1:
            (old, _), _ = self._known.popitem(last=False)
            self._chars -= len(old) + ENTRY_CHARS
        return tokens


@dataclass(frozen=True)
class _Encoded:
    """Tokens of a rendered prompt and, for each piece, where it starts in text and in tokens."""

    tokens: list[int]
    char_starts: list[int]
    token_starts: list[int]
    plain: list[str | None]  # the piece's text with marks, None for a special token


class PromptBuilder:
    """Builds prompts for one model. Thread-compatible: one builder may be used from one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._escaper = Escaper(list(tokenizer.specials))
        self._pieces = PieceCache(tokenizer)
        self._rendered: OrderedDict[bytes, str | None] = OrderedDict()  # truncated conversations, by content
        self._rendered_chars = 0

    def build(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        kwargs: dict[str, Any],
        hints: Hints | None = None,
        most: int | None = None,
        end: Ending = "answer",
    ) -> Prompt:
        """Render, encode, and map anchors.

        `end`: the start of an answer, the last message without its end (it must be an answer's beginning), or nothing more.
        Raises TemplateError with the template's own message; with `most`, TooLong soon for a prompt that is longer by far.
        """
        safe = [self._escape_message(m) for m in messages]
        safe_tools = self._escaper.escape_all(tools)
        if end == "continue":
            text = self._open_ended(safe, safe_tools, kwargs)
        else:
            text = self._template.render(safe, safe_tools, end == "answer", **kwargs)
        encoded = self._encode(text, most)
        starts = _starts(text, safe, encoded)
        job = _Anchors(self, safe, safe_tools, kwargs, text, encoded)
        anchors, dropped = job.place(hints, starts)
        if end == "continue":
            return Prompt(
                encoded.tokens, anchors, text, starts, dropped
            )  # what users wrote stays marked, so that it opens no thought
        body = job.truncated(len(safe))
        suffix = text[len(body) :] if body is not None else ""
        return Prompt(encoded.tokens, anchors, Escaper.unescape(suffix), starts, dropped)

    def _open_ended(self, messages: list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]) -> str:
        """Everything up to the last character of the last message's content. Raises TemplateError when it is not rendered."""
        marked = {**messages[-1], "content": f"{messages[-1]['content']}{_SENTINEL} "}
        text = self._template.render([*messages[:-1], marked], tools, False, **kwargs)
        at = text.rfind(_SENTINEL)
        if at < 0:
            raise TemplateError("it does not write the last message, so it cannot be continued")
        kept = text.startswith(f"{_SENTINEL} ", at)  # else the template trims content: it would have trimmed this, too
        return text[:at] if kept else text[:at].rstrip()

    def history(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], kwargs: dict[str, Any]) -> list[int] | None:
        """Tokens of `messages` as they stand in a longer conversation: in front of a tool's result if the last one calls tools,
        else in front of another user message. Ends at a special token. None when the template refuses."""
        calls = messages[-1].get("tool_calls")
        follower: dict[str, Any] = {"role": "tool" if calls else "user", "content": _SENTINEL}
        if calls:
            follower |= {"tool_call_id": calls[0]["id"], "name": calls[0]["function"]["name"]}
        safe = [*map(self._escape_message, messages), follower]
        try:
            text = self._template.render(safe, self._escaper.escape_all(tools), False, **kwargs)
        except TemplateError:
            return None
        at = text.find(_SENTINEL)
        if at < 0:
            return None
        encoded = self._encode(text[:at])
        specials = [i for i, piece in enumerate(encoded.plain) if piece is None]
        return encoded.tokens[: encoded.token_starts[specials[-1]]] if specials else None

    def _escape_message(self, message: dict[str, Any]) -> dict[str, Any]:
        return {k: v if k in ("role", "id", "type") else self._escaper.escape_all(v) for k, v in message.items()}

    def _encode(self, text: str, most: int | None = None) -> _Encoded:
        out = _Encoded([], [], [], [])
        at = 0
        for part, special in self._tokenizer.pieces(text):
            at = text.index(part, at)  # whitespace swallowed by a special token's lstrip/rstrip lies between pieces
            out.char_starts.append(at)
            out.token_starts.append(len(out.tokens))
            out.plain.append(None if special else part)
            if special:
                out.tokens.append(special.id)
            else:
                plain = Escaper.unescape(part)
                if most is not None:
                    self._tokenizer.check_length(plain, most - len(out.tokens))
                out.tokens.extend(self._pieces.encode(plain, first=not out.tokens))
            if most is not None and len(out.tokens) > most:
                raise TooLong(len(out.tokens))
            at += len(part)
        bos = self._tokenizer.bos_id
        if self._tokenizer.files.chat_bos and bos is not None and out.tokens[:1] != [bos]:
            out.tokens.insert(0, bos)
            out.token_starts[:] = [t + 1 for t in out.token_starts]
        return out

    def _offset(self, encoded: _Encoded, char: int) -> int:
        """Tokens that lie wholly before `char` and are the encoding of the text before it, whatever follows."""
        i = bisect_right(encoded.char_starts, char) - 1
        if i < 0:
            return 0
        start, piece = encoded.token_starts[i], encoded.plain[i]
        end = encoded.token_starts[i + 1] if i + 1 < len(encoded.token_starts) else len(encoded.tokens)
        inside = char - encoded.char_starts[i]
        if inside <= 0:
            return start
        if piece is None or inside >= len(piece):
            return end
        head = self._tokenizer.encode_plain(Escaper.unescape(piece[:inside]), first=start == 0)
        return start + len(head) if encoded.tokens[start : start + len(head)] == head else start

    def render_cached(self, key: bytes, messages: list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]) -> str | None:
        """The conversation without the start of an answer; None if the template refuses it."""
        if key in self._rendered:
            self._rendered.move_to_end(key)
            return self._rendered[key]
        try:
            text = self._template.render(messages, tools, False, **kwargs)
        except TemplateError:
            text = None
        self._rendered[key] = text
        self._rendered_chars += len(text or "") + ENTRY_CHARS
        while self._rendered_chars > MAX_CACHED_CHARS and len(self._rendered) > 1:
            _, old = self._rendered.popitem(last=False)
            self._rendered_chars -= len(old or "") + ENTRY_CHARS
        return text


def _starts(text: str, messages: list[dict[str, Any]], encoded: _Encoded) -> tuple[int, ...]:
    """The border before each message's content, found from the end: tools, which may say the same words, stand in front."""
    out, end = [], len(text)
    for message in reversed(messages):
        content = message["content"].strip()
        at = text.rfind(content, 0, end) if content else -1
        end = at if at >= 0 else end
        out.append(encoded.token_starts[bisect_right(encoded.char_starts, at) - 1] if at >= 0 else -1)
    return tuple(reversed(out))


class _Anchors:
    """Places the anchors of one prompt. `truncated(n)` is the rendering of the first n messages, if the prompt starts with it."""

    def __init__(
        self,
        builder: PromptBuilder,
        messages: list[dict[str, Any]],
        tools: Any,
        kwargs: dict[str, Any],
        text: str,
        encoded: _Encoded,
    ) -> None:
        self._builder, self._messages, self._tools, self._kwargs = builder, messages, tools, kwargs
        self._text, self._encoded = text, encoded
        chain = hashlib.blake2b(_stable([tools, kwargs]), digest_size=16)
        self._no_messages = chain.digest()
        self._keys = []
        for message in messages:
            chain.update(_stable(message))
            self._keys.append(chain.digest())

    def truncated(self, count: int) -> str | None:
        if not 0 < count <= len(self._messages):
            return None
        text = self._builder.render_cached(self._keys[count - 1], self._messages[:count], self._tools, self._kwargs)
        return text if text and self._text.startswith(text) else None

    def place(self, hints: Hints | None, starts: Sequence[int]) -> tuple[tuple[Anchor, ...], int]:
        """Anchors by offset, and how many hints do not hold. `starts`: the borders of messages, any of which may be edited."""
        found: dict[int, Anchor] = {}
        dropped = 0

        def put(offset: int | None, kind: str, weight: float) -> None:
            nonlocal dropped
            if offset is None:
                dropped += 1
            elif offset > 0 and (offset not in found or found[offset].weight < weight):
                found[offset] = Anchor(offset=offset, kind=kind, weight=weight)

        put(self.after_system(), "system", 1.0)
        before_user = self._before_last_user()
        if before_user:
            put(self.boundary(before_user), "user", 0.8)
        put(self.boundary(len(self._messages)), "turn", 0.9)
        put(len(self._encoded.tokens), "turn", 0.7)
        for start in starts:
            put(start, "turn", 0.3)
        dropped = 0  # defaults that a template does not allow are no news; hints are
        for hint in hints.anchors if hints else ():
            if hint.message < 0:
                put(self.after_system() if hint.edge == "end" else 0, hint.kind, hint.weight)
            else:
                put(self.boundary(hint.message + (hint.edge == "end")), hint.kind, hint.weight)
        return tuple(found[o] for o in sorted(found)), dropped

    def _before_last_user(self) -> int:
        roles = [m["role"] for m in self._messages]
        return len(roles) - 1 - roles[::-1].index("user") if "user" in roles else 0

    def boundary(self, count: int) -> int | None:
        """Token offset behind the first `count` messages.

        None when the prompt starts neither with their rendering nor with how they render in front of another user message
        (templates drop the thoughts of finished turns, so the two differ).
        """
        if count == 0:
            return 0
        text = self.truncated(count)
        return self._builder._offset(self._encoded, len(text)) if text is not None else self._before_a_user(count)

    def _system_count(self) -> int:
        count = 0
        while count < len(self._messages) and self._messages[count]["role"] in ("system", "developer"):
            count += 1
        return count

    def after_system(self) -> int | None:
        """End of tools and system text."""
        return self._before_a_user(self._system_count())

    def _before_a_user(self, count: int) -> int | None:
        """Where the prompt parts from one with the same first `count` messages and any other user message behind them."""
        if not 0 <= count < len(self._messages):
            return None
        head = [*self._messages[:count], {"role": "user", "content": _SENTINEL}]
        key = b"user" + (self._keys[count - 1] if count else self._no_messages)
        text = self._builder.render_cached(key, head, self._tools, self._kwargs)
        if not text or _SENTINEL not in text:
            return None
        head_text = text[: text.index(_SENTINEL)]
        # Step back over the opening of the user turn to the border before it, so that other roles may follow too.
        specials = [c for c, piece in zip(self._encoded.char_starts, self._encoded.plain, strict=True) if piece is None]
        last = bisect_right(specials, len(head_text) - 1) - 1
        if last < 0 or not self._text.startswith(head_text[: specials[last]]):
            return None
        return self._builder._offset(self._encoded, specials[last])
