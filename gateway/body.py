"""Request bodies: read from ASGI within a size limit, and freed of their content-encoding. A bomb never unfolds."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import zstandard

from gateway.errors import Refusal


class ClientGone(Exception):
    """The client left before its request was complete."""


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read(receive: Receive, headers: Mapping[str, str], max_mb: float, seconds: float) -> tuple[bytes, str]:
    """(decoded body, its content-encoding). Raises Refusal (400, 408, 413, 415) and ClientGone."""
    try:
        async with asyncio.timeout(seconds):
            return await _read(receive, headers, max_mb)
    except TimeoutError:
        remedy = "Send it faster, or raise server.body_timeout in the gateway's configuration"
        raise Refusal(408, f"The request body did not arrive within {seconds:g} s", remedy, code="body_timeout") from None


async def _read(receive: Receive, headers: Mapping[str, str], max_mb: float) -> tuple[bytes, str]:
    limit = int(max_mb * (1 << 20))
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(max_mb)
    message = await receive()
    parts, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(max_mb)
        parts.append(part)
        if not message.get("more_body", False):
            break
        message = await receive()
    raw = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = headers.get("content-encoding", "").strip().lower()
    return decode(raw, encoding, max_mb), encoding if encoding != "identity" else ""


def decode(raw: bytes, encoding: str, max_mb: float) -> bytes:
    """Undo gzip, deflate or zstd; at most `max_mb` MiB come out. Raises Refusal (400, 413, 415)."""
    limit = int(max_mb * (1 << 20))
    if encoding in ("", "identity"):
        return raw
    try:
        if encoding in ("gzip", "deflate"):
            unpack = zlib.decompressobj(47 if encoding == "gzip" else 15)  # 47 = 32 + 15: gzip or zlib header
            out = unpack.decompress(raw, limit + 1)
            complete = unpack.eof
        elif encoding == "zstd":
            stream = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw, read_across_frames=True)
            out = stream.read(limit + 1)
            complete = True
        else:
            raise Refusal(415, f"Content-Encoding {encoding[:40]!r} is not supported", "Use gzip, deflate, zstd or none")
    except (zlib.error, zstandard.ZstdError, MemoryError) as e:
        raise Refusal(400, f"The request body is not valid {encoding}: {e}", "Send it again, or uncompressed") from None
    if len(out) > limit:
        raise _too_large(max_mb)
    if not complete:
        raise Refusal(400, f"The {encoding} request body is cut off", "Send it again, or uncompressed")
    return out


def _too_large(max_mb: float) -> Refusal:
    remedy = "Shorten the conversation, or raise server.max_body_mb in the gateway's configuration"
    return Refusal(413, f"The request body is larger than {max_mb:g} MiB", remedy, code="body_too_large")
