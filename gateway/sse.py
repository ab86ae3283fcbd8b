"""Server-sent events as bytes: cut a byte stream at event borders, look inside only when somebody asks.

`Splitter` turns reads of any size into blocks of whole events. A block goes out untouched when no filter wants it; `parse` makes
chunks of it, each of which is parsed when a filter looks into it.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.glance import Event

# One event larger than this is no token but an attack or a bug; the stream is ended with an error.
MAX_EVENT_BYTES = 16 << 20


class Chunk:
    """One event: `raw` are its bytes with the closing blank line, `data` its parsed JSON (None for comments and garbage).

    It is parsed when somebody asks; `seen` is what a glance at it told, if there was one. Filters never change `data` in place: a
    changed chunk is a new one, `Chunk.of(data)`, and has no raw bytes.
    """

    __slots__ = ("_data", "_done", "_known", "_malformed", "raw", "seen")

    def __init__(self, raw: bytes, data: dict[str, Any] | None = None) -> None:
        self.raw = raw
        self._data = data
        self._done = self._malformed = False
        self._known = data is not None
        self.seen: Event | None = None

    @property
    def data(self) -> dict[str, Any] | None:
        if not self._known:
            self._parse()
        return self._data

    @property
    def done(self) -> bool:
        """data: [DONE]"""
        if not self._known and not self.raw.startswith(b"data: {"):
            self._parse()
        return self._done

    @property
    def malformed(self) -> bool:
        """It had data that is not a JSON object."""
        if not self._known:
            self._parse()
        return self._malformed

    def _parse(self) -> None:
        self._known = True
        data = self._payload()
        if data is None:
            return
        if data.strip() == b"[DONE]":
            self._done = True
            return
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            value = None
        if isinstance(value, dict):
            self._data = value
        else:
            self._malformed = True

    def _payload(self) -> bytes | None:
        """The data lines as one; None when there are none."""
        part = self.raw[:-2]
        if part.startswith(b"data: ") and b"\n" not in part:  # what every engine sends
            return part[6:]
        lines = [line[5:].removeprefix(b" ") for line in part.split(b"\n") if line.startswith(b"data:")]
        return b"\n".join(lines) if lines else None

    @classmethod
    def of(cls, data: dict[str, Any]) -> Chunk:
        return cls(b"", data)

    def bytes(self) -> bytes:
        """The event for the wire: as it came, or made from `data`."""
        return self.raw or event(self.data)


def event(data: Any, name: str = "") -> bytes:
    """`data` as one event, with an `event:` line when named."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def comment(text: str) -> bytes:
    """A comment event: keeps connections alive, invisible to clients."""
    return b": " + text.encode() + b"\n\n"


def parse(raw: bytes) -> list[Chunk]:
    """The events of a block of whole events."""
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n")
    return [Chunk(part + b"\n\n") for part in raw.split(b"\n\n") if part.strip()]


class Splitter:
    """Feed bytes, take whole events; the unfinished tail waits for the next feed."""

    __slots__ = ("_edge", "_size", "_waiting")

    def __init__(self) -> None:
        self._wait(b"")

    def _wait(self, rest: bytes) -> None:
        self._waiting = [rest] if rest else []
        self._size, self._edge = len(rest), rest[-3:]  # a border may begin in these last bytes

    def feed(self, data: bytes) -> bytes:
        """As many whole events as there are now, b"" if none. Raises ValueError on an event beyond MAX_EVENT_BYTES."""
        if not self._size and data.endswith(b"\n\n"):  # whole events, as most servers write them
            return data
        seen = self._edge + data if self._edge else data
        end = max((at + len(border) for border in (b"\n\n", b"\r\n\r\n") if (at := seen.rfind(border)) >= 0), default=0)
        if not end:
            self._waiting.append(data)  # joined once, when its end has come: a large event comes in hundreds of parts
            self._size, self._edge = self._size + len(data), seen[-3:]
        else:
            end -= len(self._edge)
            whole, rest = (data, b"") if end == len(data) else (data[:end], data[end:])
            if self._waiting:
                whole = b"".join((*self._waiting, whole))
            self._wait(rest)
        if self._size > MAX_EVENT_BYTES:
            raise ValueError(f"one event is larger than {MAX_EVENT_BYTES >> 20} MiB")
        return whole if end else b""

    def rest(self) -> bytes:
        """The tail of a stream that ended properly but without a last blank line, as whole events."""
        rest = b"".join(self._waiting)
        self._wait(b"")
        return rest.rstrip(b"\r\n") + b"\n\n" if rest.strip() else b""
