"""Grammars of tool calls: JSON in tags (Hermes, Qwen3), XML (Qwen3-Coder, Qwen3.5), GLM's key/value tags, Mistral, bare JSON.

Each grammar consumes one call and reports it through a `Call`. Before the name is known a grammar raises `Malformed` and its
text becomes plain text again; after that the call exists for the client, so its text is passed on whatever it is, and
`broken` says that it is no valid JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

from engine.text.stream import Grammar, Malformed, Markers, Source
from engine.text.strict_json import loads

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[^\s,\]}\[{\":]+")
MAX_NAME = 256  # a longer "name" is text that happens to look like a call


class Call:
    """One call on its way to the client: `start` once, then `write(text)`; afterwards `broken` and `repaired` hold.

    `only` = names that may be called: without tags, any JSON object with a name would look like a call.
    """

    def __init__(
        self,
        start: Callable[[str], None],
        write: Callable[[str], None],
        schemas: Mapping[str, dict[str, Any]],
        only: Container[str] | None = None,
    ) -> None:
        self._start, self._write, self._schemas, self._only = start, write, schemas, only
        self.name = ""
        self.started = False
        self.text: list[str] = []
        self.repaired = 0
        self.broken = False
        self.stray: list[str] = []  # text inside the call that belongs to no part of it
        self.raw_tail = False  # the rest of the call's text belongs to the arguments

    def named(self, name: str) -> None:
        """The name is known. Raises Malformed if it cannot be one."""
        if not name or len(name) > MAX_NAME or "\n" in name or (self._only is not None and name not in self._only):
            raise Malformed
        self.name = name

    def write(self, text: str) -> None:
        """Arguments text; the first of it starts the call."""
        if not self.started:
            self.started = True
            self._start(self.name)
        self.text.append(text)
        self._write(text)

    def kinds(self, parameter: str) -> frozenset[str]:
        """JSON types the tool's schema allows for a parameter; empty when it does not say."""
        schema = self._schemas.get(self.name, {}).get(parameter)
        return frozenset(_kinds(schema)) if isinstance(schema, dict) else frozenset()


def _kinds(schema: dict[str, Any]) -> set[str]:
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else {k for k in kind if isinstance(k, str)} if isinstance(kind, list) else set()
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or []:
            found |= _kinds(option) if isinstance(option, dict) else set()
    values = schema.get("enum")
    if not found and isinstance(values, list) and all(isinstance(v, str) for v in values):
        found = {"string"}
    return found


# --- JSON


def json_call(src: Source, call: Call) -> Grammar[None]:
    """`{"name": "x", "arguments": {...}}`. Arguments stream when the name came first; else they follow at the end."""
    if (yield from src.skip_space()) != "{":
        raise Malformed
    src.take(1)
    pending: str | None = None
    while (char := (yield from src.skip_space())) != "}":
        if char == ",":
            src.take(1)
            continue
        if char != '"':
            raise Malformed
        key = yield from _collect_string(src)
        if (yield from src.skip_space()) != ":":
            raise Malformed
        src.take(1)
        char = yield from src.skip_space()
        if key == "function" and char == "{" and not call.name:
            yield from json_call(src, call)
        elif key in ("name", "function") and char == '"' and not call.name:
            call.named((yield from _collect_string(src)))
        elif key in _ARGUMENT_KEYS and char == "{" and call.name and not call.started:
            yield from _object(src, call)
            if call.broken:
                return
        elif key in _ARGUMENT_KEYS and not call.started:
            pending = yield from _collect_value(src, call)
        else:
            yield from _collect_value(src, call)
    src.take(1)
    if not call.name:
        raise Malformed
    if not call.started:
        call.broken = pending is not None and not pending.startswith("{")
        call.write("{}" if pending is None else pending)


_ARGUMENT_KEYS = ("arguments", "parameters", "args")


def named_call(src: Source, call: Call, separator: str) -> Grammar[None]:
    """`name[ARGS]{...}`: the name, then the arguments object."""
    name: list[str] = []
    marker = yield from src.until(Markers([separator, "{"]), name.append)
    if not marker:
        raise Malformed
    if marker == "{":
        src.put_back(marker)
    call.named("".join(name).strip())
    if (yield from src.skip_space()) != "{":
        raise Malformed
    yield from _object(src, call)


