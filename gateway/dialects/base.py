"""What a dialect is: a reader of requests and, per turn, a writer of answers.

Inside the gateway everything is chat completions. A dialect turns its own wire body into a chat body (`read`) and the chat
answer, streamed or whole, into its own wire form (`Writer`). All that a dialect keeps between requests
are the tool lists it knows, which belong to the gateway that made it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import orjson

from gateway.conversations import Cut, Messages
from gateway.dialects import duplicates
from gateway.edits import edits
from gateway.errors import Refusal
from gateway.sse import Chunk
from gateway.tools import KnownTools, Tools, derived
from gateway.turn import Decision, Turn


class Writer(Protocol):
    """Writes one answer in the client's form. For a stream the calls are: feed* finish, or feed* error.

    `passthrough`: this dialect is chat completions on the wire, so a block no filter wants may go out as it came.
    """

    passthrough: bool

    def feed(self, chunks: Sequence[Chunk]) -> bytes:
        """The wire bytes for these chunks; b"" when nothing is to be sent yet. Chunks that are `done` never come here."""
        ...

    def finish(self) -> bytes:
        """What closes a complete stream ([DONE], message_stop, ...)."""
        ...

    def error(self, refusal: Refusal) -> bytes:
        """What tells the client, inside a started stream, that it broke off. Must not look finished."""
        ...

    def keepalive(self) -> bytes:
        """What may be sent at any time between events to keep proxies from cutting the line."""
        ...

    def whole(self, answer: dict[str, Any]) -> bytes:
        """The body of a non-streamed answer, from a chat completion object."""
        ...


class Dialect(Protocol):
    """One wire form. The keys of `pipeline.DIALECTS` say which paths speak it; the class is called with a KnownTools."""

    name: str
    upstream_path: str  # where OpenAI-compatible upstreams take what `read` makes

    def read(self, turn: Turn) -> Turn:
        """Fill body, raw, parsed, model, stream, wants_usage, breakpoints from `turn.received`. Raises Refusal (400)."""
        ...

    def writer(self, turn: Turn) -> Writer: ...

    def refusal(self, refusal: Refusal) -> bytes:
        """The JSON body of an error answer."""
        ...


# JavaScript agents cut strings in the middle of an emoji; JSON.stringify then writes a lone \ud83d, which is no Unicode text.
_SURROGATES = re.compile(rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


# orjson reads 1,024 levels and writes 254, and what cannot be written again cannot be sent on. Translations put parts of a
# request up to three levels deeper. No agent seen nests deeper than 20.
MAX_DEPTH = 246
LONG_BODY = 64 << 10  # bytes; one of this length has more brackets than that anyway, and counting them takes longer than looking


def loads(raw: bytes, known: KnownTools) -> tuple[dict[str, Any], bytes, tuple[Decision, ...]]:
    """Parse a request body: (object, bytes it stands for, decisions). Raises Refusal.

    Lone surrogate escapes become U+FFFD, with a decision, instead of an error. Tools and messages that are in `known` are not
    parsed again.
    """
    decisions: tuple[Decision, ...] = ()
    try:
        parsed = _read(raw, known)
    except orjson.JSONDecodeError as e:
        mended = _SURROGATES.sub(lambda m: b"\\ufffd" if len(m[0]) == 6 else m[0], raw)
        try:
            parsed = _read(mended, known) if mended != raw else None
        except orjson.JSONDecodeError:
            parsed = None
        if parsed is None:
            raise Refusal(400, f"The request body is not valid JSON: {e}", "Send one JSON object", code="invalid_json") from None
        raw = mended
        decisions = (Decision("read", "surrogate", "half an emoji (a lone surrogate escape) became U+FFFD"),)
    body, spans, cut = parsed
    if not isinstance(body, dict):
        raise Refusal(400, "The request body must be a JSON object", code="invalid_json")
    if len(raw) > LONG_BODY or raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
        _check_depth(body)
    if "messages" in spans:
        body["messages"] = known.conversations.keep(raw, spans["messages"], body["messages"], cut)
    return body, raw, decisions


def _check_depth(body: dict[str, Any]) -> None:
    """Writing it is the fastest way to know; texts are left out and tools that came before are known. Raises Refusal."""
    known = {k: v for k, v in body.items() if isinstance(v, Tools)}
    fine = all(derived(v, "writable", partial(_writable, {k: v})) for k, v in known.items())
    if not fine or not _writable({k: _without_texts(v) for k, v in body.items() if k not in known}):
        message = f"The request body is nested deeper than {MAX_DEPTH} levels"
        raise Refusal(400, message, "Flatten it", code="invalid_json") from None


def _writable(body: Any) -> bool:
    try:
        orjson.dumps([[[[[[[[body]]]]]]]])
    except TypeError:
        return False
    return True


def _without_texts(value: Any) -> Any:
    """A list of objects, as messages are, as deep as it was but without the strings in them, and without known messages."""
    if not isinstance(value, list):
        return value
    if isinstance(value, Messages):
        value = value[value.known :]
    return [[v for item in value if type(item) is dict for v in item.values() if type(v) is not str]] + [
        item for item in value if type(item) is list
    ]


_spans = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Below this a list of tools is parsed faster than found.
LONG_TOOLS = 2048


def _read(raw: bytes, known: KnownTools) -> tuple[Any, Mapping[str, msgspec.Raw], Cut | None]:
    """(a body, the bytes of its parts, the cut body that these are of). Raises Refusal and orjson.JSONDecodeError."""
    if (cut := known.conversations.cut(raw)) is not None:
        with contextlib.suppress(orjson.JSONDecodeError):  # raised again below, with its place in the whole body
            body, spans = _parse(cut.rest, known)
            if cut.join(body):
                return body, spans, cut
    return *_parse(raw, known), None


def _parse(raw: bytes, known: KnownTools) -> tuple[Any, Mapping[str, msgspec.Raw]]:
    """(the value of a body, the bytes of its parts); a long list of tools in it is found by its bytes. Raises as `_read`."""
    try:
        spans = _spans.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return orjson.loads(raw), {}  # no JSON object; or one to which the other parser has the better objection
    duplicates.refuse(raw, spans)
    if len(memoryview(spans.get("tools", b""))) >= LONG_TOOLS:
        with contextlib.suppress(orjson.JSONDecodeError):  # raised again below, with its place in the whole body
            parsed = {k: known.parse(bytes(v)) if k == "tools" else orjson.loads(memoryview(v)) for k, v in spans.items()}
            return parsed, spans
    return orjson.loads(raw), spans


def need_model(body: dict[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Refusal(400, "`model` must be a non-empty string", "GET /v1/models lists the names", param="model")
    return model


def need_bool(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refusal(400, f"`{name}` must be true or false", param=name)
    return bool(value)


def ask_usage(turn: Turn) -> Turn:
    """Usage is always asked of a streaming upstream; `wants_usage` says whether the client shall see it."""
    options = turn.body.get("stream_options")
    if not turn.stream or (isinstance(options, dict) and options.get("include_usage") is True):
        return turn
    if options is not None and not isinstance(options, dict):
        raise Refusal(400, "`stream_options` must be an object", param="stream_options")
    change = edits(turn.body, (("stream_options", "include_usage"), True))
    note = Decision("read", "usage", "usage is always asked of the upstream; it is kept from clients that did not ask", change)
    return turn.but(wants_usage=False).decide(note)
