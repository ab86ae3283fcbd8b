"""Keeps engine and gateway running: starts them, restarts what dies, rotates their logs, stops everything together.

Owns the state folder (`.run/`): `service.json` says what runs, `logs/` what it said. One supervisor a folder, standard library
only.

The supervisor is started by `ops/up` and holds the read end of a pipe from it. Until `ops/up` writes "keep" there, an end of
file means that the start failed or was interrupted, and everything is stopped: no orphans, however `ops/up` died.
"""

from __future__ import annotations

import ctypes
import json
import logging
import logging.handlers
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

KEEP = b"k"
LOG_BYTES, LOG_FILES = 16 << 20, 4  # 64 MiB a part: days of a busy engine's lines, never a full disk
STOP_SECONDS = 20  # the engine writes its cache to disk on SIGTERM; after that SIGKILL
RESTARTS, WINDOW = 5, 300.0  # five deaths in five minutes is a defect that a sixth start would not cure
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Part:
    """One process of the service. `port` is where it listens on 127.0.0.1; `env` is added to the environment."""

    name: str
    command: list[str]
    port: int
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Service:
    """What `ops/up` asked for; written to service.json with the supervisor's pid beside it."""

    parts: list[Part]
    cwd: str
    model: str


def start_time(pid: int) -> str:
    """The kernel's start tick of a process; with the pid it names a process for ever. Empty if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def read_state(folder: Path) -> dict | None:
    """The running service's state, or None when no supervisor runs for this folder."""
    try:
        state = json.loads((folder / "service.json").read_text())
        alive = bool(state["started"]) and start_time(state["pid"]) == state["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if alive else None


def read_failure(folder: Path) -> str:
    """Why the last supervisor gave up; empty if it did not."""
    try:
        return (folder / "failure").read_text().strip()
    except OSError:
        return ""


def die_with_parent() -> None:
    """Runs in the child: SIGTERM it when the supervisor is killed without a chance to stop it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One running part and the thread that writes its output to a rotating log."""

    def __init__(self, part: Part, cwd: str, logs: Path) -> None:
        self.part = part
        self.started = time.monotonic()
        self.last_line = ""
        self.process = subprocess.Popen(
            part.command,
            cwd=cwd,
            env={**os.environ, **part.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._log = logging.handlers.RotatingFileHandler(logs / f"{part.name}.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1)
        self._pump = threading.Thread(target=self._copy, daemon=True)
        self._pump.start()

    def _copy(self) -> None:
        for raw in self.process.stdout or ():
            line = raw.decode(errors="replace").rstrip("\n")
            if line.strip():
                self.last_line = line.strip()
            self._log.emit(logging.LogRecord(self.part.name, logging.INFO, "", 0, line, None, None))

    def signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return  # the whole group is gone already

    def reap(self) -> None:
        """After the process ended: end what is left of its group (a worker whose API process died) and close the log."""
        self.signal(signal.SIGKILL)
        self._pump.join(timeout=5)
        self._log.close()


class Supervisor:
    def __init__(self, service: Service, folder: Path, keep_fd: int) -> None:
        self.service, self.folder, self.keep_fd = service, folder, keep_fd
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, Child] = {}
        self.deaths: dict[str, deque[float]] = {part.name: deque() for part in service.parts}
        self.kept = keep_fd < 0
        self.stopping = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        (self.folder / "failure").unlink(missing_ok=True)
        failure = ""
        try:
            for part in self.service.parts:
                self._start(part)
            while not self.stopping and not failure:
                self._listen(0.2)
                failure = self._tend()
        finally:
            if failure:  # before the state goes: whoever sees no service looks here for the reason
                (self.folder / "failure").write_text(failure + "\n")
            self._stop()
        return 1 if failure else 0

    def _on_signal(self, number: int, frame: object) -> None:
        self.stopping = True

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)

    def _start(self, part: Part) -> None:
        self.children[part.name] = Child(part, self.service.cwd, self.logs)
        self._say(f"started part={part.name} pid={self.children[part.name].process.pid} port={part.port}")
        self._write_state()

    def _write_state(self) -> None:
        state = {
            **asdict(self.service),
            "pid": os.getpid(),
            "started": start_time(os.getpid()),
            "pids": {name: child.process.pid for name, child in self.children.items()},
            "restarts": {name: len(times) for name, times in self.deaths.items()},
        }
        temporary = self.folder / "service.json.new"
        temporary.write_text(json.dumps(state))
        temporary.replace(self.folder / "service.json")

    def _listen(self, seconds: float) -> None:
        """Wait a little, watching the pipe until it says keep or ends."""
        if self.kept:
            time.sleep(seconds)
            return
        if select.select([self.keep_fd], [], [], seconds)[0]:
            if os.read(self.keep_fd, 1) == KEEP:
                self.kept = True
            else:
                self._say("start was interrupted, stopping")
                self.stopping = True

    def _tend(self) -> str:
        """Restart what died. Returns the reason to give up, or an empty string."""
        for name, child in list(self.children.items()):
            code = child.process.poll()
            if code is None or self.stopping:
                continue
            child.reap()
            what = f"{name} ended with {'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}"
            self._say(f"{what} last_line={child.last_line!r}")
            if not self.kept:
                return f"{what}: {child.last_line or 'it said nothing'}"
            now, deaths = time.monotonic(), self.deaths[name]
            deaths.append(now)
            while now - deaths[0] > WINDOW:
                deaths.popleft()
            if len(deaths) > RESTARTS:
                return f"{what} for the {len(deaths)}th time in {WINDOW:.0f} s, not started again: {child.last_line}"
            self._listen_for_stop(min(2.0 ** (len(deaths) - 1), 30.0) - 1.0)  # the first restart is immediate
            if not self.stopping:
                self._start(child.part)
        return ""

    def _listen_for_stop(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < end:
            time.sleep(0.1)

    def _stop(self) -> None:
        """Gateway first, so that no request meets a dead engine. The state file goes last: it says that all is over."""
        for part in reversed(self.service.parts):
            child = self.children.get(part.name)
            if child is None:
                continue
            if child.process.poll() is None:
                child.signal(signal.SIGTERM)
                try:
                    child.process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    self._say(f"{part.name} did not stop within {STOP_SECONDS} s, killed")
            child.signal(signal.SIGKILL)
            child.process.wait()
            child.reap()
            self._say(f"stopped part={part.name}")
        (self.folder / "service.json").unlink(missing_ok=True)


def stop(folder: Path) -> bool:
    """Stop the service of this folder and wait until it is over. False if none ran."""
    state = read_state(folder)
    if state is None:
        return False
    os.kill(state["pid"], signal.SIGTERM)
    while start_time(state["pid"]) == state["started"]:
        time.sleep(0.1)
    return True


def main() -> int:
    """`service.py FOLDER SERVICE_JSON KEEP_FD`: supervise until told to stop."""
    folder, spec, keep_fd = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    service = Service(parts=[Part(**part) for part in spec["parts"]], cwd=spec["cwd"], model=spec["model"])
    return Supervisor(service, folder, keep_fd).run()


if __name__ == "__main__":
    sys.exit(main())
