"""llama.cpp as a second opinion: its server and quantizer, from the build MOORAGE_LLAMA_CPP names (the folder that has bin/)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch


def program(name: str) -> Path:
    build = os.environ.get("MOORAGE_LLAMA_CPP")
    if not build:
        pytest.skip("MOORAGE_LLAMA_CPP names no llama.cpp build")
    path = Path(build) / "bin" / name
    assert path.exists(), f"MOORAGE_LLAMA_CPP={build} has no bin/{name}"
    return path


def as_float32(gguf: Path, folder: Path) -> Path:
    """The same weights, dequantized by llama.cpp: with them it computes in float32 instead of rounding activations to 8 bits."""
    out = folder / "f32.gguf"
    command = [program("llama-quantize"), "--allow-requantize", gguf, out, "F32", "1"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return out


class LlamaServer:
    def __init__(self, port: int) -> None:
        self.port = port

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)

    def tokens(self, text: str) -> list[int]:
        return self.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]

    def greedy(self, prompt: list[int], count: int, vocab: int = 0) -> tuple[list[int], torch.Tensor]:
        """`count` greedy tokens after `prompt`, and with `vocab` the log-probabilities [count, vocab] they were chosen from."""
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False, "return_tokens": True}
        if vocab:
            body["n_probs"] = vocab
        reply = self.post("/completion", body)
        rows = torch.full((len(reply["tokens"]), vocab), float("-inf"))
        for row, step in zip(rows, reply.get("completion_probabilities", ()), strict=False):
            for entry in step["top_logprobs"]:
                row[entry["id"]] = entry["logprob"]
        return reply["tokens"], rows


@contextmanager
def llama_server(model: Path, log: Path) -> Iterator[LlamaServer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        program("llama-server"),
        "-m",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-t",
        "2",
        "-c",
        "2048",
        "-np",
        "1",
    ]
    command += ["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    with log.open("w") as sink, subprocess.Popen(command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL) as process:
        try:
            wait_ready(port, process, log)
            yield LlamaServer(port)
        finally:
            process.terminate()


def wait_ready(port: int, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"llama-server did not get ready: {log.read_text()[-2000:]}")
