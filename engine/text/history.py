"""Remembers the exact argument text of tool calls we sent, so that history renders to the tokens that were sampled.

Clients re-serialise arguments (key order, spaces, escapes). When a call comes back with a known id and the same value, the
model's own object is rendered, in its own key order; a changed value is the client's edit and is rendered as sent. A call that is
not known, because the server was restarted since, gets the key order of its tool's schema: the grammar made the model write that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from engine.text.strict_json import loads

# 4096 calls of ~1 KB: several long agent sessions. Forgetting one costs prefix tokens, never correctness.
MAX_CALLS = 4096
MAX_BYTES = 32 << 20


class CallMemory:
    """Bounded LRU of call id -> arguments text."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, str] = OrderedDict()
        self._bytes = 0

    def remember(self, call_id: str, arguments: str) -> None:
        if call_id in self._calls:
            return
        self._calls[call_id] = arguments
        self._bytes += len(arguments)
        while len(self._calls) > MAX_CALLS or self._bytes > MAX_BYTES:
            _, old = self._calls.popitem(last=False)
            self._bytes -= len(old)

    def restore(self, call: dict[str, Any], tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """`call` with the model's own argument object, if it is the same value."""
        text = self._calls.get(call.get("id", ""))
        if text is None:
            return _as_sampled(call, tools)
        self._calls.move_to_end(call["id"])
        try:
            own = loads(text)
        except ValueError:
            return call
        function = call["function"]
        if not isinstance(own, dict) or not _same(own, function["arguments"]):
            return call
        return {**call, "function": {**function, "arguments": own}}


def _as_sampled(call: dict[str, Any], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    function = call["function"]
    schema = next((t["function"].get("parameters") for t in tools if t["function"]["name"] == function["name"]), None)
    if schema is None:
        return call
    return {**call, "function": {**function, "arguments": _ordered(function["arguments"], schema)}}


def _ordered(value: Any, schema: Any) -> Any:
    """`value` with the keys of its objects in the order of `schema`; those it does not name behind them."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        return [_ordered(each, schema.get("items")) for each in value]
    known = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(known, dict):
        return value
    keys = [*(k for k in known if k in value), *(k for k in value if k not in known)]
    return {key: _ordered(value[key], known.get(key)) for key in keys}


def _same(a: Any, b: Any) -> bool:
    """Equal JSON values. 2 and 2.0 are one number (JavaScript writes 2.0 back as 2); 1 and true are not, as in Python's `==`."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b
