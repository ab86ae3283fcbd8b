"""Text in prompts that changes from request to request without saying anything new, and with it the whole prefix behind it.

Nothing but patterns and pure functions on texts; what is done with what they find is `normalise`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

# An agent sends the same system prompt every time, and the patterns take a millisecond for 30,000 characters of it.
KEEP, REMEMBERED = 64, 64 << 10  # texts, and characters of one


@dataclass(frozen=True, slots=True)
class Kind:
    """`hints` are searched first, because most texts have none of them; `everywhere` = in user messages as well."""

    pattern: re.Pattern[str]
    hints: tuple[str, ...]
    everywhere: bool = False


_DAY = (
    r"\d{4}-\d{2}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{1,2}:\d{2}|(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d"
)

KINDS: dict[str, Kind] = {
    # The nonce with which Claude Code's requests are accounted for; a line or block of its own.
    "billing_header": Kind(re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n+|\Z)", re.M), ("x-anthropic-billing-header",)),
    # How much room is left, as some agents tell the model in every request: whole lines only.
    "token_counters": Kind(
        re.compile(
            r"(?:\A|\n+)[ \t]*(?:<total_tokens>[^<\n]*</total_tokens>|<system_warning>Token usage[^<\n]*</system_warning>)"
            r"[ \t]*(?=\n|\Z)"
        ),
        ("<total_tokens>", "<system_warning>Token usage"),
        everywhere=True,
    ),
    # A line with a word for the time and a date or a time of day in it.
    "clock": Kind(
        re.compile(
            rf"^(?=[^\n]*\b(?:date|time|clock|today|now|timestamp)\b)(?=[^\n]*(?:{_DAY}))[^\n]{{1,300}}(?:\n|\Z)",
            re.M | re.I,
        ),
        (":", "/", "-", "."),
    ),
    # What agents say of the machine and the repository.
    "environment": Kind(
        re.compile(r"<(env|environment|environment_context|environment_details|git_status)>.*?</\1>(?:\n|\Z)", re.S),
        ("<env", "<git_status>"),
    ),
}


def may_hold(text: str, kind: str) -> bool:
    """Quickly: can there be something of this kind in the text?"""
    return any([hint in text for hint in KINDS[kind].hints])


def cut(text: str, kind: str) -> tuple[str, tuple[str, ...]]:
    """(`text` without what is volatile in it, what was found)."""
    if not may_hold(text, kind):
        return text, ()
    return _cut(text, kind) if len(text) <= REMEMBERED else _cut.__wrapped__(text, kind)


@lru_cache(KEEP)
def _cut(text: str, kind: str) -> tuple[str, tuple[str, ...]]:
    known = KINDS[kind]
    found = tuple(m[0] for m in known.pattern.finditer(text))
    if not found:
        return text, ()
    rest = known.pattern.sub("", text)
    return rest.lstrip("\n") if text.startswith(found[0]) else rest, found


def stable(text: str) -> str:
    """What of a text is the same in every request."""
    for kind in KINDS:
        text = cut(text, kind)[0]
    return text


def put(text: str, kind: str, values: tuple[str, ...]) -> str:
    """`text` with other values where it has volatile ones; as many as `cut` found."""
    fresh: Iterator[str] = iter(values)
    return KINDS[kind].pattern.sub(lambda m: next(fresh), text)
