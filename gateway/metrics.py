"""Prometheus metrics of the gateway, in a registry of their own. Labels never hold what a client can choose freely.

What is counted for every request stands in plain tables that only the event loop writes: prometheus_client's own counters take a
lock and several calls a step, and a request has sixteen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.answer import Answer
from gateway.config import Config
from gateway.records import RecordWriter, reuse
from gateway.turn import Turn

# From a warm small model's first token to a 200K-token prefill on two cores.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 1800)
BOUNDS = [*map(floatToGoString, SECONDS), "+Inf"]


class Counts(Collector):
    """A counter: `values[labels] += n`."""

    def __init__(self, name: str, about: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._about = name, about, None, labels
        self.values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(*self._about)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        yield family


class Times(Collector):
    """A histogram of seconds, by labels."""

    def __init__(self, name: str, about: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._about = name, about, None, None, labels
        self._counts: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0] * len(BOUNDS))
        self._sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        registry.register(self)

    def observe(self, labels: tuple[str, ...], seconds: float) -> None:
        self._counts[labels][bisect_left(SECONDS, seconds)] += 1
        self._sums[labels] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(*self._about)
        for labels, counts in self._counts.items():
            family.add_metric(labels, list(zip(BOUNDS, accumulate(counts), strict=True)), self._sums[labels])
        yield family


class Metrics:
    def __init__(self, config: Config, writer: RecordWriter | None) -> None:
        self.registry = CollectorRegistry()
        self._models = {d.serves for d in config.deployments}
        self.running = 0  # requests being answered
        make = {"registry": self.registry}
        self.requests = Counts("moorage_requests", "Requests by outcome", ["dialect", "model", "outcome"], **make)
        Gauge("moorage_active_requests", "Requests being answered", **make).set_function(lambda: self.running)
        self.first = Times("moorage_first_token_seconds", "First token by output channel", ["model", "channel"], **make)
        self.total = Times("moorage_request_seconds", "Whole requests", ["model"], **make)
        self.tokens = Counts("moorage_tokens", "Tokens: prompt, common (reused), lost, completion", ["model", "kind"], **make)
        self.decisions = Counts("moorage_decisions", "Decisions by stage and rule", ["stage", "rule"], **make)
        self.upstream = Counts("moorage_attempts", "Attempts by deployment", ["deployment", "result"], **make)
        self.records = Gauge("moorage_records", "Records queued, written and dropped", ["what"], **make)
        self.waiting = Gauge("moorage_waiting_requests", "Requests waiting in line for a place", **make)
        if writer is not None:
            self.records.labels("queued").set_function(lambda: writer.queued)
            self.records.labels("written").set_function(lambda: writer.written)
            self.records.labels("dropped").set_function(lambda: writer.dropped)

    def observe(self, turn: Turn, answer: Answer) -> None:
        """One finished turn."""
        model = turn.model if turn.model in self._models else "other"
        self.requests.values[turn.dialect.name, model, answer.outcome] += 1
        self.total.observe((model,), answer.ended - answer.started)
        for (choice, name), channel in answer.channels.items():
            if choice == 0:
                self.first.observe((model, name), channel.first - answer.started)
        for decision in (*turn.decisions, *answer.decisions):
            self.decisions.values[decision.stage, decision.rule] += 1
        for attempt in answer.attempts:
            self.upstream.values[attempt.deployment.name, attempt.error.kind if attempt.error else "ok"] += 1
        if answer.usage:
            self._tokens(model, answer.usage)

    def _tokens(self, model: str, usage: dict) -> None:
        reused = reuse(usage) or {}
        for kind, count in (
            ("prompt", usage.get("prompt_tokens")),
            ("completion", usage.get("completion_tokens")),
            ("common", reused.get("common")),
            ("lost", reused.get("lost")),
        ):
            if isinstance(count, int) and count > 0:
                self.tokens.values[model, kind] += count

    def text(self) -> bytes:
        return generate_latest(self.registry)
