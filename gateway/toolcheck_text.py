"""Tool calls that an upstream left as text: found in a stream of content, read as name and arguments.

Two spellings are known, both between `<tool_call>` and `</tool_call>`: a JSON object with name and arguments (Hermes, Qwen), and
`<function=NAME><parameter=KEY>value</parameter></function>` (Qwen3-Coder).
"""

from __future__ import annotations

import re

import orjson

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.S)


class Spoken:
    """Content in, (content, finished call texts) out. Text that may yet be the beginning of a call is held back."""

    __slots__ = ("_held", "_inside")

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    @property
    def holding(self) -> bool:
        return bool(self._held) or self._inside

    def feed(self, text: str) -> tuple[str, list[str]]:
        self._held += text
        out, calls = "", []
        while True:
            if self._inside:
                call, closed, rest = self._held.partition(CLOSE)
                if not closed:
                    return out, calls
                calls.append(call)
                self._inside, self._held = False, rest
            else:
                before, opened, rest = self._held.partition(OPEN)
                if opened:
                    out += before
                    self._inside, self._held = True, rest
                    continue
                keep = next((n for n in range(min(len(OPEN) - 1, len(before)), 0, -1) if OPEN.startswith(before[-n:])), 0)
                self._held = before[len(before) - keep :]
                return out + before[: len(before) - keep], calls

    def flush(self) -> tuple[str, str]:
        """The stream ended: (held content, text of a call that was never closed)."""
        held, inside = self._held, self._inside
        self._held, self._inside = "", False
        return ("", held) if inside else (held, "")


def calls_in(text: str) -> list[str]:
    """The finished calls of a whole text."""
    return Spoken().feed(text)[1]


def read_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of one call's text, None if it is no call. Arguments may still be broken."""
    function = _FUNCTION.search(text)
    if function:
        values = {key: value for key, value in _PARAMETER.findall(function[2])}
        return function[1], orjson.dumps(values).decode()
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return value["name"], arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
