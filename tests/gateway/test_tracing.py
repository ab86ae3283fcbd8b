"""OpenTelemetry spans by the GenAI conventions: names, attributes, parents, errors; no text; off and not imported by default."""

from __future__ import annotations

import gzip
import subprocess
import sys

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as genai
from opentelemetry.trace import SpanKind, StatusCode

from gateway import tracing
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, finish, message, reasoning, tool_call, usage
from tests.support.gateway import Gateway, ask, settings

SECRET = "the moon is made of cheese"
ON = {"tracing": {"enabled": True}}


@pytest.fixture
def spans(monkeypatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "_otlp", lambda settings: exporter)
    return exporter


def finished(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return list(exporter.get_finished_spans())


async def test_a_streamed_chat_is_one_span_with_the_conventions_names(spans, tmp_path) -> None:
    async with FakeUpstream() as up:
        up.script(Stream([reasoning("hm"), content("Hi"), finish("stop"), usage(12, 3, 8)]))
        async with Gateway(settings(up.base, "openai") | ON, tmp_path) as gw:
            body = ask(SECRET, stream=True, temperature=0.5, top_k=20, max_tokens=99, seed=7, n=1)
            got = await gw.post(body, session_id="s-1", user_agent="opencode/1")
            port = int(up.base.rpartition(":")[2])
    (span,) = finished(spans)
    seen = dict(span.attributes)
    assert (span.name, span.kind, span.status.status_code) == ("chat m", SpanKind.CLIENT, StatusCode.UNSET)
    assert span.resource.attributes["service.name"] == "moorage-gateway" and span.parent is None
    assert seen.pop(genai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK) > 0 and span.end_time > span.start_time
    assert seen == {
        genai.GEN_AI_OPERATION_NAME: "chat",
        genai.GEN_AI_PROVIDER_NAME: "openai",
        genai.GEN_AI_REQUEST_MODEL: "m",
        genai.GEN_AI_REQUEST_STREAM: True,
        genai.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        genai.GEN_AI_REQUEST_TOP_K: 20.0,
        genai.GEN_AI_REQUEST_MAX_TOKENS: 99,
        genai.GEN_AI_REQUEST_SEED: 7,
        genai.GEN_AI_CONVERSATION_ID: "s-1",
        genai.GEN_AI_AGENT_NAME: "opencode",
        genai.GEN_AI_RESPONSE_ID: "chatcmpl-1",
        genai.GEN_AI_RESPONSE_FINISH_REASONS: ("stop",),
        genai.GEN_AI_USAGE_INPUT_TOKENS: 12,
        genai.GEN_AI_USAGE_OUTPUT_TOKENS: 3,
        genai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 8,
        "server.address": "127.0.0.1",
        "server.port": port,
        "moorage.deployment": "m#0",
        "moorage.request_id": got.headers["x-moorage-request-id"],
        "moorage.dialect": "chat",
        "moorage.caller": "anonymous",
        "moorage.outcome": "ok",
        "moorage.thinking": "unset",
        "moorage.decisions": ("read.usage",),
    }


async def test_no_span_holds_what_was_said(spans, tmp_path) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": SECRET, "parameters": {"type": "object"}}}
    async with FakeUpstream() as up:
        up.script(
            Stream([reasoning(SECRET), content(SECRET), tool_call(0, f'{{"a": "{SECRET}"}}', "c", "f"), finish("tool_calls")]),
            Whole({"error": {"message": f"cannot read: {SECRET}", "code": "bad"}}, 400),
            Stream([content(SECRET)], done=False),
        )
        async with Gateway(settings(up.base) | ON, tmp_path) as gw:
            for _ in range(3):
                await gw.post(ask(SECRET, stream=True, tools=[tool], stop=[SECRET]))
    assert len(finished(spans)) == 3
    assert not any(SECRET in span.to_json() for span in finished(spans))


async def test_errors_attempts_and_parents(spans, tmp_path) -> None:
    async with FakeUpstream() as up:
        up.script(Whole({"error": {"message": "loading"}}, 503), Whole(message()), Whole({"error": {"message": "no"}}, 400))
        data = settings(up.base) | ON | {"routing": {"retries": 1, "backoff": 0.01}}
        async with Gateway(data, tmp_path) as gw:
            parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
            await gw.post(ask(), traceparent=parent)
            await gw.post(ask())
            await gw.post(b"{")
    retried, failed, refused = finished(spans)
    assert f"{retried.parent.span_id:016x}" == "cd" * 8 and f"{retried.context.trace_id:032x}" == "ab" * 16
    assert [e.name for e in retried.events] == ["moorage.attempt_failed"] and retried.status.status_code == StatusCode.UNSET
    assert retried.attributes["gen_ai.provider.name"] == "moorage"
    assert failed.status.status_code == StatusCode.ERROR and failed.attributes["error.type"] == "upstream_status"
    assert refused.attributes["error.type"] == "invalid_json" and refused.attributes["moorage.outcome"] == "refused"


async def test_spans_reach_a_collector_over_otlp(tmp_path) -> None:
    came: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        raw = await request.read()
        came.append(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    async with FakeUpstream() as up:
        up.script(Whole(message()))
        async with Gateway(settings(up.base) | {"tracing": {"enabled": True, "endpoint": endpoint}}, tmp_path) as gw:
            await gw.post(ask())
    await runner.cleanup()
    sent = [ExportTraceServiceRequest.FromString(raw) for raw in came]
    names = [s.name for r in sent for rs in r.resource_spans for scope in rs.scope_spans for s in scope.spans]
    assert names == ["chat m"]


async def test_a_collector_that_is_gone_costs_no_request(monkeypatch, tmp_path) -> None:
    class Gone(InMemorySpanExporter):
        def export(self, spans):
            raise ConnectionError("the collector is gone")

    monkeypatch.setattr(tracing, "_otlp", lambda settings: Gone())
    async with FakeUpstream() as up:
        up.script(Whole(message()))
        async with Gateway(settings(up.base) | ON, tmp_path) as gw:
            got = await gw.post(ask())
            (record,) = await gw.records()
    assert got.status == 200 and record["outcome"] == "ok"


def test_off_by_default_and_not_even_imported() -> None:
    code = "import sys, gateway.app, gateway.server; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_without_the_packages_the_start_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(tracing.NoTracing, match=r"pip install moorage\[otel\]"):
        tracing.require()
