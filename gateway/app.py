"""The ASGI application: routes and lifespan. Hot paths are answered here without a framework in between."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Container, Mapping, MutableMapping
from typing import Any

import orjson

from gateway import body, discovery, openapi
from gateway.client import Receive, Send
from gateway.config import Config
from gateway.dialects.base import Dialect
from gateway.errors import Refusal
from gateway.pipeline import DIALECTS, Pipeline, build
from gateway.routing import unknown_model
from gateway.turn import Received

log = logging.getLogger("moorage")

Scope = MutableMapping[str, Any]
Found = tuple[int, bytes, bytes]  # status, content type, body

JSON = b"application/json"
MODEL = "/v1/models/"
ADMIN = {"/admin/deployments": "GET", "/admin/drain": "POST"}  # path -> its method
METRICS_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
# Whoever is asked through a proxy on this machine has a neighbour that is none of the machine's users.
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
HEALTH_S = 1.0  # what is said of upstreams is at most this old; they are asked at most twice in that time, however many look


class App:
    """`App(config)` is the whole gateway as an ASGI callable; the pipeline lives from lifespan startup to shutdown."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pipeline: Pipeline | None = None
        self._looking: asyncio.Task[None] | None = None  # asks the upstreams how they are
        self._seen: dict[str, Any] = {}
        self._seen_at = -HEALTH_S
        self._gets = {
            "/": self._alive,  # agents probe it before their first request
            "/v1/models": self._models,
            "/models": self._models,
            "/health": self._health,
            "/health/liveliness": self._alive,
            "/health/readiness": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.pipeline = build(self.config)
                for warning in self.config.warnings:
                    log.warning("%s", warning)
                await send({"type": "lifespan.startup.complete"})
            else:
                if self._looking is not None:
                    self._looking.cancel()
                await self.pipeline.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        dialect = self.pipeline.dialects.get(path)
        if dialect is not None and method == "POST":
            await self._turn(scope, receive, send, dialect)
        elif dialect is not None and method == "HEAD":  # is it there?
            await _reply(send, 200, b"", JSON)
        elif path.startswith("/admin/") and self.config.server.admin:
            await self._admin(scope, receive, send)
        elif method in ("GET", "HEAD") and (path in self._gets or path.startswith(MODEL)):
            await self._get(scope, send)
        else:
            await _refuse(send, _wrong(method, path, self._gets), self._speaks(scope))

    async def _get(self, scope: Scope, send: Send) -> None:
        path = scope["path"]
        try:
            handler = self._gets.get(path)
            status, content_type, data = await (handler(scope) if handler else self._model(path[len(MODEL) :], scope))
        except Refusal as refusal:
            await _refuse(send, refusal, self._speaks(scope))
        else:
            await _reply(send, status, data if scope["method"] == "GET" else b"", content_type)

    async def _turn(self, scope: Scope, receive: Receive, send: Send, dialect: Dialect) -> None:
        headers = _headers(scope)
        limits = self.config.server
        try:
            data, encoding = await body.read(receive, headers, limits.max_body_mb, limits.body_timeout)
        except body.ClientGone:
            return
        except Refusal as refusal:
            await _refuse(send, refusal, dialect)
            return
        peer = scope.get("client")
        received = Received(
            route=scope["path"], headers=headers, body=data, content_encoding=encoding, peer=peer[0] if peer else ""
        )
        await self.pipeline.answer(received, dialect, receive, send)

    async def _admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /admin/deployments; POST /admin/drain {"deployment": NAME, "drain": true}. For keys with `admin: true` only."""
        headers = _headers(scope)
        try:
            if not self.pipeline.limits.caller(headers).admin:
                raise Refusal(403, "This key is no admin key", "Give it `admin: true` in the configuration", code="not_admin")
            route = scope["method"], scope["path"]
            if route == ("GET", "/admin/deployments"):
                answer = {"deployments": self.pipeline.router.status(), "line": self.pipeline.limits.status()}
            elif route == ("POST", "/admin/drain"):
                answer = self._drain((await body.read(receive, headers, 1, self.config.server.body_timeout))[0])
            elif (allowed := ADMIN.get(route[1])) is not None:
                raise _not_this_method(*route, allowed)
            else:
                raise _wrong(*route, self._gets)
        except body.ClientGone:
            return
        except Refusal as refusal:
            await _refuse(send, refusal, self._speaks(scope))
            return
        await _reply(send, 200, orjson.dumps(answer), JSON)

    def _drain(self, raw: bytes) -> dict[str, Any]:
        try:
            asked = orjson.loads(raw)
        except orjson.JSONDecodeError:
            asked = None
        name = asked.get("deployment") if isinstance(asked, dict) else None
        if not isinstance(name, str) or not isinstance(asked.get("drain", True), bool):
            raise Refusal(400, "The body must name a deployment", 'Send {"deployment": NAME, "drain": true}')
        if not self.pipeline.router.drain(name, asked.get("drain", True)):
            raise Refusal(404, f"No deployment {name[:80]!r}", "GET /admin/deployments lists them", code="not_found")
        return {"deployment": name, "drain": asked.get("drain", True)}

    async def _models(self, scope: Scope) -> Found:
        return 200, JSON, orjson.dumps(discovery.listed(await self._listed(scope)))

    async def _model(self, name: str, scope: Scope) -> Found:
        model = next((m for m in await self._listed(scope) if m["id"] == name), None)
        if model is None:
            raise unknown_model(self.config, name)
        return 200, JSON, orjson.dumps(model)

    async def _listed(self, scope: Scope) -> list[dict[str, Any]]:
        """The models that this client's key may ask for. Raises Refusal 401."""
        key = self.pipeline.limits.key(_headers(scope))
        return [m for m in await discovery.models(self.pipeline) if key is None or key.may(m["id"])]

    async def _health(self, scope: Scope) -> Found:
        return 200, JSON, orjson.dumps(await self._state(scope))

    async def _ready(self, scope: Scope) -> Found:
        health = await self._state(scope)
        return 200 if health["status"] == "ok" else 503, JSON, orjson.dumps(health)

    async def _alive(self, scope: Scope) -> Found:
        return 200, JSON, b'{"status":"ok"}'

    async def _openapi(self, scope: Scope) -> Found:
        return 200, JSON, orjson.dumps(openapi.document(self.config))

    async def _metrics(self, scope: Scope) -> Found:
        if not self._knows(scope):
            remedy = "Send one of the configured keys as `Authorization: Bearer KEY`, or ask from the gateway's own machine"
            raise Refusal(401, "Metrics are not for everyone", remedy, code="invalid_api_key")
        return 200, METRICS_TEXT, self.pipeline.metrics.text()

    # --- who asks

    def _knows(self, scope: Scope) -> bool:
        """May this client see names, addresses and counts? With a key, from this machine, or where there are no keys at all."""
        headers = _headers(scope)
        if _is_local(scope, headers):
            return True
        try:
            self.pipeline.limits.caller(headers)
        except Refusal:
            return False
        return True

    async def _state(self, scope: Scope) -> dict[str, Any]:
        """How we and our upstreams are, up to HEALTH_S old; strangers see one word of it.

        From half of that age on somebody who asks has them asked again, and waits for it only when there is nothing newer to say:
        whoever looks often never waits for an upstream.
        """
        age = asyncio.get_running_loop().time() - self._seen_at
        if age >= HEALTH_S / 2 and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())
        if age >= HEALTH_S:
            await asyncio.shield(self._looking)  # others wait for it too
        return self._seen if self._knows(scope) else {"status": self._seen["status"]}

    async def _look(self) -> None:
        self._seen = await discovery.health(self.pipeline)
        self._seen_at = asyncio.get_running_loop().time()

    def _speaks(self, scope: Scope) -> Dialect:
        """The dialect of a client whose path says nothing: Anthropic's send their API version."""
        anthropic = scope["path"].startswith("/v1/messages") or any(name == b"anthropic-version" for name, _ in scope["headers"])
        return self.pipeline.dialects["/v1/messages" if anthropic else "/v1/chat/completions"]


