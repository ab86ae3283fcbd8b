"""The engine as users run it: its command line in a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import httpx
import openai

ROOT = Path(__file__).resolve().parents[2]
# Threads wait for each other at the end of every tiny operation: a token of a tiny model took 100 ms where others had the cores.
# That an engine starts with all threads is tested where the appliance is started as users start it (tests/ops).
ONE_THREAD = ("--threads", "1")


class Running:
    def __init__(self, process: subprocess.Popen, base: str, log: Path) -> None:
        self.process, self.base, self.log = process, base, log
        self.http = httpx.Client(base_url=base, timeout=60)
        self.openai = openai.OpenAI(base_url=base + "/v1", api_key="x", max_retries=0)

    def wait_ready(self, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while self.http.get("/health").status_code != 200:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(c) for c in children if b"engine.process" in Path(f"/proc/{c}/cmdline").read_bytes())


@contextlib.contextmanager
def serving(model: Path, log: Path, *arguments: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "engine.cli", "serve", str(model), "--port", "0", "--name", "tiny", *ONE_THREAD, *arguments]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stderr=out, stdout=out)
    try:
        end = time.monotonic() + 120
        while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield Running(process, found[1], log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_cli(*arguments: str, module: str = "engine.cli") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


def call_cli(main: Callable[[], None], *arguments: str) -> subprocess.CompletedProcess:
    """A command line in this process, which has imported already what a process of its own imports each time."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    given = mock.patch.object(sys, "argv", ["moorage", *arguments])
    with given, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    """The last line of stderr tells the problem; nothing looks like a traceback."""
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("moorage: ") and all(w in last for w in words), done.stderr
