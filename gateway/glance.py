"""A glance at a block of events: what the record wants to know of each, decoded in one call and nothing else built.

It knows the shape that every engine sends. Whatever has another one gives None, and `sse.parse` reads it as tolerantly as ever;
both must see the same (tests/gateway/test_sse.py).
"""

from __future__ import annotations

from typing import Any

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

DONE = b"data: [DONE]\n\n"

# `gc=False`: nothing in an event leads back to it, and a stream has hundreds for the collector to look through.


class Delta(Struct, forbid_unknown_fields=True, gc=False):
    """All fields that engines put into a delta; whoever finds one of these knows that there is nothing else in it."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    text: str | None = None
    tool_calls: list[Any] | None = None


class Choice(Delta, forbid_unknown_fields=False, gc=False):
    """/v1/completions has its text here, without a delta. Beside what is read there are logprobs and the like."""

    index: int = 0
    delta: Delta | None = None
    finish_reason: str | None = None


class Event(Struct, gc=False):
    id: str | None = None
    choices: list[Choice] = []
    usage: dict[str, Any] | None = None


_events = Decoder(list[Event])


def events(block: bytes) -> list[Event] | None:
    """The events of a block of whole `data: {...}` events without [DONE], None when it holds anything else."""
    if not block:
        return []
    if not (block.startswith(b"data: {") and block.endswith(b"}\n\n")):
        return None
    parts = block[6:-2].split(b"\n\ndata: ")  # no JSON text has a bare newline inside a string
    if block.count(b"\n\n") != len(parts):
        return None
    try:
        found = _events.decode(b"[%s]" % b",".join(parts))
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if len(found) == len(parts) else None


def without_done(block: bytes) -> tuple[bytes, bool] | None:
    """(the block without a [DONE] at its end, whether it had one); None when [DONE] stands anywhere else."""
    if b"[DONE]" not in block:
        return block, False
    rest = block[: -len(DONE)]
    return (rest, True) if block.endswith(DONE) and b"[DONE]" not in rest else None
