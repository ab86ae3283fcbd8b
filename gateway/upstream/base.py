"""What an upstream is, and the one place where a turn's body becomes the bytes an upstream gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.protocol import HINTS_FIELD
from gateway.config import Deployment
from gateway.edits import ABSENT, edits, render, splice
from gateway.policy import clamp, claude, thinking
from gateway.turn import Decision, Turn

# Error statuses after which another attempt, here or elsewhere, may go better.
RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
# Those with which one deployment speaks for itself alone: it does not take our key, or has no such model. Another may.
ELSEWHERE = frozenset({401, 403, 404})


# What a client may say to litellm. It would take any other field for a setting of its own: where a request goes (`api_base`,
# `proxy`), with which key, through which provider.
PROVIDER_FIELDS = clamp.KNOWN | {"input", "dimensions", "encoding_format"}


class Reply(Protocol):
    """An upstream's answer whose status was good. Must be closed; closing an unfinished one cancels the upstream's work."""

    status: int
    headers: Mapping[str, str]
    streamed: bool  # server-sent events follow; otherwise `whole` has the body

    @property
    def ended(self) -> bool:
        """What was read was the last of it. May be False when that is not known yet."""
        ...

    async def read(self, timeout: float) -> bytes:
        """Some bytes of the event stream, b"" at its end. Raises UpstreamError (timeout, died) after `timeout` s of silence."""
        ...

    async def whole(self, timeout: float) -> bytes:
        """The complete body. Raises UpstreamError."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Health:
    """`state`: ready | loading | down. `detail` is the upstream's own health body, or the error with its remedy."""

    state: str
    detail: Any = None


class Upstream(Protocol):
    async def send(self, turn: Turn, deployment: Deployment, body: bytes) -> Reply:
        """Send a prepared request; returns once the answer's head is there. Raises UpstreamError, also for error statuses."""
        ...

    async def tokenize(self, deployment: Deployment, body: bytes) -> int | None:
        """The number of tokens of a chat body's messages and tools; None when this upstream cannot say. Never raises."""
        ...

    async def health(self, deployment: Deployment) -> Health: ...

    async def models(self, deployment: Deployment) -> list[dict[str, Any]]:
        """What the deployment itself lists under /v1/models; empty if it does not say."""
        ...

    async def close(self) -> None: ...


_hints = msgspec.json.Encoder()


def prepare(turn: Turn, deployment: Deployment) -> tuple[Turn, bytes]:
    """What one deployment is sent: the turn with the decisions that only this deployment needs, and the body's bytes.

    Everything no decision touched keeps the bytes it came in. Hints go to our engine and to nobody else.
    """
    body = turn.body
    notes = []
    name = deployment.upstream_model(turn.model)
    if name and name != body.get("model"):
        notes.append(Decision("route", "model", deployment.name, edits(body, (("model",), name))))
    for key, value in deployment.defaults.items():
        if body.get(key) is None or (deployment.kind == "provider" and key not in PROVIDER_FIELDS):
            notes.append(Decision("route", "default", deployment.name, edits(body, ((key,), value))))
    if deployment.kind == "provider":
        notes += _only_known(body, deployment)
    if HINTS_FIELD in body:
        notes.append(Decision("route", "hints", "hints are the gateway's to give", edits(body, ((HINTS_FIELD,), ABSENT))))
    if "messages" in body:
        notes += thinking.spell(body, turn.thinking, thinking.form_of(deployment))
        notes += claude.mark(body, turn.breakpoints) if claude.is_claude(deployment) else ()
        notes += claude.unsigned(body) if deployment.kind != "provider" else ()
    turn = turn.decide(*notes)
    data = render(turn.raw, turn.parsed, turn.body)
    if deployment.kind == "engine" and "messages" in body:
        data = splice(data, HINTS_FIELD, _hints.encode(turn.hints))
    return turn, data


def _only_known(body: Mapping[str, Any], deployment: Deployment) -> tuple[Decision, ...]:
    """Fields left out that would steer litellm; those that the deployment itself sets are its own values by now."""
    strange = [k for k in body if k not in PROVIDER_FIELDS and k not in deployment.defaults and k != HINTS_FIELD]
    if not strange:
        return ()
    reason = f"{', '.join(k[:40] for k in strange[:10])}: fields a provider's library would take for its own settings"
    return (Decision("route", "provider_fields", reason, edits(body, *(((k,), ABSENT) for k in strange))),)