def _collect_string(src: Source) -> Grammar[str]:
    """A JSON string literal -> its value."""
    out: list[str] = []
    yield from _string(src, out.append)
    try:
        return loads("".join(out))
    except ValueError:
        raise Malformed from None


def _string(src: Source, emit: Callable[[str], None]) -> Grammar[int]:
    """Copy a string literal. Control characters inside (models write raw newlines) come out escaped; returns how many."""
    emit(src.take(1))
    repaired = 0
    while True:
        char = yield from src.peek()
        if not char:
            raise Malformed
        if char == '"':
            emit(src.take(1))
            return repaired
        if char == "\\":
            if not (yield from src.need(2)):
                raise Malformed
            emit(src.take(2))
        elif char < " ":
            emit(json.dumps(src.take(1))[1:-1])
            repaired += 1
        else:
            emit(src.take(_IN_STRING.match(src.buffer, src.at).end() - src.at))


def _scan_value(src: Source, emit: Callable[[str], None], call: Call) -> Grammar[None]:
    """Copy one JSON value. Raises Malformed where the structure breaks; scalars are judged by the final parse."""
    closing: list[str] = []
    while True:
        char = yield from src.skip_space(emit if closing else None)
        if not char:
            raise Malformed
        if char in "{[":
            closing.append("}" if char == "{" else "]")
            emit(src.take(1))
        elif char in "}]":
            if not closing or closing.pop() != char:
                raise Malformed
            emit(src.take(1))
        elif char == '"':
            call.repaired += yield from _string(src, emit)
        elif char in ",:":
            if not closing:
                raise Malformed
            emit(src.take(1))
        else:
            scalar = _SCALAR.match(src.buffer, src.at)
            if not scalar or "<" in scalar[0]:
                raise Malformed
            if scalar.end() == len(src.buffer) and not src.ended:
                yield  # the scalar may go on
                continue
            emit(src.take(len(scalar[0])))
        if not closing:
            return


def _object(src: Source, call: Call) -> Grammar[None]:
    """Stream an arguments object. A broken one is passed on up to the end of the call and marked."""
    try:
        yield from _scan_value(src, call.write, call)
    except Malformed:
        call.broken = call.raw_tail = True
        return
    try:
        loads("".join(call.text))
    except ValueError:
        call.broken = True


def _collect_value(src: Source, call: Call) -> Grammar[str]:
    """A value -> compact text of an object: a string holding JSON is unpacked, anything that is no object stays as it is."""
    out: list[str] = []
    yield from _scan_value(src, out.append, call)
    text = "".join(out)
    try:
        value = loads(text)
        inner = loads(value) if isinstance(value, str) else value
    except ValueError:
        return text
    if inner is None:
        return "{}"
    return text if inner is value else value


# --- XML (Qwen3-Coder, Qwen3.5)

FUNCTION, PARAMETER, PARAMETER_END, FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"
_GT = Markers([">"])
_VALUE_END = Markers([PARAMETER_END, FUNCTION_END])


