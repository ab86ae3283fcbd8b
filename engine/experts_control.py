"""The bodies of `/v1/experts/...` -> calls on the executor. Owns their fields and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.cache_control import BadCommand
from engine.experts.executor import TieredExperts
from engine.experts.grouped import GroupedExperts
from engine.experts.recording import Recording


@dataclass(frozen=True)
class ExpertParts:
    """The running engine's experts: its recorder, and where they lie and why (as `/v1/experts/status` shows it)."""

    recording: Recording
    placement: dict[str, object]

    @property
    def slots(self) -> TieredExperts | GroupedExperts | None:
        """None: experts are computed where they lie."""
        inner = self.recording.inner
        return inner if isinstance(inner, TieredExperts | GroupedExperts) else None


ACTIONS = ("start", "progress", "stop")


def status(experts: ExpertParts | None) -> dict[str, object]:
    """Where experts lie, why, and what the executor counted. Raises BadCommand for a model without experts."""
    if experts is None:
        raise BadCommand("this model has no experts")
    slots = experts.slots
    return {**experts.placement, "slots": slots.status() if slots else None, "trace": experts.recording.progress()}


def record(experts: ExpertParts | None, options: dict[str, Any]) -> dict[str, object]:
    """`{"action": "start" | "progress" | "stop"}` of a routing trace. Raises BadCommand."""
    if experts is None:
        raise BadCommand("this model has no experts: there is no routing to record")
    action = options.get("action")
    if action not in ACTIONS or len(options) != 1:
        raise BadCommand(f"action must be {', '.join(ACTIONS)}, and nothing else is taken; got {options!r}")
    recording = experts.recording
    return {"start": recording.start, "progress": recording.progress, "stop": recording.stop}[action]()
