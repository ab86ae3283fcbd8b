"""Which tool call a streamed fragment belongs to: one answer for the record, the tool check and the dialects' writers.

OpenAI's rule is an index per call, an id and a name in its first fragment. Servers bend it: parallel calls that share an index or
have none, whole calls in one delta, ids that come late or never, names in every fragment, arguments as an object. An id decides
when there is one; without ids another name, or a name behind complete arguments, begins another call; a fragment without a head
belongs to the newest call of its index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import orjson


class Growing(Protocol):
    """A call in the making; `parts` are its arguments so far."""

    id: str
    name: str
    parts: list[str]


C = TypeVar("C", bound=Growing)


@dataclass(slots=True)
class Call:
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

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
    last = next((part for part in reversed(call.parts) if part.strip()), "")
    return last.rstrip().endswith("}") and arguments("".join(call.parts)) is not None


def arguments(text: str) -> dict[str, Any] | None:
    """A call's arguments as an object; None when they are none (yet)."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
