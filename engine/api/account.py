"""Counters and log lines of what happened to a request. Everything ignored, clamped, leaked or repaired passes through here."""

from __future__ import annotations

import logging
from typing import Any

from engine.api.answer import Choice
from engine.api.plan import Notes
from engine.api.service import Service
from engine.protocol import log_line

log = logging.getLogger("moorage.api")


def planned(service: Service, notes: Notes, dropped_anchors: int = 0) -> None:
    m = service.metrics
    for counter, fields in ((m.ignored, notes.ignored), (m.clamped, notes.clamped), (m.not_enforced, notes.not_enforced)):
        for name in fields:
            counter.labels(service.label(name.split("=")[0])).inc()
    service.tell_once("request field ignored", notes.ignored)
    service.tell_once("request field clamped", [n.split("=")[0] for n in notes.clamped])
    service.tell_once("request field not enforced", notes.not_enforced)
    if notes.history_repaired:
        m.tool_calls.labels("history_repaired").inc(notes.history_repaired)
        log.warning("%s", log_line("tool arguments in the history are no JSON object", calls=notes.history_repaired))
    if dropped_anchors:
        m.dropped_anchors.inc(dropped_anchors)


def usage(service: Service, usage: dict[str, Any]) -> None:
    m = service.metrics
    m.prompt_tokens.inc(usage["prompt_tokens"])
    m.completion_tokens.inc(usage["completion_tokens"])
    m.cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])
    m.reasoning_tokens.inc(usage["completion_tokens_details"]["reasoning_tokens"])
    m.lost_tokens.inc(max(usage["moorage"]["lost"], 0))


def ended(service: Service, choice: Choice, request: str, thinking_off: bool) -> None:
    m = service.metrics
    m.finished.labels(choice.finish).inc()
    if choice.parser is None:
        return
    found = choice.parser.findings
    if thinking_off and choice.parser.thought_seen:
        m.thinking_leaks.inc()
        log.warning("%s", log_line("thinking leaked although it was off", req=request, tokens=choice.reasoning_tokens))
    broken = found.broken if choice.finish != "length" else 0  # a call cut by the limit is no fault of the model
    counts = {
        "ok": choice.parser.calls - found.broken,
        "malformed": found.malformed,
        "broken": broken,
        "repaired": found.repaired,
        "in_thought": found.calls_in_thought,
    }
    for outcome, count in counts.items():
        if count > 0:
            m.tool_calls.labels(outcome).inc(count)
    if found.malformed or broken or found.repaired or found.calls_in_thought:
        log.warning("%s", log_line("tool call syntax", req=request, **{k: v for k, v in counts.items() if k != "ok"}))


def gone(service: Service, request: str) -> None:
    service.metrics.disconnects.inc()
    log.info("%s", log_line("client gone", req=request))
