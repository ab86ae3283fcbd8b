"""The processes `gateway.py` measures: load client, fake upstream, the gateway and its peers. Each a context manager."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import gateway_bodies as bodies
import machine
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEY = "bench-key-of-no-worth"
START_S = 180
PAGE = os.sysconf("SC_PAGE_SIZE")

POLICIES = [
    {"clamp": {"temperature": {"max": 1}, "output_tokens": {"max": 8192}, "top_*": {"forbid": "drop"}}},
    {"normalise": {"tool_schemas": True, "clock": "move", "environment": "move"}},
    {"tools": {"check": True, "repair": True, "retries": 1}},
    {"model": "bench-calls", "thinking": {"force": "off", "on_violation": "strip", "retry": True}},
]

# What LiteLLM's users write to get the same: bounds, thinking off, one JSON line a request.
HOOKS = """
import json
from litellm.integrations.custom_logger import CustomLogger


class Hooks(CustomLogger):
    def __init__(self):
        super().__init__()
        self.file = open(%r, "a")

    async def async_pre_call_hook(self, user_api_key_dict, cache, data, call_type):
        data["temperature"] = min(data.get("temperature") or 0, 1)
        data["max_tokens"] = min(data.get("max_tokens") or 8192, 8192)
        if data.get("tools"):
            data["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
        return data

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        record = {"messages": kwargs.get("messages"), "answer": response_obj.model_dump(), "start": str(start_time)}
        self.file.write(json.dumps(record, default=str) + "\\n")


hooks = Hooks()
"""


def own_seconds() -> float:
    """CPU seconds of this process and everything it started."""
    return machine.process_seconds(machine.descendants(os.getpid()))


class Process:
    """A started program; `lines()` talks with it when it was given pipes."""

    def __init__(self, command: list[str], **more: Any) -> None:
        self.process = subprocess.Popen(command, **more)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Client(Process):
    def __init__(self) -> None:
        super().__init__([sys.executable, str(HERE / "load.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise SystemExit("the load client died")
        return json.loads(line)


class Upstream(Process):
    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "sse_upstream.py")]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())


class Target:
    """Where requests go. `path` may hold {kind}, for the fake upstream's own paths."""

    name = ""
    path = "/v1/chat/completions"
    health_path = "/health"

    def __init__(self, port: int, pid: int = 0) -> None:
        self.port, self.pid = port, pid

    def group(self, kind: str, body: bytes) -> dict[str, Any]:
        """A load group for this kind of answer; add concurrency and the like."""
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "user-agent": "opencode/1.0"}
        path = self.path.format(kind=kind)
        return {"port": self.port, "path": path, "headers": headers, "body": base64.b64encode(body).decode()}

    def session(self, bodies: tuple[bytes, ...], mark: str) -> dict[str, Any]:
        """A load group of plain answers that sends these as conversations."""
        return self.group("plain", b"") | {"bodies": [base64.b64encode(b).decode() for b in bodies], "mark": mark}

    def health(self) -> dict[str, Any]:
        return {"port": self.port, "path": self.health_path, "method": "GET"}

    def cpu_seconds(self) -> float:
        return machine.process_seconds(machine.descendants(self.pid)) if self.pid else 0.0

    def resident_mb(self) -> float:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in machine.descendants(self.pid)]
        return sum(pages) * PAGE / 1e6


class Direct(Target):
    name, path = "direct", "/{kind}/v1/chat/completions"


class Bare(Target, Process):
    """The floor: a pass-through that looks at nothing."""

    name, path = "bare", "/{kind}/v1/chat/completions"

    def __init__(self, upstream: int) -> None:
        command = [sys.executable, str(HERE / "gateway_bare.py"), str(upstream)]
        Process.__init__(self, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        Target.__init__(self, int(self.process.stdout.readline()), self.process.pid)


class Asgi(Target, Process):
    """The yardstick: a pass-through in the stack that ours is made of."""

    name, path = "asgi", "/{kind}/v1/chat/completions"

    def __init__(self, upstream: int) -> None:
        command = [sys.executable, str(HERE / "gateway_asgi.py"), str(upstream)]
        Process.__init__(self, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        Target.__init__(self, int(self.process.stdout.readline()), self.process.pid)


class Gateway(Target, Process):
    """Ours, as `moorage serve` starts it."""

    name = "moorage"

    def __init__(self, tmp: Path, upstream: int) -> None:
        models = [
            {
                "model_name": name,
                "litellm_params": {"model": f"moorage/{name}", "api_base": f"http://127.0.0.1:{upstream}/{kind}"},
            }
            for kind, name in bodies.MODELS.items()
        ]
        key = {"name": "desk", "key": KEY, "rpm": 10**9, "tpm": 10**12, "budget": 10**9, "concurrency": 10**6}
        config = {"model_list": models, "keys": [key], "policies": POLICIES, "listen": {"port": free_port()}}
        config["records"] = {"path": str(tmp / "records.jsonl")}
        path = tmp / "moorage.yaml"
        path.write_text(yaml.safe_dump(config))
        self.log = (tmp / "gateway.log").open("wb")
        command = [sys.executable, "-m", "gateway.cli", "serve", "-c", str(path)]
        Process.__init__(self, command, cwd=ROOT, stdout=self.log, stderr=self.log, env=os.environ | {"PYTHONPATH": str(ROOT)})
        Target.__init__(self, config["listen"]["port"], self.process.pid)
        wait_ready(self.process, f"http://127.0.0.1:{self.port}/health/liveliness", tmp / "gateway.log")


class LiteLLM(Target, Process):
    """LiteLLM's proxy, one worker."""

    name = "litellm"
    health_path = "/health/liveliness"  # its /health asks every upstream for a completion

    def __init__(self, tmp: Path, upstream: int, python: Path) -> None:
        models = [
            {
                "model_name": name,
                "litellm_params": {
                    "model": f"openai/{name}",
                    "api_base": f"http://127.0.0.1:{upstream}/{kind}/v1",
                    "api_key": "none",
                },
            }
            for kind, name in bodies.MODELS.items()
        ]
        settings = {"callbacks": ["bench_hooks.hooks"], "drop_params": True}
        config = {"model_list": models, "litellm_settings": settings, "general_settings": {"master_key": KEY}}
        (tmp / "litellm.yaml").write_text(yaml.safe_dump(config))
        (tmp / "bench_hooks.py").write_text(HOOKS % str(tmp / "litellm.jsonl"))
        self.log, port = (tmp / "litellm.log").open("wb"), free_port()
        command = [
            str(python.parent / "litellm"),
            "--config",
            str(tmp / "litellm.yaml"),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
        Process.__init__(
            self, [*command, "--telemetry", "False"], stdout=self.log, stderr=self.log, cwd=tmp, env=os.environ | quiet
        )
        Target.__init__(self, port, self.process.pid)
        wait_ready(self.process, f"http://127.0.0.1:{port}/health/liveliness", tmp / "litellm.log")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"a server ended with {process.returncode}: {log.read_text()[-800:]}")
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"not ready after {START_S} s: {url}")
