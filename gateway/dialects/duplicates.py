"""Keys that stand twice in one JSON object. Which of the two counts, every parser decides for itself: what a policy read here
would then not be what the upstream reads in the same bytes.

Looked for where a policy reads: at the top of a body and in the objects of ALSO_IN. What stands twice inside a message or a
tool is the client's own prompt; it passes as it came.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from gateway.errors import Refusal
from gateway.policy.thinking import ROOTS

Spans = Mapping[str, msgspec.Raw]

ALSO_IN = ROOTS | {"stream_options", "tool_choice", "metadata", "moorage"}

# Up to here looking for each key is faster than walking.
SHORT = 4096

# A key that is found as it is cannot stand elsewhere in another spelling without one of these.
_RESPELLED = re.compile(rb"\\[u/]")
_KEY = re.compile(rb'\s*"(?:[^"\\]|\\.)*"\s*:\s*', re.S)
_COMMA = re.compile(rb"\s*,")
_spans = msgspec.json.Decoder(dict[str, msgspec.Raw])


def refuse(raw: bytes, spans: Spans) -> None:
    """Raise Refusal (400) when a key that a policy may read stands twice. `spans` are the values of the object `raw`, by key."""
    if _twice(raw, spans):
        raise _refusal("the request body")
    for name in spans:
        if name in ALSO_IN:
            _refuse_inside(bytes(spans[name]), f"`{name}`")


def _refuse_inside(raw: bytes, where: str) -> None:
    if not raw.startswith(b"{"):
        return
    spans = _spans.decode(raw)
    if _twice(raw, spans):
        raise _refusal(where)
    for value in spans.values():
        _refuse_inside(bytes(value), where)


def _refusal(where: str) -> Refusal:
    return Refusal(400, f"A key stands twice in {where}", "Send every key once", code="invalid_json")


def _twice(raw: bytes, spans: Spans) -> bool:
    """Walk along the object: with every key once, its values stand there as the decoder gave them, in this order, to the end.

    Of a key that stands twice the decoder keeps the last value, so either a value is not the one expected, or values are left.
    """
    if len(raw) <= SHORT and not _RESPELLED.search(raw) and all([raw.count(b'"%s"' % key.encode()) == 1 for key in spans]):
        return False  # nowhere else in the text, in these or in other characters
    if len(raw) == 1 + sum(len(key) + 4 + len(memoryview(value)) for key, value in spans.items()):
        return False  # no room for more, not even for white space; keys are as long as this at least
    at = raw.index(b"{") + 1
    for number, value in enumerate(spans.values()):
        if number:
            if (comma := _COMMA.match(raw, at)) is None:
                return True
            at = comma.end()
        key = _KEY.match(raw, at)
        if key is None or not raw.startswith(value, key.end()):
            return True
        at = key.end() + len(memoryview(value))
    return raw[at:].strip() != b"}"
