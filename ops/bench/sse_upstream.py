#!/usr/bin/env python3
"""The fake upstream of `gateway.py`: answers every POST with one of four scripted event streams, as cheaply as Python can.

The first step of the path says which: `/plain` text, `/calls` text and a tool call, `/chunks` many events back to back, `/paced`
events at an interval, each carrying the monotonic clock at which it was sent. Prints its port and serves until its stdin closes.
It must never be the bottleneck: a bare asyncio protocol on uvloop, answers built once, no JSON read.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

CHUNK_EVENTS = 256  # of one `/chunks` answer
PACED_EVENTS = 100  # of one `/paced` answer
PACE_S = 0.005  # between two of them: 200 tokens/s, faster than any engine on two cores decodes one stream
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
HEALTH = json.dumps({"status": "ok", "models": ["bench"]}).encode()
USAGE = {"prompt_tokens": 900, "completion_tokens": 18, "total_tokens": 918, "prompt_tokens_details": {"cached_tokens": 850}}
WORDS = [
    "The",
    " answer",
    " to",
    " a",
    " question",
    " of",
    " the",
    " usual",
    " kind",
    ",",
    " said",
    " in",
    " sixteen",
    " pieces",
    " here",
    ".",
]
ARGUMENTS = ['{"path":', '"src/main.py"', ',"line":', "12}"]


def event(delta: dict | None, finish: str | None = None, usage: dict | None = None) -> bytes:
    """One event as vLLM writes it."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
    data = {
        "id": "chatcmpl-bench",
        "object": "chat.completion.chunk",
        "created": 1764000000,
        "model": "bench",
        "choices": choices,
    }
    if usage:
        data["usage"] = usage
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def framed(data: bytes) -> bytes:
    """As one HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def tail(finish: str) -> bytes:
    return event({}, finish) + event(None, usage=USAGE) + b"data: [DONE]\n\n"


def text_answer() -> tuple[bytes, bytes]:
    """(first event, all others)"""
    first = event({"role": "assistant", "content": WORDS[0]})
    return first, b"".join(event({"content": w}) for w in WORDS[1:]) + tail("stop")


def call_answer() -> tuple[bytes, bytes]:
    first = event({"role": "assistant", "content": WORDS[0]})
    begin = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "read", "arguments": ""}}
    calls = [begin, *({"index": 0, "function": {"arguments": a}} for a in ARGUMENTS)]
    rest = [event({"content": w}) for w in WORDS[1 : -len(calls)]] + [event({"tool_calls": [c]}) for c in calls]
    return first, b"".join(rest) + tail("tool_calls")


TWO_WRITES = {b"plain": text_answer(), b"calls": call_answer()}
CHUNKS = [framed(event({"content": f"t{i} "})) for i in range(CHUNK_EVENTS)]


class Upstream(asyncio.Protocol):
    """One connection; requests on it follow one another."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport, self.loop = transport, asyncio.get_running_loop()
        self.buffer, self.path, self.missing = b"", b"", -1

    def data_received(self, data: bytes) -> None:
        if self.missing > 0:  # inside a body: count only
            self.missing -= len(data)
        else:
            self.buffer += data
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return
            self.buffer, self.path = b"", head.split(b" ", 2)[1]
            self.missing = _length(head) - len(rest)
        if self.missing <= 0:
            self.missing = -1
            self.answer(self.path[1:].partition(b"/")[0])

    def answer(self, kind: bytes) -> None:
        if kind in TWO_WRITES:
            first, rest = TWO_WRITES[kind]
            self.transport.write(HEAD + framed(first))
            # The next turn of the loop: a second segment, as when the first token comes before the others.
            self.loop.call_soon(self.transport.write, framed(rest) + END)
        elif kind == b"chunks":
            self.transport.write(HEAD + CHUNKS[0])
            self.loop.call_soon(self.chunk, 1)
        elif kind == b"paced":
            self.transport.write(HEAD)
            self.paced(0, self.loop.time())
        else:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(HEALTH)
            self.transport.write(head + HEALTH)

    def chunk(self, at: int) -> None:
        if self.transport.is_closing():
            return
        if at < CHUNK_EVENTS:
            self.transport.write(CHUNKS[at])
            self.loop.call_soon(self.chunk, at + 1)
        else:
            self.transport.write(framed(tail("stop")) + END)

    def paced(self, at: int, due: float) -> None:
        if self.transport.is_closing():
            return
        if at < PACED_EVENTS:
            self.transport.write(framed(event({"content": f"t{time.monotonic_ns()} "})))
            self.loop.call_at(due + PACE_S, self.paced, at + 1, due + PACE_S)
        else:
            self.transport.write(framed(tail("stop")) + END)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        if line[:15].lower() == b"content-length:":
            return int(line[15:])
    return 0


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Upstream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
