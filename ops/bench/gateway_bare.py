#!/usr/bin/env python3
"""A pass-through that does nothing: the floor under every gateway written in Python, for `gateway.py`.

uvloop and httptools on both sides, a connection to the upstream kept for the next request, no JSON, no task, no record: bytes of
a request go to the upstream, bytes of its answer to the client. What a gateway takes longer than this is its own doing.

    gateway_bare.py UPSTREAM_PORT     prints its port and serves until its stdin closes
"""

from __future__ import annotations

import asyncio
import sys

import httptools
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Front(asyncio.Protocol):
    """A client's connection; one request at a time."""

    def __init__(self, upstream: int, idle: list[Back]) -> None:
        self.upstream, self.idle = upstream, idle
        self.parser = httptools.HttpRequestParser(self)
        self.url, self.parts = b"", []
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)

    def on_message_complete(self) -> None:
        body, self.parts = b"".join(self.parts), []
        if not body:  # a probe: it is there
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        request = b"POST %s HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n%s" % (self.url, len(body), body)
        if self.idle:
            self.idle.pop().ask(request, self)
        else:
            task = asyncio.get_running_loop().create_task(self.connect(request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def connect(self, request: bytes) -> None:
        _, back = await asyncio.get_running_loop().create_connection(lambda: Back(self.idle), "127.0.0.1", self.upstream)
        back.ask(request, self)


class Back(asyncio.Protocol):
    """A connection to the upstream."""

    def __init__(self, idle: list[Back]) -> None:
        self.idle = idle
        self.parser = httptools.HttpResponseParser(self)
        self.out: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def ask(self, request: bytes, front: Front) -> None:
        self.front = front
        self.out.append(HEAD)
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        front = self.front
        self.parser.feed_data(data)
        if not front.transport.is_closing():
            front.transport.write(b"".join(self.out))
        self.out.clear()

    def on_body(self, part: bytes) -> None:
        self.out.append(b"%x\r\n%s\r\n" % (len(part), part))

    def on_message_complete(self) -> None:
        self.out.append(b"0\r\n\r\n")
        self.idle.append(self)


async def main() -> None:
    loop = asyncio.get_running_loop()
    idle: list[Back] = []
    server = await loop.create_server(lambda: Front(int(sys.argv[1]), idle), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
