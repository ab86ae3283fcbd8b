"""Tools known by their content: an agent sends the same list with every request, so what follows from it is made once.

One list is shared by all requests that bring an equal one. `derived` keeps beside it what policies, fingerprints and schema
checks make of it. Nobody changes a list in place, so sharing is safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from gateway.conversations import KnownConversations

if TYPE_CHECKING:
    from gateway.turn import Turn

# Bytes of tool lists kept, as JSON. Ten agents in three versions bring 2 MB; a list with all that is derived is ten times that.
KEEP_BYTES = 4 << 20

T = TypeVar("T")


class Tools(list):
    """A tool list that remembers what was derived from it."""

    __slots__ = ("memo",)

    def __init__(self, tools: list[Any]) -> None:
        super().__init__(tools)
        self.memo: dict[Hashable, Any] = {}


def derived(tools: list[Any], name: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it gave for the same tools before. `name` must say everything else that the result depends on."""
    if not isinstance(tools, Tools):
        return make()
    if name not in tools.memo:
        tools.memo[name] = make()
    return tools.memo[name]


class KnownTools:
    """The lists seen lately by one gateway; the least recently used go first. `conversations` are those seen with them."""

    def __init__(self, keep: int = KEEP_BYTES) -> None:
        self.conversations = KnownConversations()
        self._keep = keep
        self._size = 0
        self._lists: OrderedDict[bytes, Tools] = OrderedDict()

    def stage(self, turn: Turn) -> Turn:
        """For lists that a dialect made anew; those that came as they are were found by `parse`."""
        given = turn.parsed.get("tools")
        if not isinstance(given, list) or not given or isinstance(given, Tools) or turn.body.get("tools") is not given:
            return turn
        return turn.shared("tools", self.get(given))

    def get(self, given: list[Any]) -> list[Any]:
        """The known list with this content; `given` itself when it is too large to keep."""
        try:
            key = orjson.dumps(given)
        except TypeError:  # nested deeper than JSON can be written
            return given
        return self._lists[key] if self._has(key) else self._add(key, given)

    def parse(self, raw: bytes) -> Any:
        """The value of this JSON text, shared with every equal text if it is a list. Raises orjson.JSONDecodeError."""
        if self._has(raw):
            return self._lists[raw]
        value = orjson.loads(raw)
        return self._add(raw, value) if isinstance(value, list) else value

    def _has(self, key: bytes) -> bool:
        if key not in self._lists:
            return False
        self._lists.move_to_end(key)
        return True

    def _add(self, key: bytes, given: list[Any]) -> list[Any]:
        if len(key) > self._keep:
            return given
        known = self._lists[key] = Tools(given)
        self._size += len(key)
        while self._size > self._keep:
            self._size -= len(self._lists.popitem(last=False)[0])
        return known
