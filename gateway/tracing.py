"""OpenTelemetry spans by the GenAI semantic conventions: one per request, made when it is over. Off unless configured.

The span's name, kind and attributes are those of the conventions for inference (`chat MODEL`); what has no name there stands
under `moorage.`. No prompt, no answer, no tool argument ever goes into a span: records are the place for those. opentelemetry is
imported only when tracing is on, and a collector that is gone costs spans and never a request.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gateway.answer import Answer
from gateway.config import Deployment, Tracing
from gateway.records import reuse
from gateway.turn import Turn

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

OPERATIONS = {"completions": "text_completion", "embeddings": "embeddings"}
# Body parameter -> attribute, with the type the conventions give it.
PARAMETERS: dict[str, tuple[str, type]] = {
    "temperature": ("gen_ai.request.temperature", float),
    "top_p": ("gen_ai.request.top_p", float),
    "top_k": ("gen_ai.request.top_k", float),
    "frequency_penalty": ("gen_ai.request.frequency_penalty", float),
    "presence_penalty": ("gen_ai.request.presence_penalty", float),
    "max_completion_tokens": ("gen_ai.request.max_tokens", int),
    "max_tokens": ("gen_ai.request.max_tokens", int),
    "seed": ("gen_ai.request.seed", int),
}


class NoTracing(RuntimeError):
    """Tracing is configured and cannot be. `str()` is one line for the user."""


class Tracer:
    """An after-step. `observe` makes the span; the SDK's own thread exports it."""

    def __init__(self, settings: Tracing, exporter: SpanExporter | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        exporter = exporter or _otlp(settings)
        self._trace = trace
        self._parent = TraceContextTextMapPropagator().extract
        # A provider of our own: the process-wide one belongs to whoever embeds the gateway.
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: settings.service}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("moorage.gateway")

    def observe(self, turn: Turn, answer: Answer) -> None:
        """One finished turn. A client's `traceparent` header makes its span the parent."""
        began = int(turn.received.at * 1e9)
        ended = began + int(max(0.0, (answer.ended or time.perf_counter()) - answer.started) * 1e9)
        span = self._tracer.start_span(
            f"{operation(turn)} {turn.model}".strip(),
            context=self._parent(turn.received.headers),
            kind=self._trace.SpanKind.CLIENT,
            attributes=attributes(turn, answer),
            start_time=began,
        )
        for attempt in answer.attempts:
            if attempt.error is not None:
                at = began + int(max(0.0, attempt.at + attempt.seconds - answer.started) * 1e9)
                failed = {"moorage.deployment": attempt.deployment.name, "error.type": attempt.error.code}
                span.add_event("moorage.attempt_failed", failed, timestamp=at)
        if answer.outcome not in ("ok", "cancelled"):
            # Without its text: an upstream's message may quote the prompt.
            span.set_status(self._trace.StatusCode.ERROR, answer.error.code if answer.error else answer.outcome)
        span.end(end_time=ended)

    def close(self) -> None:
        """Export what is left; bounded by the exporter's own timeout."""
        self._provider.shutdown()


def require() -> None:
    """Is there what tracing needs? Asked before the server starts. Raises NoTracing."""
    for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise NoTracing(f"tracing is on and {name} is not installed. Install it with `pip install moorage[otel]`") from None


def _otlp(settings: Tracing) -> SpanExporter:
    """OTLP over HTTP. Without an endpoint of ours the SDK's own OTEL_EXPORTER_OTLP_* variables hold."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=settings.endpoint or None)


def operation(turn: Turn) -> str:
    return OPERATIONS.get(turn.dialect.name, "chat")


def attributes(turn: Turn, answer: Answer) -> dict[str, Any]:
    """A span's attributes. None of them holds what was said."""
    found = {"gen_ai.operation.name": operation(turn), "gen_ai.request.model": turn.model}
    found |= dict(_request(turn)) | dict(_response(answer)) | dict(_usage(answer.usage or {}))
    found |= _place(answer.attempts[-1].deployment if answer.attempts else None)
    found |= {
        "moorage.request_id": turn.id,
        "moorage.dialect": turn.dialect.name,
        "moorage.caller": turn.caller.key,
        "moorage.outcome": answer.outcome,
        "moorage.thinking": str(turn.thinking),
        "moorage.decisions": tuple(dict.fromkeys(f"{d.stage}.{d.rule}" for d in (*turn.decisions, *answer.decisions))),
    }
    return {k: v for k, v in found.items() if v not in ("", None, ())}


def _request(turn: Turn) -> Iterator[tuple[str, Any]]:
    if turn.session.id:
        yield "gen_ai.conversation.id", turn.session.id
    if turn.session.agent:
        yield "gen_ai.agent.name", turn.session.agent
    if turn.stream:
        yield "gen_ai.request.stream", True
    for name, (attribute, kind) in PARAMETERS.items():
        value = turn.body.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield attribute, kind(value)
    count = turn.body.get("n")
    if isinstance(count, int) and count not in (True, 1):
        yield "gen_ai.request.choice.count", count


def _response(answer: Answer) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.response.id", answer.upstream_id
    yield "gen_ai.response.finish_reasons", tuple(answer.finish[i] for i in sorted(answer.finish))
    if answer.first_byte:
        yield "gen_ai.response.time_to_first_chunk", max(0.0, answer.first_byte - answer.started)
    if answer.error is not None:
        yield "error.type", answer.error.code
    elif answer.outcome not in ("", "ok"):
        yield "error.type", answer.outcome


def _usage(usage: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    reused = reuse(dict(usage)) or {}
    details = usage.get("completion_tokens_details")
    counts = {
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": reused.get("common"),
        "gen_ai.usage.reasoning.output_tokens": details.get("reasoning_tokens") if isinstance(details, dict) else None,
        "moorage.usage.lost_tokens": reused.get("lost"),
    }
    yield from ((k, v) for k, v in counts.items() if isinstance(v, int) and not isinstance(v, bool))


def _place(deployment: Deployment | None) -> dict[str, Any]:
    if deployment is None:
        return {"gen_ai.provider.name": "moorage"}
    provider = {"engine": "moorage", "openai": "openai"}.get(deployment.kind) or deployment.model.partition("/")[0]
    out: dict[str, Any] = {"gen_ai.provider.name": provider, "moorage.deployment": deployment.name}
    where = urlsplit(deployment.api_base)
    if where.hostname:
        out |= {"server.address": where.hostname, "server.port": where.port or (443 if where.scheme == "https" else 80)}
    return out
