"""GET /openapi.json: what this gateway serves, and no more than it checks itself.

A parameter stands here when the gateway refuses other types of it; everything else is the upstream's business and passes
(`additionalProperties`). What Messages and Responses may hold inside their messages and items is checked too and told in words:
their own documentation is the schema. The document follows the configuration: admin routes and keys are in it only when they
are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.config import Config
from gateway.dialects.chat import ROLES

VERSION = "3.1.0"

TEXT = {"type": "string"}
SWITCH = {"type": ["boolean", "null"]}
MODEL = {"type": "string", "minLength": 1, "description": "A name of GET /v1/models"}
ANYTHING: dict[str, Any] = {}

ERROR_TEXTS = {
    "400": "The request is not understood, or a policy refuses it; the message says cause and remedy",
    "401": "No key, or an unknown one",
    "403": "The key may not do this",
    "404": "No such model",
    "408": "The body did not arrive within server.body_timeout",
    "413": "The body is larger than server.max_body_mb",
    "415": "The content encoding is not gzip, deflate or zstd",
    "429": "A limit of the key, a full line, or a busy upstream; Retry-After says when",
    "500": "The gateway or its upstream failed",
    "501": "The model needs a package that is not installed",
    "502": "The upstream's answer cannot be used, or its connection broke off",
    "503": "No upstream can take the request now",
    "504": "The upstream was silent for too long",
}

OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "code": {"type": ["string", "null"]},
                "param": {"type": ["string", "null"]},
                "remedy": TEXT,
            },
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": TEXT, "message": TEXT}},
    },
}


def document(config: Config) -> dict[str, Any]:
    """The OpenAPI document of a gateway with this configuration."""
    keys = {"security": [{"bearer": []}, {"apiKey": []}]} if config.keys else {}
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    components: dict[str, Any] = {"schemas": {"OpenAIError": OPENAI_ERROR, "AnthropicError": ANTHROPIC_ERROR}}
    return {
        "openapi": VERSION,
        "info": {"title": "Moorage gateway", "version": "1", "description": "One endpoint for coding agents"},
        "paths": _turns() | _gets(bool(config.keys)) | (_admin() if config.server.admin else {}),
        "components": components | ({"securitySchemes": schemes} if config.keys else {}),
    } | keys


def _turns() -> dict[str, Any]:
    """The dialects' routes."""
    messages = {"type": "array", "minItems": 1, "items": ANYTHING}
    chat = _object(
        ["model", "messages"],
        model=MODEL,
        messages={"type": "array", "minItems": 1, "items": _object(["role"], role={"enum": sorted(ROLES)})},
        stream=SWITCH,
        stream_options={"type": ["object", "null"]},
    )
    completions = _object(["model", "prompt"], model=MODEL, prompt=ANYTHING, stream=SWITCH)
    said = {"type": "object", "required": ["role", "content"], "properties": {"role": TEXT, "content": ANYTHING}}
    anthropic = _object(["model", "messages"], model=MODEL, messages=messages | {"items": said}, stream=SWITCH)
    responses = _object(["model", "input"], model=MODEL, input={"type": ["string", "array"]}, stream=SWITCH)
    embeddings = _object(["model", "input"], model=MODEL, input=ANYTHING)
    counted = _object(["input_tokens"], input_tokens={"type": "integer", "minimum": 0})
    return {
        "/v1/chat/completions": _post("OpenAI chat completions", chat, "OpenAIError"),
        "/v1/completions": _post("OpenAI completions: text in, text out", completions, "OpenAIError"),
        "/v1/responses": _post("OpenAI Responses: text, calls and their outputs; nothing is stored", responses, "OpenAIError"),
        "/v1/messages": _post("Anthropic Messages: text, thoughts, tool use and results", anthropic, "AnthropicError"),
        "/v1/messages/count_tokens": _post("How long a Messages request is", anthropic, "AnthropicError", counted, streams=False),
        "/v1/embeddings": _post("OpenAI embeddings", embeddings, "OpenAIError", streams=False),
    }


def _post(
    what: str, body: dict[str, Any], error: str, answer: dict[str, Any] | None = None, streams: bool = True
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer or {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": TEXT}
    headers = {name: {"schema": TEXT} for name in ("x-moorage-request-id", "x-moorage-decisions")}
    operation = {
        "summary": what,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer", "headers": headers, "content": content}} | _errors(error),
    }
    probe = {"summary": "Is it there?", "security": [], "responses": {"200": {"description": "It is"}}}
    return {"post": operation, "head": probe}


def _gets(keys: bool) -> dict[str, Any]:
    listed = _object(["object", "data"], object={"const": "list"}, data={"type": "array", "items": _object(["id"], id=TEXT)})
    # Who has no key and comes from elsewhere sees the status alone.
    health = _object(["status"], status=TEXT, upstreams={"type": "object"})
    alive = _object(["status"], status={"const": "ok"})
    stranger = {"401": _answer(ERROR_TEXTS["401"], {"$ref": "#/components/schemas/OpenAIError"})} if keys else {}
    needs_key = {"security": _KEYS} if keys else {}
    key_or_here = {"security": [{}, *_KEYS]} if keys else {}  # clients on the gateway's own machine need none
    return {
        "/": {"get": _get("Agents probe it before their first request", alive)},
        "/v1/models": {"get": _get("The models, of those that the key may use", listed, stranger) | needs_key},
        "/health": {"get": _get("The gateway and, for those who may know, its upstreams", health)},
        "/health/liveliness": {"get": _get("Does the process answer?", alive)},
        "/health/readiness": {"get": _get("May requests come?", health, {"503": _answer("Not yet", health)})},
        "/openapi.json": {"get": _get("This document", {"type": "object"})},
        "/metrics": {"get": _get("Prometheus metrics", TEXT, stranger, kind="text/plain") | key_or_here},
    }


def _get(
    what: str, schema: Mapping[str, Any], others: Mapping[str, Any] | None = None, kind: str = "application/json"
) -> dict[str, Any]:
    return {"summary": what, "security": [], "responses": {"200": _answer(what, schema, kind)} | dict(others or {})}


def _answer(what: str, schema: Mapping[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {"description": what, "content": {kind: {"schema": schema}}}


def _admin() -> dict[str, Any]:
    status = _object(["deployments", "line"], deployments=ANYTHING, line={"type": "object"})
    drain = _object(["deployment"], deployment=TEXT, drain={"type": "boolean"})
    drained = _object(["deployment", "drain"], deployment=TEXT, drain={"type": "boolean"})
    body = {"required": True, "content": {"application/json": {"schema": drain}}}
    return {
        "/admin/deployments": {"get": _get("Where requests go", status) | {"security": _KEYS} | _with_errors(status)},
        "/admin/drain": {
            "post": {"summary": "No new requests for a deployment, or again", "requestBody": body} | _with_errors(drained)
        },
    }


_KEYS = [{"bearer": []}, {"apiKey": []}]


def _with_errors(schema: dict[str, Any]) -> dict[str, Any]:
    good = {"200": {"description": "Done", "content": {"application/json": {"schema": schema}}}}
    return {"responses": good | _errors("OpenAIError")}


def _errors(name: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {status: {"description": text, "content": content} for status, text in ERROR_TEXTS.items()}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}
