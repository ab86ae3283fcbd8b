"""Answers that LiteLLM already put into a client's dialect, read back as the chat completions they were.

The gateway's filters and records know chat completions only. A reader takes what LiteLLM's streams and whole answers are made
of: bytes or text of server-sent events (Messages), typed event objects (Responses), chunks (chat). One reader per answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import orjson

from gateway.errors import UpstreamError
from gateway.sse import Chunk, Splitter, parse

FINISH_OF = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
INCOMPLETE_OF = {"max_output_tokens": "length", "content_filter": "content_filter"}


class AnswerReader(Protocol):
    """`item`: chat chunks for one item of a stream. `whole`: a chat completion for a complete answer."""

    def item(self, item: Any) -> list[Chunk]: ...

    def whole(self, answer: Any) -> dict[str, Any]: ...


def plain(value: Any) -> Any:
    """LiteLLM's objects as plain data; what is plain already stays the same object."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True)
    return value


class ChatReader:
    """Chat completions are what they are."""

    def item(self, item: Any) -> list[Chunk]:
        if isinstance(item, bytes | str):
            return parse(item.encode() if isinstance(item, str) else item)
        data = plain(item)
        return [Chunk.of(data)] if isinstance(data, dict) else []

    def whole(self, answer: Any) -> dict[str, Any]:
        return plain(answer)


class _Events:
    """Events of a named stream to chunks: `on_<type>` of the subclass yields (delta, finish_reason)."""

    def __init__(self) -> None:
        self.id = ""
        self._splitter = Splitter()
        self._calls: dict[Any, int] = {}  # the block's or item's index -> the call's
        self._usage: dict[str, Any] = {}

    def item(self, item: Any) -> list[Chunk]:
        if isinstance(item, bytes | str):
            raw = self._splitter.feed(item.encode() if isinstance(item, str) else item)
            events = [chunk.data for chunk in parse(raw) if chunk.data is not None]
        else:
            data = plain(item)
            events = [data] if isinstance(data, dict) else []
        return [chunk for event in events for chunk in self._event(event)]

    def _event(self, event: dict[str, Any]) -> Iterator[Chunk]:
        raise NotImplementedError

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> Chunk:
        choice = {"index": 0, "delta": delta, "finish_reason": finish} | more
        return Chunk.of({"id": self.id, "object": "chat.completion.chunk", "choices": [choice]})

    def _counted(self) -> Chunk:
        return Chunk.of({"id": self.id, "object": "chat.completion.chunk", "choices": [], "usage": self._usage})

    def _call(self, place: Any, arguments: str, id: str = "", name: str = "") -> Chunk:
        index = self._calls.setdefault(place, len(self._calls))
        head = {"id": id, "type": "function"} if id else {}
        function = ({"name": name} if name else {}) | {"arguments": arguments}
        return self._chunk({"tool_calls": [{"index": index, **head, "function": function}]})

    def _completion(self, message: dict[str, Any], finish: str, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "message": message, "finish_reason": finish} | more
        usage = {"usage": self._usage} if self._usage else {}
        return {"id": self.id, "object": "chat.completion", "choices": [choice]} | usage


