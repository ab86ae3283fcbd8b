"""Chat completions answers as Anthropic Messages, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from gateway import sse
from gateway.calls import arguments
from gateway.dialects import thoughts
from gateway.dialects.items import Event, Item, Items, Verb
from gateway.errors import Refusal, UpstreamError
from gateway.sse import Chunk
from gateway.turn import Turn

PING = sse.event({"type": "ping"}, "ping")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}
DELTAS = {"thinking": ("thinking_delta", "thinking"), "call": ("input_json_delta", "partial_json")}
TEXT_DELTA = ("text_delta", "text")  # refusals too: Messages has no channel for them


class MessagesWriter:
    """Blocks with running numbers, each one closed before the next opens."""

    passthrough = False

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._items = Items()
        self._started = False

    def feed(self, chunks: Sequence[Chunk]) -> bytes:
        return b"".join(self._start() + self._events(self._items.feed(c.data)) for c in chunks if c.data is not None)

    def finish(self) -> bytes:
        rest = self._start() + self._events(self._items.finish())
        end = {"type": "message_delta", "delta": self._end(), "usage": usage(self._items.usage)}
        return rest + sse.event(end, "message_delta") + sse.event({"type": "message_stop"}, "message_stop")

    def error(self, refusal: Refusal) -> bytes:
        # No message_stop after it: a client that ignores the error must still notice that the stream broke off.
        return sse.event(error(refusal, self._turn.id), "error")

    def keepalive(self) -> bytes:
        return PING

    def whole(self, answer: dict[str, Any]) -> bytes:
        items = self._items.whole(answer)
        content = [block for item in items if (block := self._block(item)) is not None]
        return orjson.dumps(self._message(content) | self._end() | {"usage": usage(self._items.usage)})

    # --- pieces

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return sse.event({"type": "message_start", "message": self._message([])}, "message_start")

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        turn = self._turn
        head = {"id": f"msg_{turn.id.removeprefix('req_')}", "type": "message", "role": "assistant", "model": turn.model}
        return head | {"content": content, "stop_reason": None, "stop_sequence": None, "usage": usage({})}

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._event(verb, item, text) for verb, item, text in events)

    def _event(self, verb: Verb, item: Item, text: str) -> bytes:
        if verb == "say":
            kind, field = DELTAS.get(item.kind, TEXT_DELTA)
            return self._delta(item, {"type": kind, field: text})
        if verb == "begin":
            return self._begin(item)
        signature = (
            self._delta(item, {"type": "signature_delta", "signature": _signature(item)}) if item.kind == "thinking" else b""
        )
        return signature + sse.event({"type": "content_block_stop", "index": item.number}, "content_block_stop")

    def _begin(self, item: Item) -> bytes:
        if item.kind == "thinking":
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
        elif item.kind == "call":
            block = {"type": "tool_use", "id": self._call_id(item), "name": item.name, "input": {}}
        else:
            block = {"type": "text", "text": ""}
        event = {"type": "content_block_start", "index": item.number, "content_block": block}
        return sse.event(event, "content_block_start")

    def _delta(self, item: Item, delta: dict[str, str]) -> bytes:
        return sse.event({"type": "content_block_delta", "index": item.number, "delta": delta}, "content_block_delta")

    def _block(self, item: Item) -> dict[str, Any] | None:
        """An item of a whole answer. A call cut off by the token limit is left out: `stop_reason` says max_tokens."""
        if item.kind == "thinking":
            return {"type": "thinking", "thinking": item.text, "signature": _signature(item)}
        if item.kind != "call":
            return {"type": "text", "text": item.text}
        given = arguments(item.text or "{}")
        if given is None:
            if self._items.finish_reason == "length":
                return None
            message = f"The model called {item.name[:80]} with arguments that are no JSON object"
            raise UpstreamError(502, message, "Send the request again", kind="protocol", retryable=False, code="tool_arguments")
        return {"type": "tool_use", "id": self._call_id(item), "name": item.name, "input": given}

    def _call_id(self, item: Item) -> str:
        return item.id or f"toolu_{self._turn.id.removeprefix('req_')}_{item.number}"

    def _end(self) -> dict[str, Any]:
        """stop_reason and, when a stop sequence ended the answer and the upstream says which, that sequence."""
        items = self._items
        if items.finish_reason not in ("length", "content_filter") and items.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        stops = self._turn.body.get("stop")
        if items.finish_reason == "stop" and isinstance(stops, list) and items.stopped_by in stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": items.stopped_by}
        return {"stop_reason": STOP_REASONS.get(items.finish_reason, "end_turn"), "stop_sequence": None}


def _signature(item: Item) -> str:
    return item.signature or thoughts.sign(item.text)


def usage(counts: dict[str, Any]) -> dict[str, int]:
    """Anthropic counts what was read from the cache apart from the rest of the prompt."""
    details = counts.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    prompt, cached = _count(counts.get("prompt_tokens")), _count(details.get("cached_tokens"))
    written = _count(details.get("cache_creation_tokens"))
    return {
        "input_tokens": max(prompt - cached - written, 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": _count(counts.get("completion_tokens")),
    }


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error(refusal: Refusal, request_id: str = "") -> dict[str, Any]:
    """The Anthropic error object. A prompt that is too long is said in the words that make agents compact their context."""
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    text = refusal.text
    if refusal.code.startswith("context_length") and "prompt is too long" not in text.lower():
        text = f"prompt is too long: {text}"
    out: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": text}}
    return out | ({"request_id": request_id} if request_id else {})
