"""Changing a JSON body without disturbing the rest of it.

`Edit` is one change at one path. `apply` is copy-on-write: whatever an edit does not touch stays the same Python object.
`render` uses exactly that: every subtree that is still the same object goes out as the very bytes the client sent, so key
order, spacing, escapes and number spelling of unchanged parts survive, and with them the prefix caches behind us.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import orjson

from gateway.tools import Tools

Path = tuple[str | int, ...]


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()


class Edit(msgspec.Struct, frozen=True):
    """`path` goes from `before` to `after`. ABSENT before = it was added; ABSENT after = it was dropped."""

    path: Path
    before: Any
    after: Any


def look(body: Any, path: Path) -> Any:
    """The value at `path`, or ABSENT."""
    for step in path:
        if isinstance(step, str):
            body = body.get(step, ABSENT) if isinstance(body, dict) else ABSENT
        else:
            body = body[step] if isinstance(body, list) and -len(body) <= step < len(body) else ABSENT
        if body is ABSENT:
            return ABSENT
    return body


def change(body: Any, path: Path, after: Any) -> Edit | None:
    """The Edit that brings `path` to `after`, or None when it is there already."""
    before = look(body, path)
    same = before is after or (before is not ABSENT and after is not ABSENT and type(before) is type(after) and before == after)
    return None if same else Edit(path, before, after)


def edits(body: Any, *wanted: tuple[Path, Any]) -> tuple[Edit, ...]:
    """`change` for several (path, after) pairs of independent paths; those already in place are left out."""
    return tuple(e for path, after in wanted if (e := change(body, path, after)))


def apply(body: Any, changes: Iterable[Edit]) -> Any:
    """`body` with `changes` made in order. Missing parent objects are created; list index len(list) appends."""
    for edit in changes:
        body = _put(body, edit.path, edit.after)
    return body


def _put(node: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, str):
        fresh = dict(node) if isinstance(node, dict) else {}
        if not rest and value is ABSENT:
            fresh.pop(step, None)
        else:
            fresh[step] = _put(fresh.get(step), rest, value)
        return fresh
    fresh = list(node) if isinstance(node, list) else []
    if not rest and value is ABSENT:
        del fresh[step]
    elif step == len(fresh):
        fresh.append(_put(None, rest, value))
    else:
        fresh[step] = _put(fresh[step], rest, value)
    return fresh


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


def render(raw: bytes, before: Any, after: Any) -> bytes:
    """The bytes of `after`, where `before` is the parse of `raw` and `after` came from it through `apply`.

    Unchanged subtrees keep their bytes, also when a list was reordered. Raises TypeError when `after` holds no JSON value.
    """
    if after is before:
        return bytes(raw)
    if isinstance(before, dict) and isinstance(after, dict):
        spans = _object.decode(raw)
        parts = []
        for key, value in after.items():
            old = before.get(key, ABSENT)
            text = orjson.dumps(value) if old is ABSENT else render(spans[key], old, value)
            parts.append(orjson.dumps(key) + b":" + text)
        return b"{" + b",".join(parts) + b"}"
    if isinstance(before, list) and isinstance(after, list):
        return _rendered_tools(bytes(raw), before, after) if isinstance(after, Tools) else _rendered_list(raw, before, after)
    return orjson.dumps(after)


def _rendered_tools(raw: bytes, before: list[Any], after: Tools) -> bytes:
    """An agent's tools come in the same bytes every time; what they were sent as the last time is kept beside them."""
    last = after.memo.get("rendered")
    if last is None or last[0] is not before or last[1] != raw:
        last = after.memo["rendered"] = before, raw, _rendered_list(raw, before, after)
    return last[2]


def _rendered_list(raw: bytes, before: list[Any], after: list[Any]) -> bytes:
    spans = _array.decode(raw)
    known = {id(old): span for old, span in zip(before, spans, strict=True) if isinstance(old, (dict, list))}
    parts = []
    for at, value in enumerate(after):
        if (span := known.get(id(value))) is not None:
            parts.append(bytes(span))
        else:
            parts.append(render(spans[at], before[at], value) if at < len(before) else orjson.dumps(value))
    return b"[" + b",".join(parts) + b"]"


def splice(raw: bytes, key: str, value: bytes) -> bytes:
    """The object `raw` with `"key":value` added at its end, every other byte kept. The key must not be in it yet."""
    end = len(raw.rstrip()) - 1  # of what is kept: the last brace comes anew
    while raw[end - 1 : end].isspace():
        end -= 1
    comma = b"" if raw[end - 1 : end] == b"{" else b","
    return b"".join((memoryview(raw)[:end], comma, orjson.dumps(key), b":", value, b"}"))
