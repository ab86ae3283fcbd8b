"""Prometheus metrics of the gateway, in a registry of their own. Labels never hold what a client can choose freely."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.answer import Answer
from gateway.config import Config
from gateway.records import RecordWriter, reuse
from gateway.turn import Turn

# From a warm small model's first token to a 200K-token prefill on two cores.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 1800)


class Metrics:
    def __init__(self, config: Config, writer: RecordWriter | None) -> None:
        self.registry = CollectorRegistry()
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}  # as bounded as the labels are
        self._models = {d.serves for d in config.deployments}
        make = {"registry": self.registry}
        self.requests = Counter("moorage_requests", "Requests by outcome", ["dialect", "model", "outcome"], **make)
        self.active = Gauge("moorage_active_requests", "Requests being answered", **make)
        self.first = Histogram(
            "moorage_first_token_seconds", "First token by output channel", ["model", "channel"], buckets=SECONDS, **make
        )
        self.total = Histogram("moorage_request_seconds", "Whole requests", ["model"], buckets=SECONDS, **make)
        self.tokens = Counter("moorage_tokens", "Tokens: prompt, common (reused), lost, completion", ["model", "kind"], **make)
        self.decisions = Counter("moorage_decisions", "Decisions by stage and rule", ["stage", "rule"], **make)
        self.upstream = Counter("moorage_attempts", "Attempts by deployment", ["deployment", "result"], **make)
        self.records = Gauge("moorage_records", "Records queued, written and dropped", ["what"], **make)
        self.waiting = Gauge("moorage_waiting_requests", "Requests waiting in line for a place", **make)
        if writer is not None:
            self.records.labels("queued").set_function(lambda: writer.queued)
            self.records.labels("written").set_function(lambda: writer.written)
            self.records.labels("dropped").set_function(lambda: writer.dropped)

    def observe(self, turn: Turn, answer: Answer) -> None:
        """One finished turn."""
        model = turn.model if turn.model in self._models else "other"
        of = self._child
        of(self.requests, turn.dialect.name, model, answer.outcome).inc()
        of(self.total, model).observe(answer.ended - answer.started)
        for (choice, name), channel in answer.channels.items():
            if choice == 0:
                of(self.first, model, name).observe(channel.first - answer.started)
        for decision in (*turn.decisions, *answer.decisions):
            of(self.decisions, decision.stage, decision.rule).inc()
        for attempt in answer.attempts:
            of(self.upstream, attempt.deployment.name, attempt.error.kind if attempt.error else "ok").inc()
        if answer.usage:
            self._tokens(model, answer.usage)

    def _child(self, metric: Any, *labels: str) -> Any:
        """`metric.labels(*labels)`, which takes a lock and checks every time."""
        child = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = metric.labels(*labels)
        return child

    def _tokens(self, model: str, usage: dict) -> None:
        reused = reuse(usage) or {}
        counts = {
            "prompt": usage.get("prompt_tokens"),
            "completion": usage.get("completion_tokens"),
            "common": reused.get("common"),
            "lost": reused.get("lost"),
        }
        for kind, count in counts.items():
            if isinstance(count, int) and count > 0:
                self._child(self.tokens, model, kind).inc(count)

    def text(self) -> bytes:
        return generate_latest(self.registry)
