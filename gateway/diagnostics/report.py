"""What a team's records say together: per agent and kind of turn, what was reused, how long the first token took, and why."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gateway.diagnostics.compare import REMEDIES
from gateway.diagnostics.reader import session
from gateway.diagnostics.why import UPSTREAM_CAUSES, why

# Sessions whose newest requests are remembered while reading, and how many of each: a side request (a title) must not hide the
# conversation it belongs to. A request is ~100 KB, so this bounds memory near 400 MB.
KEEP_SESSIONS = 1000
KEEP_REQUESTS = 4


@dataclass(slots=True)
class Row:
    """One agent's turns of one class. `first` maps an output channel to its first-token times in ms."""

    requests: int = 0
    failed: int = 0
    prompt: list[int] = field(default_factory=list)
    common: int = 0
    lost: int = 0
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    causes: Counter[str] = field(default_factory=Counter)
    cause_tokens: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)  # cause -> a request id to look at

    @property
    def reuse(self) -> float | None:
        """Share of prompt tokens that were reused."""
        total = sum(self.prompt)
        return self.common / total if total else None


def report(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Row]:
    """Rows by (agent, turn class), from records in the order they were written."""
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    known: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
    for record in records:
        id, who = session(record), record.get("session") or {}
        row = rows[str(who.get("agent") or "unknown"), str(who.get("turn_class") or "unknown")]
        earlier = known.setdefault(id, [])
        known.move_to_end(id)
        _add(row, record, earlier)
        earlier.append(record)
        del earlier[:-KEEP_REQUESTS]
        if len(known) > KEEP_SESSIONS:
            known.popitem(last=False)
    return dict(sorted(rows.items()))


def _add(row: Row, record: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
    row.requests += 1
    row.failed += record.get("outcome") != "ok"
    for name, channel in ((record.get("answer") or {}).get("channels") or {}).items():
        if isinstance(channel.get("first_ms"), int | float):
            row.first[name].append(channel["first_ms"])
    found = why(record, earlier)
    if found.prompt is not None and found.common is not None:
        row.prompt.append(found.prompt)
        row.common += found.common
    row.lost += found.lost or 0
    if found.cause and found.cause != "first":
        row.causes[found.cause] += 1
        row.cause_tokens[found.cause] += (found.prompt or 0) - (found.common or 0)
        row.example.setdefault(found.cause, found.id)


def as_data(rows: dict[tuple[str, str], Row]) -> list[dict[str, Any]]:
    """The report as plain data, for --json and for other programs."""
    return [
        {
            "agent": agent,
            "turn_class": turn_class,
            "requests": row.requests,
            "failed": row.failed,
            "prompt_p50": median(row.prompt) if row.prompt else None,
            "reuse": row.reuse,
            "lost": row.lost,
            "first_token_ms_p50": {name: median(times) for name, times in row.first.items()},
            "causes": [
                {"cause": c, "requests": n, "tokens": row.cause_tokens[c], "example": row.example[c], "remedy": remedy(c)}
                for c, n in row.causes.most_common()
            ],
        }
        for (agent, turn_class), row in rows.items()
    ]


def remedy(cause: str) -> str:
    return REMEDIES.get(cause) or UPSTREAM_CAUSES.get(cause, "")
