"""Content-Encoding of requests: undone, or refused in words; a bomb never unfolds, and unpacking holds up nobody."""

from __future__ import annotations

import gzip
import io
import json
import random
import threading
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gateway import body
from gateway.errors import Refusal
from tests.support.fake_upstream import FakeUpstream, Whole, message
from tests.support.gateway import Gateway, ask, settings

MB = 1 << 20


def in_a_stream(raw: bytes, window_log: int = 0) -> bytes:
    """zstd as clients write it that do not know the length beforehand, as codex does."""
    out = io.BytesIO()
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window_log)
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(out, closefd=False) as writer:
        for at in range(0, len(raw), 1000):
            writer.write(raw[at : at + 1000])
    return out.getvalue()


FORMS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP ": gzip.compress,
    "deflate": zlib.compress,
    "zstd": in_a_stream,
    "Zstd": zstandard.compress,
    "identity": bytes,
}
SERVER = {"max_body_mb": 1}


@pytest.mark.parametrize("encoding", FORMS)
@pytest.mark.parametrize("size", [0, 700_000])
async def test_what_was_packed_arrives_as_it_was(tmp_path, encoding, size) -> None:
    raw = json.dumps(ask("größe " + random.Random(1).randbytes(size // 2).hex())).encode()
    async with FakeUpstream() as up, Gateway(settings(up.base, "openai", server=SERVER), tmp_path) as gw:
        up.script(Whole(message()))
        got = await gw.post(FORMS[encoding](raw), content_encoding=encoding)
        (record,) = await gw.records(1)
    assert got.status == 200 and up.requests[0].body == raw and "content-encoding" not in up.requests[0].headers
    assert record["received"]["content_encoding"] == encoding.strip().lower().replace("identity", "")


PACKED = gzip.compress(json.dumps(ask()).encode())
REFUSED = {
    "brotli, which is not undone": ("br", b"\x0b\x02\x80{}\x03", 415, "'br' is not supported. Use one of gzip, deflate, zstd"),
    "unheard of": ("x-secret\t", b"{}", 415, "'x-secret' is not supported"),
    "one in another": ("gzip, zstd", zstandard.compress(PACKED), 415, "'gzip, zstd' is not supported"),
    "twice the same": ("gzip, gzip", gzip.compress(PACKED), 415, "'gzip, gzip' is not supported"),
    "not what it says": ("gzip", b'{"model":"m"}', 400, "not valid gzip"),
    "another form": ("zstd", PACKED, 400, "not valid zstd"),
    "cut off": ("gzip", PACKED[:-9], 400, "not valid gzip: it is cut off"),
    "cut off at once": ("deflate", b"", 400, "not valid deflate: it is cut off"),
    "followed by other bytes": ("gzip", PACKED + b"more", 400, "not valid gzip"),
    "followed by another": ("deflate", zlib.compress(b"{}") * 2, 400, "not valid deflate: something follows"),
    "half of a zstd frame": ("zstd", in_a_stream(json.dumps(ask("x" * 9000)).encode())[:-20], 400, "not valid"),
    "a gzip bomb": ("gzip", gzip.compress(bytes(64 * MB)), 413, "larger than 1 MiB"),
    "a deflate bomb": ("deflate", zlib.compress(bytes(64 * MB)), 413, "larger than 1 MiB"),
    "a zstd bomb": ("zstd", zstandard.compress(bytes(64 * MB)), 413, "larger than 1 MiB"),
    "many bombs in a row": ("gzip", gzip.compress(bytes(MB // 2)) * 9, 413, "larger than 1 MiB"),
    "many frames in a row": ("zstd", zstandard.compress(bytes(MB // 2)) * 9, 413, "larger than 1 MiB"),
    "a window of 128 MiB": ("zstd", in_a_stream(b"{}" * 9000, window_log=27), 400, "not valid zstd"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_what_cannot_be_undone_is_refused_in_words(tmp_path, case, path) -> None:
    encoding, packed, status, words = REFUSED[case]
    async with FakeUpstream() as up, Gateway(settings(up.base, server=SERVER), tmp_path) as gw:
        got = await gw.post(packed, path, content_encoding=encoding)
    assert got.status == status and words in got.json["error"]["message"] and not up.requests
    assert got.headers.get("accept-encoding") == ("gzip, deflate, zstd" if status == 415 else None)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
async def test_members_and_frames_in_a_row_are_one_body(encoding, pack) -> None:
    parts = [b"a" * 10, b"", random.Random(2).randbytes(body.HERE_BYTES), b"z"]
    assert await body.decode(b"".join(map(pack, parts)), encoding, 1) == b"".join(parts)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
async def test_long_bodies_are_unpacked_beside_the_event_loop(monkeypatch, encoding, pack) -> None:
    """And a bomb is not unpacked further than to know that it is one."""
    read: list[tuple[int, threading.Thread]] = []
    make = body._unpacker

    def watched(raw: bytes, encoding: str):
        unpack = make(raw, encoding)

        def look(size: int) -> bytes:
            out = unpack(size)
            read.append((len(out), threading.current_thread()))
            return out

        return look

    monkeypatch.setattr(body, "_unpacker", watched)
    await body.decode(pack(b"x" * (body.HERE_BYTES - 1)), encoding, 1)
    assert [size for size, _ in read] == [body.HERE_BYTES - 1]
    with pytest.raises(Refusal, match="larger than 1 MiB"):
        await body.decode(pack(bytes(64 * MB)), encoding, 1)
    (_, here), (_, first), (rest, there) = read
    assert here is first is threading.current_thread() is not there
    assert rest == MB + 1 - body.HERE_BYTES


@given(st.binary(max_size=400), st.sampled_from(sorted(FORMS)), st.booleans(), st.integers(0, 400))
async def test_any_bytes_are_undone_or_refused(raw: bytes, encoding: str, packed: bool, end: int) -> None:
    name = encoding.strip().lower()
    given_ = FORMS[encoding](raw)[:end] if packed else raw
    try:
        out = await body.decode(given_, name, 1) if name != "identity" else raw
    except Refusal as refusal:
        assert refusal.status == 400 and "\n" not in refusal.text
    else:
        assert raw.startswith(out) or not packed
