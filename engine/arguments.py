"""A command's arguments without typer, where they are simple: importing it, and pydantic for it, takes 0.2 s of a start.

What a command takes is what typer is told: the function's own parameters. Help, mistakes and all that is unusual are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Annotated, Any, get_type_hints


@dataclass(frozen=True)
class Argument:
    """As typer's."""

    help: str


@dataclass(frozen=True)
class Option:
    """As typer's; `min` and `max` of a number."""

    help: str
    min: int | None = None
    max: int | None = None


def typed(function: FunctionType) -> Callable[..., None]:
    """`function` as typer takes it."""
    import typer

    told = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    told.__doc__ = function.__doc__
    for name, hint in get_type_hints(function, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            made = {Argument: typer.Argument, Option: typer.Option}[type(info)](**asdict(info))
            told.__annotations__[name] = Annotated[hint.__origin__, made]
    return told


def plain(function: Callable[..., object], words: Sequence[str]) -> dict[str, Any] | None:
    """The keywords that `MODEL --option VALUE ...` means for `function`; None where typer has to look."""
    options, places = {}, []
    for name, hint in get_type_hints(function, include_extras=True).items():
        if info := next(iter(getattr(hint, "__metadata__", ())), None):
            found = (name, hint.__origin__, info)
            if isinstance(info, Argument):
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
