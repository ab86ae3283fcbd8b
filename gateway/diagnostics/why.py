"""Why did this request not reuse more? From records alone, for any upstream that reports cached tokens.

Two sources of evidence: what the upstream counted (and, from our engine, the reason it gave), and where the request departs
from the requests its session had sent before. The second says what could have been reused, the first what was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gateway.diagnostics.compare import Departure, compare, parts
from gateway.diagnostics.reader import body

# A page, the tail every engine recomputes, and the error of counting characters for tokens: below this nothing was lost.
SLACK_TOKENS = 192
SLACK_SHARE = 0.03

UPSTREAM_CAUSES = {
    "evicted": "The upstream dropped it: raise its cache budget (--kv-disk-space), or send fewer sessions at once",
    "memory_short": "The machine ran short of memory and the engine let go what it kept: free memory there, or give it --kv-disk",
    "no_checkpoint": "The engine had no state saved before the departure; it keeps one at every anchor it is told of",
    "expired": "The upstream forgot it between the two requests; a larger or a disk cache keeps it",
    "purged": "Somebody emptied the cache, or purged this session",
    "damaged": "The disk cache could not be written or read back; its log says why",
    "rerouted": "Another deployment answered than last time; switch on prefix affinity",
    "first": "Nothing of this session was sent before",
    "unknown": "The upstream does not report cached tokens; switch its usage report on",
    "": "",
}
# What our engine says -> the cause as named here.
ENGINE_REASONS = {
    "ram-full": "evicted",
    "state-budget": "evicted",
    "disk-cache-full": "evicted",
    "memory-short": "memory_short",
    "no-checkpoint": "no_checkpoint",
    "not-computed": "no_checkpoint",
    "ttl": "expired",
    "purged": "purged",
    "flushed": "purged",
    "damaged": "damaged",
    "store-failed": "damaged",
}


@dataclass(frozen=True, slots=True)
class Why:
    """The answer for one request. Token counts are the upstream's; `expected` and `lost` are estimates unless our engine said.

    `cause` is a kind of departure (`compare`) or an upstream's cause (UPSTREAM_CAUSES); "" = nothing was lost.
    """

    id: str
    prompt: int | None
    common: int | None
    expected: int | None
    lost: int | None
    cause: str
    remedy: str
    engine_reason: str = ""
    basis: str = ""  # id of the earlier request it is compared with
    age_s: float = 0.0  # how much earlier that one was
    departure: Departure | None = None


def why(record: dict[str, Any], earlier: Iterable[dict[str, Any]]) -> Why:
    """Explain one record by those of its session that came before it, in any order."""
    reuse = record.get("reuse") or {}
    prompt, common = reuse.get("prompt"), reuse.get("common")
    now = body(record)
    basis, found = _best(now, earlier) if now else (None, None)
    expected = round(prompt * found.kept / found.total) if found and found.total and isinstance(prompt, int) else None
    said = str(reuse.get("reason") or "")
    lost = reuse.get("lost")
    if not isinstance(lost, int):
        lost = max(0, expected - common) if expected is not None and isinstance(common, int) else None
    cause = _cause(record, basis, found, prompt, common, lost, said)
    remedy = UPSTREAM_CAUSES.get(cause, found.remedy if found else "")
    age = float(record.get("time") or 0) - float(basis.get("time") or 0) if basis else 0.0
    return Why(record["id"], prompt, common, expected, lost, cause, remedy, said, basis["id"] if basis else "", age, found)


def _best(now: dict[str, Any], earlier: Iterable[dict[str, Any]]) -> tuple[dict[str, Any] | None, Departure | None]:
    """The earlier request that shares most with this one; the newest of equals."""
    best: tuple[dict[str, Any] | None, Departure | None] = (None, None)
    for old in sorted(earlier, key=lambda r: r.get("time") or 0, reverse=True):
        before = body(old)
        if before is None or not old.get("attempts"):
            continue
        found = compare(before, now)
        if best[1] is None or found.kept > best[1].kept:
            best = old, found
    return best


def _cause(
    record: dict[str, Any],
    basis: dict[str, Any] | None,
    found: Departure | None,
    prompt: Any,
    common: Any,
    lost: int | None,
    said: str,
) -> str:
    if not isinstance(prompt, int) or not isinstance(common, int):
        return "unknown"
    if found is None or basis is None:
        return "first"
    slack = SLACK_TOKENS + SLACK_SHARE * prompt
    if found.kind not in ("append", "identical") and found.kept < 0.97 * _prompt_chars(basis, found):
        # The departure costs something in itself; whether the upstream lost more before it comes second.
        if lost is not None and lost > slack and said in ENGINE_REASONS:
            return ENGINE_REASONS[said]
        return found.kind
    if lost is None or lost <= slack:
        return ""
    if said in ENGINE_REASONS:
        return ENGINE_REASONS[said]
    if found.kind == "thinking_changed":
        return found.kind
    return "rerouted" if _deployment(record) != _deployment(basis) else "expired"


def _prompt_chars(basis: dict[str, Any], found: Departure) -> float:
    """Characters of the earlier prompt, all of which an appended request would have shared."""
    return float(sum(len(p.text) for p in parts(body(basis) or {}))) or found.total


def _deployment(record: dict[str, Any]) -> str:
    sent = record.get("sent")
    return str(sent.get("deployment") or "") if isinstance(sent, dict) else ""


def lines(answer: Why) -> list[str]:
    """The explanation for a terminal."""
    counts = {"prompt": answer.prompt, "common": answer.common, "expected": answer.expected, "lost": answer.lost}
    out = [f"{answer.id} " + " ".join(f"{k}={v}" for k, v in counts.items() if v is not None)]
    if answer.engine_reason:
        out.append(f"engine:  {answer.engine_reason}")
    if found := answer.departure:
        out.append(f"compared with {answer.basis}, {answer.age_s:.0f} s earlier, same session")
        if found.kind in ("append", "identical"):
            out.append("departs: nowhere; all of the earlier prompt is still in place")
        else:
            out.append(f"departs: {found.place}, character {found.offset} ({found.kind})")
            out += [f"before:  {found.before!r}", f"now:     {found.after!r}"]
    out.append(f"cause:   {answer.cause or 'none, everything that could be reused was'}")
    if answer.remedy:
        out.append(f"remedy:  {answer.remedy}")
    return out
