"""Request bodies: read from ASGI within a size limit, and freed of their content-encoding. A bomb never unfolds."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import zstandard

from gateway.errors import Refusal

ENCODINGS = "gzip, deflate, zstd"
GZIP, ZLIB = 31, 15  # zlib's words for the two forms
# Unpacked at once; what is longer is unpacked in a thread, where it holds up nobody. At 0.3 GB/s this takes a millisecond.
HERE_BYTES = 256 << 10
# What a zstd body may ask us to remember of it; RFC 9659 lets no one ask for more.
ZSTD_WINDOW = 8 << 20


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
    if encoding in ("", "identity"):
        return raw, ""
    return await decode(raw, encoding, max_mb), encoding


async def decode(raw: bytes, encoding: str, max_mb: float) -> bytes:
    """Undo gzip, deflate or zstd; at most `max_mb` MiB come out. Raises Refusal (400, 413, 415)."""
    limit = int(max_mb * (1 << 20))
    try:
        unpack = _unpacker(raw, encoding)
        out = unpack(min(HERE_BYTES, limit + 1))
        if HERE_BYTES <= len(out) <= limit:
            out += await asyncio.to_thread(unpack, limit + 1 - len(out))
    except (zlib.error, zstandard.ZstdError, MemoryError) as e:
        raise Refusal(400, f"The request body is not valid {encoding}: {e}", "Send it again, or uncompressed") from None
    if len(out) > limit:
        raise _too_large(max_mb)
    return out


def _unpacker(raw: bytes, encoding: str) -> Callable[[int], bytes]:
    """What gives the next so many bytes of the body, fewer only at its end. Raises Refusal 415."""
    if encoding in ("gzip", "x-gzip"):
        return _Inflate(raw, GZIP).read
    if encoding == "deflate":
        return _Inflate(raw, ZLIB).read
    if encoding == "zstd":
        return partial(
            _read_all, zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).stream_reader(raw, read_across_frames=True)
        )
    cause = f"Content-Encoding {encoding[:40]!r} is not supported"
    remedy = f"Use one of {ENCODINGS}, or none"
    raise Refusal(415, cause, remedy, code="unsupported_encoding", headers={"accept-encoding": ENCODINGS})


def _read_all(stream: zstandard.ZstdDecompressionReader, size: int) -> bytes:
    parts = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _Inflate:
    """A stream of zlib, or several of gzip one behind another. What is cut off or followed by other bytes is wrong."""

    def __init__(self, raw: bytes, form: int) -> None:
        self._form, self._left = form, raw
        self._stream = zlib.decompressobj(form)

    def read(self, size: int) -> bytes:
        parts = []
        while size > 0:
            if self._stream.eof:
                self._left = self._stream.unused_data
                if not self._left:
                    break
                if self._form != GZIP:
                    raise zlib.error("something follows its end")
                self._stream = zlib.decompressobj(GZIP)
            part = self._stream.decompress(self._left, size)
            self._left = self._stream.unconsumed_tail
            if not part and not self._left and not self._stream.eof:
                raise zlib.error("it is cut off")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _too_large(max_mb: float) -> Refusal:
    remedy = "Shorten the conversation, or raise server.max_body_mb in the gateway's configuration"
    return Refusal(413, f"The request body is larger than {max_mb:g} MiB", remedy, code="body_too_large")
