"""Counters of the API process in Prometheus form. One registry per server, so tests and servers do not share numbers."""

from __future__ import annotations

import prometheus_client.values  # noqa: F401  # the next one asks the package for it, which would be all of it (`engine.launch`)
from prometheus_client.metrics import Counter, Gauge, Histogram
from prometheus_client.registry import CollectorRegistry

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"moorage_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests by endpoint and HTTP status", "endpoint", "status")
        self.finished = counter("choices_finished", "Answers by finish reason", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that needed no prefill")
        self.lost_tokens = counter("lost_tokens", "Prompt tokens of a known prefix that had to be computed again")
        self.completion_tokens = counter("completion_tokens", "Sampled tokens")
        self.reasoning_tokens = counter("reasoning_tokens", "Sampled tokens inside thoughts")
        self.thinking_leaks = counter("thinking_leaks", "Answers that thought although thinking was off")
        self.tool_calls = counter("tool_calls", "Tool calls by what became of them", "outcome")
        self.ignored = counter("ignored_parameters", "Request fields that nothing reads", "field")
        self.not_enforced = counter("not_enforced", "Wishes that are passed to the model but not enforced", "field")
        self.clamped = counter("clamped_parameters", "Request fields lowered to what the engine can do", "field")
        self.disconnects = counter("disconnects", "Clients that went away before their answer was complete")
        self.dropped_anchors = counter("dropped_anchors", "Anchor hints that the template does not allow")
        self.continuations = counter("next_turns", "Ended answers by whether their next turn was prepared", "outcome")
        self.running = Gauge("moorage_requests_in_flight", "Requests being answered", registry=self.registry)
        self.ready = Gauge("moorage_ready", "1 when the model is loaded", registry=self.registry)
        self.first_token = Histogram(
            "moorage_first_token_seconds", "Arrival to first sampled token", buckets=_SECONDS, registry=self.registry
        )

    def render(self) -> tuple[bytes, str]:
        """All of them, and the content type that they have."""
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST
