#!/usr/bin/env python3
"""A pass-through in the stack that the gateway is made of, for `gateway.py`: uvicorn, httptools, uvloop, one aiohttp session.

It reads a request's body, posts it, and sends every piece of the answer on; no JSON, no policy, no record. Figures of gateways
differ by half and more between machines; what such a pass-through reaches on the one at hand is the measure to hold them against.

    gateway_asgi.py UPSTREAM_PORT     prints its port and serves until it is told to stop
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import uvicorn

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class PassThrough:
    """The ASGI application."""

    def __init__(self, upstream: int) -> None:
        self.upstream = f"http://127.0.0.1:{upstream}"
        self.session: aiohttp.ClientSession

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.live(receive, send)
        elif scope["method"] == "GET":  # is it there?
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
        else:
            await self.pass_on(scope["path"], receive, send)

    async def live(self, receive: Receive, send: Send) -> None:
        await receive()
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.session.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def pass_on(self, path: str, receive: Receive, send: Send) -> None:
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        async with self.session.post(self.upstream + path, data=b"".join(parts)) as response:
            head = [(b"content-type", response.headers["content-type"].encode())]
            await send({"type": "http.response.start", "status": response.status, "headers": head})
            async for data in response.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body"})


def main() -> None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    print(listener.getsockname()[1], flush=True)
    app = PassThrough(int(sys.argv[1]))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        proxy_headers=False,
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
