#!/usr/bin/env python3
"""The load client of `gateway.py`: one process, one job a line on stdin, one result a line on stdout.

A job is `{"seconds": s, "groups": [{"port", "path", "headers", "body", "concurrency", "pause", "method", "stamps"}]}`: every
group keeps `concurrency` connections in a closed loop, all groups at once. With `bodies` and `mark` instead of `body`, each
connection sends those one after the other and then again as a conversation of its own: `mark` gets a number that this
process never gave it before. A result
has, for each group, the latencies in microseconds: `first` (first event; `opening`: those of a conversation's first request),
`total` (whole answer), `stamps` (how old each stamped event was), the number of bad answers, and one whole answer for
the caller to check. A bare asyncio protocol on uvloop, so that it is never the bottleneck.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import socket
import sys
import time
from typing import Any

import uvloop

SESSIONS = itertools.count(1)
STAMP = re.compile(rb'"t(\d{6,}) "')


class Group:
    """What one kind of request did."""

    def __init__(self, job: dict[str, Any], until: float) -> None:
        self.port, self.pause, self.until = job["port"], job.get("pause", 0.0), until
        self.stamped = job.get("stamps", False)
        self.most = job.get("requests", 1 << 60)
        self.sent = 0
        head = f"{job.get('method', 'POST')} {job['path']} HTTP/1.1\r\nhost: bench\r\n"
        head += "".join(f"{k}: {v}\r\n" for k, v in job.get("headers", {}).items())
        bodies = [base64.b64decode(b) for b in job.get("bodies") or [job.get("body", "")]]
        self.requests = [head.encode() + b"content-length: %d\r\n\r\n" % len(b) + b for b in bodies]
        self.mark = job.get("mark", "").encode()
        self.opening: list[int] = []
        self.whole = job.get("method") == "GET"
        self.first: list[int] = []
        self.total: list[int] = []
        self.stamps: list[int] = []
        self.bad = 0
        self.sample = b""
        self.ended = 0.0

    def result(self, began: float) -> dict[str, Any]:
        return {
            "count": len(self.total),
            "bad": self.bad,
            "seconds": self.ended - began,
            "first": self.first,
            "opening": self.opening,
            "total": self.total,
            "stamps": self.stamps,
            "sample": self.sample.decode("utf-8", "replace"),
        }


class Connection(asyncio.Protocol):
    """One connection of a group in its closed loop; `done` is set when its time is over."""

    def __init__(self, group: Group) -> None:
        self.group, self.loop = group, asyncio.get_running_loop()
        self.done = self.loop.create_future()
        self.parts: list[bytes] = []
        self.seen_first = self.busy = False
        self.began = self.length = 0
        self.turn, self.session = -1, 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        group = self.group
        if self.loop.time() >= group.until or group.sent >= group.most:
            self.finish()
            return
        group.sent += 1
        self.parts.clear()
        self.seen_first, self.busy, self.length = False, True, -1
        request = self.request()
        self.began = time.perf_counter_ns()
        self.transport.write(request)

    def request(self) -> bytes:
        group = self.group
        self.turn = (self.turn + 1) % len(group.requests)
        request = group.requests[self.turn]
        if not group.mark:
            return request
        if self.turn == 0:
            self.session = next(SESSIONS)
        mark = group.mark.rstrip(b"0")
        return request.replace(group.mark, mark + b"%0*d" % (len(group.mark) - len(mark), self.session), 1)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        group = self.group
        self.parts.append(data)
        if not self.seen_first and (b"data: {" in data or group.whole):
            self.seen_first = True
            group.first.append((now - self.began) // 1000)
            if group.mark and self.turn == 0:
                group.opening.append(group.first[-1])
        if group.stamped:
            clock = time.monotonic_ns()
            group.stamps += [(clock - int(m)) // 1000 for m in STAMP.findall(data)]
        if self.complete(data):
            self.answered(now)

    def complete(self, data: bytes) -> bool:
        if self.length < 0:
            head, found, _ = b"".join(self.parts).partition(b"\r\n\r\n")
            if not found:
                return False
            declared = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
            self.length = len(head) + 4 + int(declared[1]) if declared else 0
        if self.length:
            return sum(map(len, self.parts)) >= self.length
        return (data if len(data) >= 7 else b"".join(self.parts)).endswith(b"\r\n0\r\n\r\n")

    def answered(self, now: int) -> None:
        group, raw = self.group, b"".join(self.parts)
        self.busy = False
        good = raw[9:12] == b"200" and (group.whole or (b"[DONE]" in raw and b'"error"' not in raw))
        if good:
            group.total.append((now - self.began) // 1000)
        else:
            group.bad += 1
        if not good or not group.sample:
            group.sample = raw
        if group.pause:
            self.loop.call_later(group.pause, self.next)
        else:
            self.next()

    def finish(self) -> None:
        self.group.ended = max(self.group.ended, self.loop.time())
        self.transport.close()
        if not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.busy:
            self.group.bad += 1
        if not self.done.done():
            self.group.ended = max(self.group.ended, self.loop.time())
            self.done.set_result(None)


async def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    groups = [Group(g, began + job["seconds"]) for g in job["groups"]]
    connections = []
    for group, settings in zip(groups, job["groups"], strict=True):
        for _ in range(settings.get("concurrency", 1)):
            transport, connection = await loop.create_connection(lambda group=group: Connection(group), "127.0.0.1", group.port)
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections.append(connection)
    await asyncio.wait([c.done for c in connections], timeout=job["seconds"] + 60)
    return [group.result(began) for group in groups]


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            print(json.dumps(runner.run(run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
