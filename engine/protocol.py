"""Wire types shared by gateway and engine: hints in, usage and log lines out.

The gateway may import this module and nothing else of `engine`; it therefore imports only msgspec and the standard library.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

import msgspec

AnchorKind = Literal["tools", "system", "user", "thinking", "tool_call", "tool_result", "turn", "client_breakpoint"]
Source = Literal["live", "ram", "disk", "none"]

HINTS_FIELD = "moorage"  # the request-body key that carries Hints; stripped before any upstream that is not ours


class AnchorHint(msgspec.Struct, frozen=True, kw_only=True):
    """A place where the agent may edit its context later: the `edge` of `messages[message]`.

    `message` -1 means the tools block, which stands before the first message. `weight` in [0, 1] is how likely the cut is.
    """

    message: int
    edge: Literal["start", "end"] = "end"
    kind: AnchorKind = "turn"
    weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5


class Hints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the gateway tells the engine about a request, under the body key `moorage`. Every field is optional."""

    session: str = ""
    agent: str = ""
    turn_class: str = ""  # first | user | tool_result | side
    anchors: tuple[AnchorHint, ...] = ()
    expect: tuple[str, ...] = ()  # edits seen from this agent before, e.g. "reasoning_stripped"
    # higher runs earlier; 0 interactive default, negative batch; below -99 is the engine's own background work
    priority: Annotated[int, msgspec.Meta(ge=-99, le=99)] = 0


class MoorageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage.moorage`: what was reused and why not more. Token counts; times in milliseconds.

    `lost` = longest common prefix with anything this session sent before, minus `common`. It should be 0.
    """

    prompt: int
    common: int
    new: int
    source: Source = "none"
    reason: str = ""
    anchor: str = ""
    lost: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    restore_ms: float = 0.0


_BARE = re.compile(r"[!#-<>-~]+")  # printable ASCII without space, quote and `=`


def log_line(event: str, **fields: object) -> str:
    """`log_line("kv cache hit", prompt=10, common=8)` -> `kv cache hit prompt=10 common=8`.

    Values with spaces, quotes, `=` or control characters are quoted JSON-style, so one event is always one line and a
    client-supplied session name cannot forge another event. Fields that are None are left out.
    """
    texts = {k: f"{v:.1f}" if isinstance(v, float) else str(v) for k, v in fields.items() if v is not None}
    if not (all(texts.values()) and _BARE.fullmatch("".join(texts.values()))):  # one look for all of them, which mostly are bare
        texts = {k: text if _BARE.fullmatch(text) else json.dumps(text) for k, text in texts.items()}
    return " ".join([event, *[f"{k}={text}" for k, text in texts.items()]])


_FIELD = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"=]+)(?:\s|$)')


def parse_log_line(line: str) -> tuple[str, dict[str, str]] | None:
    """Inverse of `log_line`. Text before `kv cache` (a logger's prefix) is ignored. None if the line is no such event."""
    start = line.find("kv cache ")
    if start < 0:
        return None
    rest = line[start:].rstrip()
    first = _FIELD.search(rest)
    event = rest[: first.start()].strip() if first else rest
    fields = {}
    for key, value in _FIELD.findall(rest):
        fields[key] = json.loads(value) if value.startswith('"') else value
    return event, fields
