"""Chat completions answers as OpenAI Responses, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from gateway import sse
from gateway.calls import arguments
from gateway.dialects import thoughts
from gateway.dialects.items import Event, Item, Items, Verb
from gateway.dialects.responses_read import Wire
from gateway.errors import Refusal, UpstreamError
from gateway.sse import Chunk
from gateway.turn import Turn

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
PREFIX = {"thinking": "rs", "text": "msg", "refusal": "msg", "call": "fc"}


class ResponsesWriter:
    """Typed events with running numbers; output items with running indexes, each one done before the next is added."""

    passthrough = False

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._wire: Wire = turn.wire
        self._id = turn.id.removeprefix("req_")
        self._items = Items()
        self._done: list[dict[str, Any]] = []  # the output so far
        self._sequence = 0
        self._started = False

    def feed(self, chunks: Sequence[Chunk]) -> bytes:
        return b"".join(self._start() + self._events(self._items.feed(c.data)) for c in chunks if c.data is not None)

    def finish(self) -> bytes:
        rest = self._start() + self._events(self._items.finish())
        response = self._finished()
        return rest + self._event(f"response.{response['status']}", response=response)

    def error(self, refusal: Refusal) -> bytes:
        error = {"code": error_code(refusal), "message": refusal.text}
        return self._start() + self._event("response.failed", response=self._response("failed", self._done) | {"error": error})

    def keepalive(self) -> bytes:
        # An event and no comment: agents measure the silence between events, and take an unknown or early one badly.
        return self._start() or self._event("response.in_progress", response=self._response("in_progress", []))

    def whole(self, answer: dict[str, Any]) -> bytes:
        self._done = [self._item(item) for item in self._items.whole(answer)]
        return orjson.dumps(self._finished())

    # --- events

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return sse.event(data, kind)

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join(part for verb, item, text in events for part in self._of(verb, item, text))

    def _of(self, verb: Verb, item: Item, text: str) -> Iterable[bytes]:
        """The events for one step of one item."""
        place = {"item_id": self._item_id(item), "output_index": item.number}
        if verb == "begin":
            added = _bare(self._item(item))
            yield self._event("response.output_item.added", output_index=item.number, item=added)
            if item.kind != "call":
                yield from self._part("added", item, place, "")
        elif verb == "say" and not self._is_custom(item):
            yield self._event(f"{self._channel(item)}.delta", **place | self._position(item), delta=text, **_logprobs(item))
        elif verb == "end":
            yield from self._end(item, place)

    def _end(self, item: Item, place: dict[str, Any]) -> Iterable[bytes]:
        done = self._item(item)
        if item.kind != "call":
            field = "refusal" if item.kind == "refusal" else "text"
            said = {field: item.text} | _logprobs(item)
            yield self._event(f"{self._channel(item)}.done", **place | self._position(item), **said)
            yield from self._part("done", item, place, item.text)
        elif self._is_custom(item):
            if done["status"] == "completed":  # what was cut off is no input
                yield self._event("response.custom_tool_call_input.delta", **place, delta=done["input"])
                yield self._event("response.custom_tool_call_input.done", **place, input=done["input"])
        else:
            named = {"name": done["name"], "arguments": item.text}
            yield self._event("response.function_call_arguments.done", **place, **named)
        self._done.append(done)
        yield self._event("response.output_item.done", output_index=item.number, item=done)

    def _part(self, verb: str, item: Item, place: dict[str, Any], text: str) -> Iterable[bytes]:
        kind = "reasoning_summary_part" if self._is_summary(item) else "content_part"
        yield self._event(f"response.{kind}.{verb}", **place | self._position(item), part=self._content(item, text))

    def _channel(self, item: Item) -> str:
        if item.kind == "thinking":
            return "response.reasoning_summary_text" if self._wire.summary else "response.reasoning_text"
        names = {"text": "output_text", "refusal": "refusal", "call": "function_call_arguments"}
        return f"response.{names[item.kind]}"

    def _position(self, item: Item) -> dict[str, int]:
        if item.kind == "call":
            return {}
        return {"summary_index": 0} if self._is_summary(item) else {"content_index": 0}

    # --- items

    def _is_summary(self, item: Item) -> bool:
        return item.kind == "thinking" and self._wire.summary

    def _is_custom(self, item: Item) -> bool:
        return item.kind == "call" and item.name in self._wire.names.custom

    def _item_id(self, item: Item) -> str:
        prefix = "ctc" if self._is_custom(item) else PREFIX[item.kind]
        return f"{prefix}_{self._id}_{item.number}"

    def _content(self, item: Item, text: str) -> dict[str, Any]:
        if item.kind == "thinking":
            return {"type": "summary_text" if self._wire.summary else "reasoning_text", "text": text}
        if item.kind == "refusal":
            return {"type": "refusal", "refusal": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, item: Item) -> dict[str, Any]:
        """An output item as it stands. The last one of an answer that was cut off is incomplete."""
        cut = self._items.finish_reason in INCOMPLETE and item.number == self._items.count - 1
        head = {"id": self._item_id(item), "status": "incomplete" if cut else "completed"}
        if item.kind == "call":
            return head | self._call(item, cut)
        content = [self._content(item, item.text)]
        if item.kind != "thinking":
            return head | {"type": "message", "role": "assistant", "content": content}
        reasoning = {"summary": content} if self._wire.summary else {"summary": [], "content": content}
        sealed = {"encrypted_content": thoughts.seal(item.text)} if self._wire.sealed else {}
        return head | {"type": "reasoning"} | reasoning | sealed

    def _call(self, item: Item, cut: bool) -> dict[str, Any]:
        names = self._wire.names
        space, name = names.spaces.get(item.name, ("", item.name))
        head = {"call_id": item.id or f"call_{self._id}_{item.number}", "name": name} | ({"namespace": space} if space else {})
        if self._is_custom(item):
            return head | {"type": "custom_tool_call", "input": _free_text(item, cut)}
        return head | {"type": "function_call", "arguments": item.text}

    # --- the response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        id = self._wire.response_id or f"resp_{self._id}"
        head = {"id": id, "object": "response", "created_at": int(self._turn.received.at), "status": status}
        return head | {"model": self._turn.model, "output": output, "error": None, "incomplete_details": None} | self._wire.echo

    def _finished(self) -> dict[str, Any]:
        reason = INCOMPLETE.get(self._items.finish_reason)
        response = self._response("incomplete" if reason else "completed", self._done)
        details = {"incomplete_details": {"reason": reason}} if reason else {}
        return response | details | {"usage": usage(self._items.usage)}


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    """An item before anything was said in it."""
    empty = {"content": [], "summary": [], "arguments": "", "input": "", "encrypted_content": "", "status": "in_progress"}
    return {k: empty.get(k, v) for k, v in item.items()}


def _logprobs(item: Item) -> dict[str, Any]:
    return {"logprobs": []} if item.kind == "text" else {}


def _free_text(item: Item, cut: bool) -> str:
    """The input of a custom tool: the one string of the arguments, or a text that was written without them."""
    if not item.ended:
        return ""
    given = arguments(item.text)
    if given is not None and isinstance(given.get("input"), str):
        return given["input"]
    if cut:
        return ""
    if given is None and not item.text.lstrip().startswith("{"):
        return item.text
    message = f"The model called {item.name[:80]} without the one string `input` that it takes"
    raise UpstreamError(502, message, "Send the request again", kind="protocol", retryable=False, code="tool_arguments")


def usage(counts: dict[str, Any]) -> dict[str, Any] | None:
    """None when the upstream said nothing: zeros would be a lie that agents budget with."""
    if not counts:
        return None
    prompt, completion = _count(counts, "prompt_tokens"), _count(counts, "completion_tokens")
    details = counts.get("prompt_tokens_details")
    cached, written = _count(details, "cached_tokens"), _count(details, "cache_creation_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": _count(counts.get("completion_tokens_details"), "reasoning_tokens")},
        "total_tokens": prompt + completion,
    }


def _count(counts: Any, name: str) -> int:
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if isinstance(value, int) else 0


def error_code(refusal: Refusal) -> str:
    """The codes that agents act on: compact the context, wait, or stop asking."""
    if refusal.code.startswith("context_length"):
        return "context_length_exceeded"
    if refusal.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if refusal.status >= 500 else "invalid_prompt"
