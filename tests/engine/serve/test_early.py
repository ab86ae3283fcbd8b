"""The engine process that is begun before the command line is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import early

ROOT = Path(__file__).resolve().parents[3]
REPEATS = "import sys; said = sys.stdin.read().split('\\n'); sys.exit(7 if said == ['/a socket', '{\"a\": 1}', ''] else 1)"


def begun(monkeypatch, *command: str) -> early.Early:
    monkeypatch.setattr(early, "COMMAND", (sys.executable, "-c", *command))
    early.begin(["serve", "model"])
    found = early.take()
    if found is None:
        pytest.skip("processes cannot be watched here")
    assert early.take() is None
    return found


async def test_it_is_told_what_to_serve_and_watched_like_any_process(monkeypatch) -> None:
    process = begun(monkeypatch, REPEATS)
    assert await process.told("/a socket", '{"a": 1}') and process.returncode is None
    assert await process.wait() == process.returncode == 7
    process.send_signal(signal.SIGTERM)  # of a process that has ended
    sleeps = begun(monkeypatch, "import time; time.sleep(600)")
    assert await sleeps.told("", "")
    sleeps.kill()
    assert await sleeps.wait() == -signal.SIGKILL


async def test_one_that_is_gone_before_it_was_told_is_not_used(monkeypatch) -> None:
    process = begun(monkeypatch, "pass")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not await process.told("/a socket", "{}")
    assert await process.wait() == 0


@pytest.mark.parametrize("arguments", [[], ["plan", "model"], ["serve", "--help"], ["bench", "serve"]])
def test_nothing_is_begun_for_other_commands(arguments, monkeypatch) -> None:
    monkeypatch.setattr(os, "posix_spawn", None)
    early.begin(arguments)
    assert early.take() is None


def test_it_ends_when_the_command_line_was_wrong() -> None:
    code = "from engine import early; early.begin(['serve']); print(early.take().pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    end = time.monotonic() + 60
    while lives(done.stdout.strip()):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not done.stderr


def lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
