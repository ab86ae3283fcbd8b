"""Which tool call a streamed fragment belongs to: one answer for the record, the tool check and the dialects' writers.

OpenAI's rule is an index per call, an id and a name in its first fragment. Servers bend it: parallel calls that share an index or
have none, whole calls in one delta, ids that come late or never, names in every fragment, arguments as an object. An id decides
when there is one; without ids another name, or a name behind complete arguments, begins another call; a fragment without a head
belongs to the newest call of its index.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import orjson


class Growing(Protocol):
    """A call in the making; `parts` are its arguments so far."""

    id: str
    name: str
    parts: list[str]
    closing: Closing


SPACE = " \t\n\r"  # JSON's
_MARKS = re.compile(r'["\\{}\[\]]')


@dataclass(slots=True)
class Closing:
    """Is an object that comes in pieces whole? Each piece is looked at once: to read all of them behind each one is quadratic."""

    _seen: int = 0  # pieces
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False  # the next character is
    _closed: bool = False
    _over: bool = False  # something stands behind the end
    _whole: bool | None = None  # what a parse said when it was closed

    def whole(self, parts: list[str]) -> bool:
        """Do these pieces, those of before among them, make one object?"""
        for part in parts[self._seen :]:
            self._look(part)
        self._seen = len(parts)
        if not self._closed or self._over:
            return False
        if self._whole is None:
            self._whole = arguments("".join(parts)) is not None
        return self._whole

    def _look(self, part: str) -> None:
        if self._closed:
            self._over = self._over or bool(part.strip(SPACE))
            return
        start = 0
        if self._escaped and part:
            self._escaped, start = False, 1
        while (mark := _MARKS.search(part, start)) is not None and not self._closed:
            start = mark.end()
            char = mark[0]
            if char == "\\":
                start += 1
                self._escaped = start > len(part)
            elif char == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if char in "{[" else -1
                self._closed = self._depth <= 0
        if self._closed:
            self._over = bool(part[start:].strip(SPACE))


C = TypeVar("C", bound=Growing)


@dataclass(slots=True)
class Call:
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    closing: Closing = field(default_factory=Closing)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class Calls(Generic[C]):
    """The calls of one choice. It knows nothing of its owner: a way back would keep all of the answer until a collection."""

    def __init__(self) -> None:
        self._newest: dict[int, C] = {}  # by index
        self._ids: dict[str, C] = {}

    def take(self, place: int, piece: dict[str, Any], new: Callable[[], C]) -> tuple[C, str]:
        """(the call that `piece` belongs to, with its id and name; the arguments in it). `place` stands in for no index.

        `new` makes a call and puts it where its owner wants it.
        """
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        id, name, said = _text(piece.get("id")), _text(function.get("name")), function.get("arguments")
        index = at if isinstance(at := piece.get("index"), int) else place
        call = self._ids.get(id) if id else None
        if call is None:
            call = self._newest.get(index)
            if call is None or _another(call, id, name):
                call = new()
        self._newest[index] = call
        if id:
            self._ids[id] = call
        call.id, call.name = call.id or id, call.name or name
        return call, orjson.dumps(said).decode() if isinstance(said, dict) else _text(said)


def _another(call: Growing, id: str, name: str) -> bool:
    """Does a fragment with this head begin a call of its own behind `call`, whose index it has?"""
    if id and call.id:
        return True  # its own id would have been known
    if not name or not call.name or id:
        return False
    if name != call.name:
        return True
    return call.closing.whole(call.parts)


def arguments(text: str) -> dict[str, Any] | None:
    """A call's arguments as an object; None when they are none (yet)."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
