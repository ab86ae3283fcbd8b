"""A command's arguments without typer's help, where they are simple: it imports pydantic to convert them, 0.15 s of a start.

What a command takes is what typer is told: the function's own parameters. Help, mistakes and all that is unusual are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from typer.models import ArgumentInfo


def plain(function: Callable[..., object], words: Sequence[str]) -> dict[str, Any] | None:
    """The keywords that `MODEL --option VALUE ...` means for `function`; None where typer has to look."""
    options, places = {}, []
    for name, hint in get_type_hints(function, include_extras=True).items():
        if info := next(iter(getattr(hint, "__metadata__", ())), None):
            found = (name, hint.__origin__, info)
            if isinstance(info, ArgumentInfo):
                places.append(found)
            else:
                options[f"--{name.replace('_', '-')}"] = found
    values: dict[str, Any] = {}
    left = iter(words)
    for word in left:
        if word.startswith("-"):
            found, text = options.get(word), next(left, "-")
        else:
            found, text = places.pop(0) if places else None, word
        if found is None or found[0] in values or text.startswith("-"):
            return None
        value = _converted(text, *found[1:])
        if value is None:
            return None
        values[found[0]] = value
    return None if places else values


def _converted(text: str, kind: type, info: Any) -> Any:
    if kind is str:
        return text
    if kind is not int or not (text.isascii() and text.isdecimal()):
        return None
    number = int(text)
    fits = (info.min is None or number >= info.min) and (info.max is None or number <= info.max)
    return number if fits else None
