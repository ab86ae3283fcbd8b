"""What goes wrong with a direct upstream, in words for the user: one place for both ways of reaching it."""

from __future__ import annotations

import socket

import aiohttp
import orjson

from gateway.errors import UpstreamError
from gateway.upstream.base import ELSEWHERE, RETRYABLE, Reply

# An error body is shown to the user; more than this of it helps nobody.
MAX_ERROR_BYTES = 64 << 10
ERROR_TIMEOUT_S = 2.0  # for the rest of an error whose head is there


def unreachable(where: str, error: BaseException) -> UpstreamError:
    cause = "did not answer in time" if isinstance(error, TimeoutError) else "refused the connection"
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        cause = "has no address"
    remedy = "Start it (`moorage engine serve` for our engine), or correct its api_base in the gateway's configuration"
    return UpstreamError(503, f"The upstream {where} {cause}", remedy, kind="connect", retryable=True)


def silent(where: str, seconds: float) -> UpstreamError:
    remedy = "The prompt may be too long for this machine, or raise timeouts.prefill / timeouts.idle in the configuration"
    return UpstreamError(504, f"The upstream {where} sent nothing for {seconds:g} s", remedy, kind="timeout", retryable=False)


def died(where: str, error: BaseException) -> UpstreamError:
    remedy = "Send the request again; if it stays away, look at its log"
    return UpstreamError(502, f"The upstream {where} broke off ({type(error).__name__})", remedy, kind="died", retryable=True)


async def read_up_to(reply: Reply, limit: int, timeout: float) -> bytes:
    """At most about `limit` bytes of a body."""
    parts, size = [], 0
    while size < limit and (part := await reply.read(timeout)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


async def status_error(reply: Reply, where: str) -> UpstreamError:
    """An upstream's error answer in our form; its own words, code and Retry-After are kept."""
    try:
        raw = await read_up_to(reply, MAX_ERROR_BYTES, ERROR_TIMEOUT_S)
    except UpstreamError:
        raw = b""
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        data = None
    error = data.get("error", data) if isinstance(data, dict) else None
    error = error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}
    message = error.get("message") or error.get("detail") or f"The upstream {where} answered {reply.status}"
    param, code = error.get("param"), error.get("code")
    status = reply.status if reply.status >= 400 else 502
    if status in (401, 403):
        # The client's own key was fine; it is the gateway's key that this upstream did not take.
        message, status = f"The upstream {where} refused the gateway's key: {message}", 502
    return UpstreamError(
        status,
        str(message),
        str(error.get("remedy") or ""),
        kind="status",
        retryable=reply.status in RETRYABLE,
        elsewhere=reply.status in ELSEWHERE,
        type=str(error.get("type") or ""),
        code=str(code or "upstream_status"),
        param=param if isinstance(param, str) else None,
        headers={"retry-after": wait} if (wait := reply.headers.get("retry-after")) else {},
    )
