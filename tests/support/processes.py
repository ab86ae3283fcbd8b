"""Processes that tests may kill, each a context manager: a gateway as `moorage serve` starts it, an upstream, a redis-server."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 60


class Process:
    """`start` and `kill` as often as a test likes; killed at the end of the `with`."""

    command: list[str]
    ready = ""  # what stdout says once it may be asked

    def __init__(self) -> None:
        self.popen: subprocess.Popen[str] | None = None

    def start(self, **more: Any) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.popen = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT, **more)
        for line in self.popen.stdout:
            if self.ready in line:
                return
        raise RuntimeError(f"{self.command[:4]} did not start")

    def kill(self, signal_: int = signal.SIGKILL) -> None:
        if self.popen is not None:
            self.popen.send_signal(signal_)
            self.popen.wait(60)
            self.popen.stdout.close()
            self.popen = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Redis(Process):
    """Without persistence: a restarted one has forgotten everything."""

    ready = "Ready to accept"

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed; ops/test installs it")
        super().__init__()
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]


UPSTREAM = """
import asyncio, sys
from aiohttp import web
DELTA = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\\n\\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\\n\\ndata: [DONE]\\n\\n'
async def answer(request):
    events = int((await request.json()).get("seed") or 3)
    r = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await r.prepare(request)
    for i in range(events):
        await r.write(DELTA)
        await asyncio.sleep(0.01)
    await r.write(END)
    return r
async def health(request):
    return web.json_response({"status": "ok"})
async def main():
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1]), reuse_address=True).start()
    print("ready", flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


class Upstream(Process):
    """Streams as many events as the request's `seed` says, one every 10 ms."""

    ready = "ready"

    def __init__(self) -> None:
        super().__init__()
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-c", UPSTREAM, str(self.port)]


class GatewayProcess(Process):
    """`log` and `records` are files in `folder`; `file_limit` bytes is the most that it may write into one file."""

    def __init__(self, data: dict[str, Any], folder: Path, file_limit: int | None = None) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.log, self._limit = free_port(), folder / "log", file_limit
        self.url = f"http://127.0.0.1:{self.port}"
        data = {"records": {"path": str(folder / "records.jsonl"), "fsync": "never"}, "listen": {"port": self.port}} | data
        self.records = Path(data["records"]["path"])
        (folder / "moorage.yaml").write_text(yaml.safe_dump(data))
        self.command = [sys.executable, "-m", "gateway.cli", "serve", "-c", str(folder / "moorage.yaml")]

    def start(self, **more: Any) -> None:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, **more
            )
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.popen.poll() is None:
            try:
                urllib.request.urlopen(self.url + "/health/liveliness", timeout=2).close()
            except OSError:
                time.sleep(0.05)
                continue
            if self._limit:
                self.limit_files(self._limit)
            return
        raise RuntimeError(f"the gateway did not start: {self.log.read_text()[-800:]}")

    def kill(self, signal_: int = signal.SIGKILL) -> None:
        if self.popen is not None:
            self.popen.send_signal(signal_)
            self.popen.wait(60)
            self.popen = None

    def limit_files(self, size: int) -> None:
        """From now on: a file that grows beyond it takes nothing, as on a full disk."""
        hard = resource.prlimit(self.popen.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.popen.pid, resource.RLIMIT_FSIZE, (size, hard))

    def metric(self, name: str) -> float:
        """The value of a line of /metrics."""
        text = urllib.request.urlopen(self.url + "/metrics", timeout=30).read().decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0