def _headers(scope: Scope) -> dict[str, str]:
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}


def _is_local(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Does the client sit on this machine, with no proxy between?"""
    try:
        peer = ipaddress.ip_address(scope["client"][0])
    except (TypeError, ValueError):  # no address at all
        return False
    peer = getattr(peer, "ipv4_mapped", None) or peer
    return peer.is_loopback and not any(name in headers for name in FORWARDED)


def _wrong(method: str, path: str, gets: Container[str]) -> Refusal:
    """No such path, or not with this method."""
    if path in DIALECTS or path in gets:
        return _not_this_method(method, path, "POST, HEAD" if path in DIALECTS else "GET, HEAD")
    if path.startswith("/v1/responses/") and (method != "POST" or path.endswith("/cancel")):
        remedy = "Send the whole conversation as `input` to POST /v1/responses"
        return Refusal(404, "Responses are not stored here, so there is none to look up or to change", remedy, code="not_found")
    return Refusal(404, f"No such path: {path[:80]}", "The API is under /v1, see GET /v1/models", code="not_found")


def _not_this_method(method: str, path: str, allowed: str) -> Refusal:
    message = f"{method} does not go with {path[:80]}"
    return Refusal(405, message, f"Use {allowed}", code="method_not_allowed", headers={"allow": allowed})


async def _reply(
    send: Send, status: int, data: bytes, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    head = [(b"content-type", content_type), (b"content-length", str(len(data)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": data})


async def _refuse(send: Send, refusal: Refusal, dialect: Dialect) -> None:
    headers = tuple((k.encode(), v.encode()) for k, v in refusal.headers.items())
    await _reply(send, refusal.status, dialect.refusal(refusal), JSON, headers)
