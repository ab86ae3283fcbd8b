"""A real gateway on a free port inside the test's event loop, and a small client for it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from gateway.app import App
from gateway.config_file import parse
from gateway.cork import CorkedProtocol
from gateway.server import GRACE_S, bind


def settings(upstream: str, kind: str = "moorage", **sections: Any) -> dict[str, Any]:
    """A configuration with one model `m` at `upstream`; `kind` moorage | openai."""
    base = upstream if kind == "moorage" else upstream + "/v1"
    entry = {"model_name": "m", "litellm_params": {"model": f"{kind}/m", "api_base": base}}
    return {"model_list": [entry]} | sections


@dataclass
class Got:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each event; "[DONE]" as a string; comments left out."""
        out = []
        for part in self.body.split(b"\n\n"):
            data = [line[6:] for line in part.split(b"\n") if line.startswith(b"data: ")]
            if data:
                out.append("[DONE]" if data[0] == b"[DONE]" else json.loads(b"\n".join(data)))
        return out

    def text(self, field: str = "content") -> str:
        deltas = [c.get("delta", {}) for e in self.events if isinstance(e, dict) for c in e.get("choices", [])]
        return "".join(d.get(field) or "" for d in deltas)


class Gateway:
    """`async with Gateway(settings(up.base), tmp_path) as gw`: gw.url, gw.post, gw.get; `gw.records()` after or during."""

    def __init__(self, data: dict[str, Any], tmp: Path) -> None:
        self.path = tmp / "records.jsonl"
        data = {"records": {"path": str(self.path), "fsync": "never"}} | data
        self.app = App(parse(data, "test.yaml", {}))
        self._listener = bind("127.0.0.1", 0, self.app.config.timeouts.idle)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                http=CorkedProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GRACE_S,  # as the product has it
            )
        )

    async def __aenter__(self) -> Gateway:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.005)
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.close()
        self._server.should_exit = True
        await self._task
        self._listener.close()

    async def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Got:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        async with self.http.post(self.url + path, data=raw, headers=head) as r:
            return Got(r.status, {k.lower(): v for k, v in r.headers.items()}, await r.read())

    async def get(self, path: str, **headers: str) -> Got:
        async with self.http.get(self.url + path, headers={k.replace("_", "-"): v for k, v in headers.items()}) as r:
            return Got(r.status, {k.lower(): v for k, v in r.headers.items()}, await r.read())

    @property
    def connections(self) -> int:
        """Clients that are connected."""
        return len(self._server.server_state.connections)

    async def records(self, count: int = 1) -> list[dict[str, Any]]:
        """The records written, once there are `count` of them."""
        for _ in range(3000):
            # Whole lines only, the last may be half written. Not splitlines: U+2028 in a text ends no line of JSONL.
            lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
            if len(lines) >= count:
                return [json.loads(line) for line in lines]
            await asyncio.sleep(0.01)
        raise AssertionError(f"{len(lines)} records after 30 s, expected {count}")


def ask(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]} | more