class MessagesReader(_Events):
    """Anthropic Messages."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, int] = {}

    def _event(self, event: dict[str, Any]) -> Iterator[Chunk]:
        kind = _text(event.get("type"))
        if kind == "message_start":
            message = _dict(event.get("message"))
            self.id = _text(message.get("id"))
            self._count(message.get("usage"))
        elif kind == "content_block_start":
            yield from self._block(_int(event.get("index")), _dict(event.get("content_block")))
        elif kind == "content_block_delta":
            yield from self._delta(_int(event.get("index")), _dict(event.get("delta")))
        elif kind == "message_delta":
            self._count(event.get("usage"))
            delta = _dict(event.get("delta"))
            if isinstance(reason := delta.get("stop_reason"), str):
                yield self._chunk({}, FINISH_OF.get(reason, "stop"), **_stopped_by(delta))
            if self._usage:
                yield self._counted()
        elif kind == "error":
            raise _failed(_dict(event.get("error")))

    def _block(self, place: Any, block: dict[str, Any]) -> Iterator[Chunk]:
        if block.get("type") == "tool_use":
            given = orjson.dumps(block["input"]).decode() if block.get("input") else ""
            yield self._call(place, given, _text(block.get("id")), _text(block.get("name")))
        elif text := _text(block.get("text")):
            yield self._chunk({"content": text})
        elif thought := _text(block.get("thinking")):
            yield self._chunk({"reasoning_content": thought})

    def _delta(self, place: Any, delta: dict[str, Any]) -> Iterator[Chunk]:
        kind = delta.get("type")
        if kind == "text_delta":
            yield self._chunk({"content": _text(delta.get("text"))})
        elif kind == "thinking_delta":
            yield self._chunk({"reasoning_content": _text(delta.get("thinking"))})
        elif kind == "input_json_delta" and place in self._calls:
            yield self._call(place, _text(delta.get("partial_json")))
        elif kind == "signature_delta" and (signature := _text(delta.get("signature"))):
            yield self._chunk({"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": signature}]})

    def _count(self, usage: Any) -> None:
        """Anthropic counts what came from the cache apart from the rest of the prompt; chat completions count it in."""
        self._counts |= {k: v for k, v in _dict(usage).items() if isinstance(v, int)}
        fresh, read, written, completion = (self._counts.get(k, 0) for k in COUNTS)
        prompt = fresh + read + written
        if prompt or completion:
            details = {"prompt_tokens_details": {"cached_tokens": read}}
            self._usage = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            } | details

    def whole(self, answer: Any) -> dict[str, Any]:
        answer = _dict(plain(answer))
        self.id = _text(answer.get("id"))
        self._count(answer.get("usage"))
        blocks = [b for b in _list(answer.get("content")) if isinstance(b, dict)]
        message: dict[str, Any] = {"role": "assistant", "content": _joined(blocks, "text") or None}
        if thought := _joined(blocks, "thinking"):
            message["reasoning_content"] = thought
        signed = [b for b in blocks if b.get("type") == "thinking" and b.get("signature")]
        if signed:
            message["thinking_blocks"] = signed
        calls = [b for b in blocks if b.get("type") == "tool_use"]
        if calls:
            message["tool_calls"] = [
                _function(_text(b.get("id")), _text(b.get("name")), orjson.dumps(b.get("input") or {}).decode()) for b in calls
            ]
        return self._completion(message, FINISH_OF.get(_text(answer.get("stop_reason")), "stop"), **_stopped_by(answer))


class ResponsesReader(_Events):
    """OpenAI Responses."""

    DELTAS = {
        "response.output_text.delta": "content",
        "response.reasoning_summary_text.delta": "reasoning_content",
        "response.reasoning_text.delta": "reasoning_content",
        "response.refusal.delta": "refusal",
    }

    def __init__(self) -> None:
        super().__init__()
        self._said: set[Any] = set()  # calls whose arguments came as fragments

    def _event(self, event: dict[str, Any]) -> Iterator[Chunk]:
        kind, place = _text(event.get("type")), _int(event.get("output_index"))
        if kind in self.DELTAS:
            yield self._chunk({self.DELTAS[kind]: _text(event.get("delta"))})
        elif kind == "response.created":
            self.id = _text(_dict(event.get("response")).get("id"))
        elif kind == "response.output_item.added":
            item = _dict(event.get("item"))
            if item.get("type") == "function_call":
                yield self._call(place, "", _text(item.get("call_id")), _text(item.get("name")))
        elif kind == "response.function_call_arguments.delta":
            self._said.add(place)
            yield self._call(place, _text(event.get("delta")))
        elif kind == "response.output_item.done":
            item = _dict(event.get("item"))
            if item.get("type") == "function_call" and place not in self._said:
                yield self._call(place, _text(item.get("arguments")), _text(item.get("call_id")), _text(item.get("name")))
        elif kind in ("response.completed", "response.incomplete"):
            yield from self._end(_dict(event.get("response")))
        elif kind in ("response.failed", "error"):
            raise _failed(_dict(_dict(event.get("response")).get("error")) or event)

    def _end(self, response: dict[str, Any]) -> Iterator[Chunk]:
        self._count(response.get("usage"))
        yield self._chunk({}, _finish(response, bool(self._calls)))
        if self._usage:
            yield self._counted()

    def _count(self, usage: Any) -> None:
        counts = _dict(usage)
        prompt, completion = counts.get("input_tokens"), counts.get("output_tokens")
        if isinstance(prompt, int) and isinstance(completion, int):
            cached = _dict(counts.get("input_tokens_details")).get("cached_tokens") or 0
            reasoned = _dict(counts.get("output_tokens_details")).get("reasoning_tokens")
            self._usage = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": cached},
            } | ({"completion_tokens_details": {"reasoning_tokens": reasoned}} if isinstance(reasoned, int) else {})

    def whole(self, answer: Any) -> dict[str, Any]:
        answer = _dict(plain(answer))
        if answer.get("status") == "failed":
            raise _failed(_dict(answer.get("error")))
        self.id = _text(answer.get("id"))
        self._count(answer.get("usage"))
        items = [i for i in _list(answer.get("output")) if isinstance(i, dict)]
        spoken = [p for i in items if i.get("type") == "message" for p in _list(i.get("content")) if isinstance(p, dict)]
        thoughts = [
            p
            for i in items
            if i.get("type") == "reasoning"
            for p in (_list(i.get("content")) or _list(i.get("summary")))
            if isinstance(p, dict)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": _joined(spoken, "text") or None}
        if thought := _joined(thoughts, "text"):
            message["reasoning_content"] = thought
        calls = [i for i in items if i.get("type") == "function_call"]
        if calls:
            message["tool_calls"] = [
                _function(_text(i.get("call_id")), _text(i.get("name")), _text(i.get("arguments"))) for i in calls
            ]
        return self._completion(message, _finish(answer, bool(calls)))


READERS: dict[str, type[AnswerReader]] = {"chat": ChatReader, "messages": MessagesReader, "responses": ResponsesReader}


def _finish(response: Mapping[str, Any], called: bool) -> str:
    reason = _dict(response.get("incomplete_details")).get("reason")
    if response.get("status") == "incomplete" or reason:
        return INCOMPLETE_OF.get(_text(reason), "length")
    return "tool_calls" if called else "stop"


def _failed(error: Mapping[str, Any]) -> UpstreamError:
    message = _text(error.get("message")) or "The upstream reported an error"
    return UpstreamError(502, message, kind="status", retryable=False, code=_text(error.get("code")) or "upstream_error")


def _function(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _stopped_by(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {"stop_reason": holder["stop_sequence"]} if isinstance(holder.get("stop_sequence"), str) else {}


def _joined(parts: list[dict[str, Any]], name: str) -> str:
    return "".join(_text(p.get(name)) for p in parts)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0
