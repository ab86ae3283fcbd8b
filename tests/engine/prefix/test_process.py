"""The demo model in a server process of its own: real signals between the turns of an agent, real files, the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.harness import DEMO_MODEL, ROOT, Process, eventually, started
from tests.engine.prefix.talk import SLACK, TOOLS, opening
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

TURN = 130  # tokens of a call, its result and the borders around them, at most


@contextmanager
def server(folder: Path, name: str) -> Iterator[Process]:
    port = free_port()
    command = [sys.executable, "-m", "engine.cli", "serve", str(DEMO_MODEL), "--port", str(port), "--name", "m"]
    options = ["--kv-disk", str(folder / "kv"), "--max-context", "8192", "--threads", "1", "--kv-memory", "256M"]
    with started([*command, *options], folder / f"{name}.log", f"http://127.0.0.1:{port}") as process:
        process.wait_healthy()
        yield process


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def turn(process: Process, messages: list[dict]) -> dict:
    """One tool round: the model is made to call a tool; its message and a result are added. Returns `usage.moorage`."""
    body = {"model": "m", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 200, "moorage": {"session": "s"}}
    choice = {"type": "function", "function": {"name": "read_file"}}
    reply = post(process.url + "/v1/chat/completions", {**body, "tool_choice": choice, "reasoning_effort": "none"})
    message = reply["choices"][0]["message"]
    messages.append(message)
    messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a line of the file\n" * 12})
    return reply["usage"]["moorage"]


def written(process: Process) -> int:
    with urllib.request.urlopen(process.url + "/v1/cache/status", timeout=10) as response:
        status = json.load(response)["disk"]
    return status["counters"].get("stored", 0) if not status["pending"] else 0


def prepared(process: Process) -> int:
    """Answers whose next turn is ready. One that is asked for earlier may lose the answer, however fast the machine is."""
    with urllib.request.urlopen(process.url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("moorage_next_turns_total{"))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_between_turns_costs_the_next_turn_nothing(tmp_path: Path, how: signal.Signals) -> None:
    messages, used = opening(), []
    for number in range(3):
        with server(tmp_path, f"run{number}") as process:
            for count in (1, 2):
                used.append(turn(process, messages))
                eventually(lambda: prepared(process) == count, what="the next turn prepared")  # noqa: B023
            eventually(lambda: written(process), what="the next turn on disk")  # noqa: B023
            if how == signal.SIGKILL:
                os.killpg(process.popen.pid, how)
            else:
                process.popen.terminate()
            process.popen.wait(30)
    assert [u["source"] for u in used] == ["none", "ram", "disk", "ram", "disk", "ram"], used
    assert all(u["lost"] <= SLACK and u["new"] <= TURN for u in used[1:]), used


def test_the_command_line_shows_empties_and_forgets(tmp_path: Path) -> None:
    def cache(*arguments: str) -> str:
        command = [sys.executable, "-m", "gateway.cli", "cache", *arguments, "--url", process.url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with server(tmp_path, "run") as process:
        messages = opening()
        turn(process, messages)
        eventually(lambda: written(process), what="the turn on disk")
        assert json.loads(cache("status"))["disk"]["records"] > 0
        assert json.loads(cache("delete", "s"))["disk_records"] > 0
        turn(process, messages)
        cache("rebuild", "--flush", "all")
        assert turn(process, messages)["source"] == "none"
        eventually(lambda: written(process), what="the turn on disk")
        assert json.loads(cache("rebuild", "--flush", "ram"))["gone"]["ram_tokens"] > 0
        assert turn(process, messages)["source"] == "disk"
        gone = json.loads(cache("rebuild", "--session", "s", "--disk", "1G"))
        assert gone["gone"]["ram_tokens"] > 0 and gone["status"]["disk"]["budget_bytes"] == 1 << 30
        assert turn(process, messages)["source"] == "none"
