"""Engine and gateway as a user runs them: two command lines, real ports, real files. Used by every end-to-end test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.protocol import parse_log_line
from tests.support import meaning
from tests.support.engine_process import ONE_THREAD
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = Path(os.environ.get("MOORAGE_DEMO_MODEL", ROOT / "ops" / "demo_model"))
MODEL = "moorage-demo"
# The same model under rules that make its answers end, for agents whose prompts it may not cope with. Cut answers are no way out:
# an agent sends what it got and asks for the rest, until its prompt is too long.
BOUNDED = "moorage-demo-bounded"
CUT = "moorage-demo-cut"  # the same model, every answer cut off after two tokens


def eventually(condition: Callable[[], object], seconds: float = 30.0, what: str = "it") -> object:
    """Poll until `condition` is truthy; return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.05)
    return value


def get(url: str) -> tuple[int, dict] | None:
    """Status and JSON body of a GET; None when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError:
        return None


def ending_rules(model: Path) -> dict:
    """The gateway policy of BOUNDED: what repeats becomes unlikely and the end of a turn likely, wherever the text has led.

    A model that repeats one digit has to pass five hundred of them without; with these rules it is done after a few dozen. Calls
    that fit no schema go to the agent as they are: its answer to them is part of what is tested.
    """
    added = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    end = next(str(token["id"]) for token in added if token["content"] == "<|im_end|>")
    clamp = {"frequency_penalty": {"force": 0.5}, "logit_bias": {"force": {end: 5}}, "output_tokens": {"max": 2048}}
    return {"model": BOUNDED, "clamp": clamp, "tools": {"otherwise": "pass"}}


def check_meaning(record: dict) -> None:
    """What the engine was sent says what the agent said: texts, calls, results, thoughts, in their order, and the same tools."""
    asked, sent = json.loads(record["received"]["body"]), json.loads(record["sent"]["body"])
    read = {"chat": meaning.of_chat, "messages": meaning.of_messages, "responses": meaning.of_responses}[record["dialect"]]
    assert meaning.of_chat(sent) == read(asked)
    offered = meaning.tools_of(asked)
    assert meaning.tools_of(sent) == offered and bool(offered) == bool(asked.get("tools"))


@dataclass
class Process:
    popen: subprocess.Popen
    log: Path
    url: str

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def events(self, name: str) -> list[dict[str, str]]:
        """The fields of every `kv cache NAME` line so far."""
        parsed = (parse_log_line(line) for line in self.lines())
        return [fields for event, fields in filter(None, parsed) if event == f"kv cache {name}"]

    def wait_healthy(self, seconds: float = 180.0) -> None:
        def ready() -> bool:
            assert self.popen.poll() is None, "\n".join(self.lines()[-20:])
            answer = get(self.url + "/health")
            return answer is not None and answer[0] == 200

        eventually(ready, seconds, f"{self.url}/health = 200")


@contextmanager
def started(command: list[str], log: Path, url: str) -> Iterator[Process]:
    """Run a command in a group of its own; the whole group is ended at the end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as sink:
        popen = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        yield Process(popen, log, url)
    finally:
        popen.terminate()
        try:
            popen.wait(20)
        finally:
            if popen.poll() is None:
                os.killpg(popen.pid, signal.SIGKILL)
                popen.wait()
        eventually(lambda: not alive(popen.pid), 5, f"the end of every process of {' '.join(command[:4])}")


def alive(group: int) -> bool:
    """Whether a process group still has members."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Service:
    engine: Process
    gateway: Process
    records_path: Path

    @property
    def base_url(self) -> str:
        return self.gateway.url + "/v1"

    def records(self, count: int, since: float = 0.0) -> list[dict]:
        """The records of requests that came at `since` (seconds since 1970) or later, once there are `count` of them.

        By time and not by number: a record is written behind its answer, so an earlier test's may still come.
        """

        def read() -> list[dict]:
            lines = self.records_path.read_text().split("\n")[:-1] if self.records_path.exists() else []  # whole ones
            return [record for record in map(json.loads, lines) if record["time"] >= since]

        eventually(lambda: len(read()) >= count, what=f"{count} records")
        return read()


@contextmanager
def service(
    folder: Path, model: Path = DEMO_MODEL, options: tuple[str, ...] = (), sections: dict | None = None
) -> Iterator[Service]:
    """Engine and gateway on free ports, ready. `options` go to the engine, `sections` into the gateway's configuration."""
    engine_port, gateway_port = free_port(), free_port()
    engine_url, gateway_url = (f"http://127.0.0.1:{port}" for port in (engine_port, gateway_port))
    records = folder / "records.jsonl"
    config = folder / "gateway.yaml"
    place = {"model": f"moorage/{MODEL}", "api_base": engine_url}
    written = {
        "listen": {"host": "127.0.0.1", "port": gateway_port},
        "records": {"path": str(records)},
        "model_list": [{"model_name": name, "litellm_params": place} for name in (MODEL, BOUNDED, CUT)],
    }
    if (model / "tokenizer.json").exists():
        written["policies"] = [ending_rules(model), {"model": CUT, "clamp": {"output_tokens": {"max": 2}}}]
    config.write_text(json.dumps(written | (sections or {})))
    engine = [
        sys.executable,
        "-m",
        "engine.cli",
        "serve",
        str(model),
        "--name",
        MODEL,
        "--port",
        str(engine_port),
        *ONE_THREAD,
        *options,
    ]
    gateway = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
    with (
        started(engine, folder / "engine.log", engine_url) as engine_process,
        started(gateway, folder / "gateway.log", gateway_url) as gateway_process,
    ):
        engine_process.wait_healthy()
        gateway_process.wait_healthy()
        yield Service(engine_process, gateway_process, records)