def xml_call(src: Source, call: Call, close: str) -> Grammar[None]:
    """`<function=x>` was consumed up to the `=`; parameters follow as `<parameter=key>\\nvalue\\n</parameter>`."""
    call.named((yield from _tag_name(src)))
    first = True
    while True:
        char = yield from src.skip_space()
        if (yield from src.starts(FUNCTION_END)):
            src.take(len(FUNCTION_END))
            break
        if not char or (yield from src.starts(close)):
            call.broken = True  # cut off, or closed without </function>
            break
        if not (yield from src.starts(PARAMETER)):
            call.broken = True
            break
        src.take(len(PARAMETER))
        try:
            key = yield from _tag_name(src, call.stray)
            call.stray.clear()
        except Malformed:
            call.broken = True
            break
        call.write(("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        first = False
        yield from _xml_value(src, call, key, close)
    call.write("{}" if first else "}")


def _tag_name(src: Source, out: list[str] | None = None) -> Grammar[str]:
    """Up to the `>`. Raises Malformed when it never comes; `out` then holds what there was."""
    out = [] if out is None else out
    if not (yield from src.until(_GT, out.append)):
        raise Malformed
    return "".join(out).strip().strip("\"'")


def _xml_value(src: Source, call: Call, key: str, close: str) -> Grammar[None]:
    """The text up to a `</parameter>` that is followed by another parameter or the end of the function."""
    kinds = call.kinds(key)
    writer = _ValueWriter(call, streaming=kinds == {"string"})
    if (yield from src.peek()) == "\n":
        src.take(1)
    while True:
        marker = yield from src.until(_VALUE_END, writer.add)
        if not marker:
            call.broken = True
            break
        if marker == PARAMETER_END and (yield from _ends_value(src, close)):
            break
        if marker == FUNCTION_END and (yield from _after_space(src, (close,))):
            src.put_back(FUNCTION_END)  # it ends the call, too
            break
        writer.add(marker)
    writer.end(kinds)


def _ends_value(src: Source, close: str) -> Grammar[bool]:
    return (yield from _after_space(src, (PARAMETER, FUNCTION_END, close)))


def _after_space(src: Source, literals: tuple[str, ...]) -> Grammar[bool]:
    """Whether one of `literals` (or the end of the text) follows behind whitespace. Consumes nothing."""
    while True:
        rest = src.buffer[src.at :].lstrip()
        if any(rest.startswith(x) for x in literals):
            return True
        undecided = any(x.startswith(rest) for x in literals)
        if not undecided:
            return False
        if src.ended:
            return not rest
        yield


class _ValueWriter:
    """Turns a parameter's text into JSON: a string streams escaped, other kinds wait for the whole text."""

    def __init__(self, call: Call, streaming: bool) -> None:
        self._call, self._streaming, self._parts, self._kept = call, streaming, [], ""
        if streaming:
            call.write('"')

    def add(self, text: str) -> None:
        if not self._streaming:
            self._parts.append(text)
            return
        text = self._kept + text
        self._kept = "\n" if text.endswith("\n") else ""  # the newline before </parameter> is no part of the value
        text = text[:-1] if self._kept else text
        if text:
            self._call.write(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self, kinds: frozenset[str]) -> None:
        if self._streaming:
            self._call.write('"')
            return
        text = "".join(self._parts)
        text = text[:-1] if text.endswith("\n") else text
        self._call.write(json.dumps(typed_value(text, kinds), ensure_ascii=False))


_PYTHON_WORDS = {"True": True, "False": False, "None": None}  # templates render scalars with Python's str()


def typed_value(text: str, kinds: frozenset[str]) -> Any:
    """Text of a parameter -> value of one of the JSON types its schema allows; text when none fits."""
    if kinds == {"string"}:
        return text
    stripped = text.strip()
    if stripped in _PYTHON_WORDS:
        value: Any = _PYTHON_WORDS[stripped]
    else:
        try:
            value = loads(stripped)
        except ValueError:
            return text
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    kind = names[type(value)]
    allowed = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    if isinstance(value, str) or not allowed:
        return text
    return value


# --- GLM: name, then <arg_key>k</arg_key><arg_value>v</arg_value> pairs

_ARG = tuple(Markers([t]) for t in ("</arg_key>", "<arg_value>", "</arg_value>"))


def glm_call(src: Source, call: Call, close: str) -> Grammar[None]:
    out: list[str] = []
    marker = yield from src.until(Markers(["<arg_key>", close]), out.append)
    if not marker or "{" in "".join(out):
        raise Malformed
    call.named("".join(out).strip())
    first = True
    while marker == "<arg_key>":
        key: list[str] = []
        value: list[str] = []
        if not (yield from src.until(_ARG[0], key.append)) or not (yield from src.until(_ARG[1], call.stray.append)):
            call.broken = True
            call.stray.insert(0, "".join(key))
            break
        call.broken |= not (yield from src.until(_ARG[2], value.append))
        text = typed_value("".join(value), call.kinds("".join(key).strip()))
        pair = f"{json.dumps(''.join(key).strip(), ensure_ascii=False)}: {json.dumps(text, ensure_ascii=False)}"
        call.write(("{" if first else ", ") + pair)
        first = False
        marker = yield from src.until(Markers(["<arg_key>", close]), call.stray.append)
    call.write("{}" if first else "}")
    if marker == close:
        src.put_back(close)
