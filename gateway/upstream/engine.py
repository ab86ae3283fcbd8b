"""The direct upstream: our engine, and any server that speaks plain OpenAI.

Bytes in, bytes out: nothing is parsed here. Turns over plain http go through `wire`, everything else through one pooled aiohttp
session. Nagle is off on every connection, connect, prefill and idle have timeouts of their own, and closing a reply early closes
its connection, which is how the engine learns that nobody listens any more.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from gateway.config import Deployment, Timeouts
from gateway.errors import UpstreamError
from gateway.turn import Turn
from gateway.upstream import faults, wire
from gateway.upstream.base import Health

MAX_WHOLE_BYTES = 64 << 20
# Below the 5 s after which uvicorn servers (our engine, vLLM, SGLang) close an idle connection: reusing one just then would fail.
POOL_KEEPALIVE_S = 4.0
HEALTH_TIMEOUT_S = 2.0
TOKENIZE_TIMEOUT_S = 10.0  # a megabyte of text takes a tokenizer about a second


@dataclass(frozen=True, slots=True)
class Target:
    """Where one deployment takes one kind of request. `head` is what every request to it begins with."""

    url: str
    where: str  # for errors
    address: tuple[str, int] | None  # None: not plain http, aiohttp's business
    head: bytes


class DirectReply:
    """One HTTP answer of an upstream."""

    __slots__ = ("_reply", "_unpack", "_where", "headers", "status", "streamed")

    def __init__(self, reply: wire.Reply | SessionReply, where: str) -> None:
        self._reply, self._where = reply, where
        # We ask for none, but a proxy between may compress; aiohttp undoes that itself.
        packed = isinstance(reply, wire.Reply) and reply.headers.get("content-encoding", "") in ("gzip", "deflate")
        self._unpack = zlib.decompressobj(47) if packed else None  # 47 = 32 + 15: gzip or zlib header
        self.status = reply.status
        self.headers: Mapping[str, str] = reply.headers
        self.streamed = reply.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def ended(self) -> bool:
        return self._reply.ended

    async def read(self, timeout: float) -> bytes:
        try:
            data = await self._reply.read(timeout)
            while self._unpack and data and not (plain := self._unpack.decompress(data)):
                data = await self._reply.read(timeout)
            return plain if self._unpack and data else data
        except zlib.error as e:
            raise UpstreamError(502, f"{self._where} sent a broken body: {e}", kind="protocol", retryable=False) from None
        except TimeoutError:
            raise faults.silent(self._where, timeout) from None
        except (aiohttp.ClientError, ConnectionError) as e:
            raise faults.died(self._where, e) from None

    async def whole(self, timeout: float) -> bytes:
        raw = await faults.read_up_to(self, MAX_WHOLE_BYTES + 1, timeout)
        if len(raw) > MAX_WHOLE_BYTES:
            message = f"{self._where} sent more than {MAX_WHOLE_BYTES >> 20} MiB"
            raise UpstreamError(502, message, kind="protocol", retryable=False)
        return raw

    def close(self) -> None:
        self._reply.close()


class SessionReply:
    """An answer that aiohttp reads."""

    __slots__ = ("_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = {k.lower(): v for k, v in response.headers.items()}

    @property
    def ended(self) -> bool:
        return self._response.content.at_eof()

    async def read(self, timeout: float) -> bytes:
        async with asyncio.timeout(timeout):
            return await self._response.content.readany()

    def close(self) -> None:
        # Closes the connection when the body was not read to its end; returns it to the pool otherwise.
        self._response.close()


class DirectUpstream:
    """Deployments of kind `engine` and `openai`."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_KEEPALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=True
        )
        self._pool = wire.Pool(POOL_KEEPALIVE_S)
        self._targets: dict[tuple[str, str], Target] = {}  # by deployment and path: as many as are configured

    async def send(self, turn: Turn, deployment: Deployment, body: bytes) -> DirectReply:
        target = self._target(deployment, turn.dialect.upstream_path)
        post = self._over_wire if target.address else self._over_session
        reply = DirectReply(await self._twice(post, target, deployment, turn.id, body), target.where)
        if reply.status < 400:
            return reply
        try:
            raise await faults.status_error(reply, target.where)
        finally:
            reply.close()

    def _target(self, deployment: Deployment, path: str) -> Target:
        key = deployment.name, path
        if key not in self._targets:
            self._targets[key] = target_of(deployment, path)
        return self._targets[key]

    async def _twice(self, post: Any, target: Target, deployment: Deployment, id: str, body: bytes) -> Any:
        """Post, and once more when a pooled connection was closed by the server while our request was on its way."""
        where = target.where
        for last in (False, True):
            try:
                return await post(target, deployment, id, body)
            except (aiohttp.ServerDisconnectedError, wire.Broken) as e:
                if last or (isinstance(e, wire.Broken) and not e.unanswered):
                    raise faults.died(where, e) from None
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, wire.NoConnection) as e:
                raise faults.unreachable(where, e.__cause__ or e) from None
            except TimeoutError:
                raise faults.silent(where, self._timeouts.prefill) from None
            except (aiohttp.ClientError, ConnectionError) as e:
                raise faults.died(where, e) from None
        raise AssertionError("unreachable")

    async def _over_wire(self, target: Target, deployment: Deployment, id: str, body: bytes) -> wire.Reply:
        head = b"%sx-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (target.head, id.encode(), len(body))
        reply = await self._pool.send(target.address, head, body, self._timeouts.connect)
        try:
            await reply.head(self._timeouts.prefill)
        except BaseException:
            reply.close()
            raise
        return reply

    async def _over_session(self, target: Target, deployment: Deployment, id: str, body: bytes) -> SessionReply:
        headers = _headers(deployment) | JSON_ONLY | {"x-request-id": id}
        async with asyncio.timeout(self._timeouts.prefill):
            return SessionReply(await self._session.post(target.url, data=body, headers=headers, allow_redirects=False))

    async def tokenize(self, deployment: Deployment, body: bytes) -> int | None:
        # vLLM's form, which is ours too; vLLM has it beside /v1. A server with another form answers without a count.
        engine = deployment.kind == "engine"
        url = deployment.api_base + "/v1/tokenize" if engine else deployment.api_base.removesuffix("/v1") + "/tokenize"
        headers = _headers(deployment) | {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(TOKENIZE_TIMEOUT_S),
                self._session.post(url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                data = orjson.loads(await response.content.read(MAX_WHOLE_BYTES)) if response.status == 200 else None
        except (aiohttp.ClientError, ConnectionError, TimeoutError, orjson.JSONDecodeError):
            return None
        count = data.get("count") if isinstance(data, dict) else None
        return count if isinstance(count, int) and count > 0 else None

    async def health(self, deployment: Deployment) -> Health:
        path = "/health" if deployment.kind == "engine" else "/models"
        where = f"{deployment.name} at {deployment.api_base}"
        try:
            status, data = await self._get(deployment.api_base + path, deployment)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as e:
            return Health("down", faults.unreachable(where, e).text)
        if deployment.kind != "engine":
            # 401: it does not take our key. With 403 it may: keys for chat alone may not list models.
            return Health("ready" if status < 500 and status != 401 else "down", {"status": status})
        loading = isinstance(data, dict) and data.get("status") == "loading"
        return Health("ready" if status < 400 else "loading" if loading else "down", data)

    async def models(self, deployment: Deployment) -> list[dict[str, Any]]:
        try:
            status, data = await self._get(_url(deployment, "/v1/models"), deployment)
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return []
        listed = data.get("data") if status == 200 and isinstance(data, dict) else None
        return [m for m in listed if isinstance(m, dict) and "id" in m] if isinstance(listed, list) else []

    async def _get(self, url: str, deployment: Deployment) -> tuple[int, Any]:
        async with (
            asyncio.timeout(HEALTH_TIMEOUT_S),
            self._session.get(url, headers=_headers(deployment), allow_redirects=False) as response,
        ):
            raw = await response.content.read(MAX_WHOLE_BYTES)
            try:
                return response.status, orjson.loads(raw)
            except orjson.JSONDecodeError:
                return response.status, None

    async def close(self) -> None:
        self._pool.close()
        await self._session.close()


JSON_ONLY = {"content-type": "application/json", "accept-encoding": "identity"}


def target_of(deployment: Deployment, path: str) -> Target:
    url = _url(deployment, path)
    parts = urlsplit(url)
    plain = (
        parts.scheme == "http"
        and parts.hostname
        and not parts.username
        and url.isascii()
        and url.isprintable()
        and " " not in url
    )
    own = {k.lower(): v for k, v in _headers(deployment).items()}
    lines = {"host": parts.netloc, "user-agent": "moorage"} | own | JSON_ONLY
    if any(c in k + v for k, v in lines.items() for c in "\r\n"):
        message = f"The key or a header of deployment {deployment.name} has a line break in it"
        raise UpstreamError(502, message, "Correct it in the gateway's configuration", kind="protocol", retryable=False)
    place = parts.path + (f"?{parts.query}" if parts.query else "")
    head = f"POST {place} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    where = f"{deployment.name} at {deployment.api_base}"
    return Target(url, where, (parts.hostname, parts.port or 80) if plain else None, head.encode())


def _url(deployment: Deployment, route: str) -> str:
    """Our engine's base has no /v1, an OpenAI base has: that is how everybody writes them."""
    return deployment.api_base + (route if deployment.kind == "engine" else route.removeprefix("/v1"))


def _headers(deployment: Deployment) -> dict[str, str]:
    key = deployment.api_key
    return deployment.headers | ({"authorization": f"Bearer {key.reveal()}"} if key else {})
