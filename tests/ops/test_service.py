"""ops/service.py: what is started is seen, what dies comes back, and nothing outlives its supervisor."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from .conftest import ROOT, eventually, fake_command, processes_naming

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def service(ops):
    return ops("service")


class Running:
    """A supervisor as `ops/up` starts it, with our end of its pipe."""

    def __init__(self, service, folder: Path, parts: list) -> None:
        self.folder = folder
        read_end, self.write_end = os.pipe()
        spec = json.dumps(asdict(service.Service(parts=parts, cwd=str(ROOT), model="m")))
        command = [sys.executable, str(ROOT / "ops/service.py"), str(folder), spec, str(read_end)]
        self.process = subprocess.Popen(command, pass_fds=(read_end,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.close(read_end)
        self.state = eventually(lambda: (s := service.read_state(folder)) and len(s["pids"]) == len(parts) and s)

    def keep(self) -> None:
        os.write(self.write_end, b"k")


def part(service, name: str, folder: Path, port: int, mode: str = "ok"):
    return service.Part(name, fake_command(port, mode, folder), port)


def test_stop_ends_every_process_and_the_state(service, folder, free_port) -> None:
    running = Running(service, folder, [part(service, name, folder, free_port()) for name in ("engine", "gateway")])
    running.keep()
    assert len(processes_naming(str(folder))) == 3
    assert service.stop(folder)
    running.process.wait(10)
    assert service.read_state(folder) is None and not service.stop(folder)


def test_a_dead_part_is_restarted_and_its_log_goes_on(service, folder, free_port) -> None:
    running = Running(service, folder, [part(service, "engine", folder, free_port())])
    running.keep()
    log = folder / "logs/engine.log"
    eventually(lambda: log.read_text().count("listening") == 1)
    first = running.state["pids"]["engine"]
    os.kill(first, signal.SIGKILL)
    state = eventually(lambda: (s := service.read_state(folder)) and s["pids"]["engine"] != first and s)
    assert state["restarts"] == {"engine": 1}
    eventually(lambda: log.read_text().count("listening") == 2)
    service.stop(folder)


def test_a_part_that_dies_while_starting_ends_all_with_its_last_line(service, folder, free_port) -> None:
    parts = [part(service, "engine", folder, free_port(), "die"), part(service, "gateway", folder, free_port())]
    running = Running.__new__(Running)
    read_end, write_end = os.pipe()
    spec = json.dumps(asdict(service.Service(parts=parts, cwd=str(ROOT), model="m")))
    command = [sys.executable, str(ROOT / "ops/service.py"), str(folder), spec, str(read_end)]
    running.process = subprocess.run(
        command, pass_fds=(read_end,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=30
    )
    os.close(read_end)
    os.close(write_end)
    assert running.process.returncode == 1
    assert (
        service.read_failure(folder) == "engine ended with exit code 3: moorage: the weights are torn; copy the checkpoint again"
    )


def test_an_interrupted_start_leaves_nothing(service, folder, free_port) -> None:
    running = Running(service, folder, [part(service, "engine", folder, free_port())])
    os.close(running.write_end)  # what the kernel does when ops/up is killed
    running.process.wait(10)
    assert not processes_naming(str(folder))


def test_parts_die_with_a_killed_supervisor(service, folder, free_port) -> None:
    running = Running(service, folder, [part(service, "engine", folder, free_port())])
    running.keep()
    running.process.kill()
    running.process.wait()
    eventually(lambda: not processes_naming(str(folder)))
    assert service.read_state(folder) is None


def test_what_a_dead_part_left_in_its_group_is_killed_before_the_restart(service, folder) -> None:
    script = (
        f"import subprocess, sys, time; subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)', 'grandchild',"
        f" {str(folder)!r}]); time.sleep(600)"
    )
    running = Running(service, folder, [service.Part("engine", [sys.executable, "-c", script], 1)])
    running.keep()

    def grandchildren() -> list[int]:
        return [pid for pid in processes_naming(str(folder)) if b"grandchild\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    (old,) = eventually(grandchildren)
    os.kill(running.state["pids"]["engine"], signal.SIGKILL)
    eventually(lambda: old not in grandchildren() and grandchildren())
    service.stop(folder)


def test_gives_up_on_a_part_that_dies_again_and_again(service, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(service, "RESTARTS", 1)
    wanted = service.Service(
        parts=[service.Part("engine", [sys.executable, "-c", "print('broken')"], 1)], cwd=str(ROOT), model="m"
    )
    supervisor = service.Supervisor(wanted, tmp_path, -1)
    supervisor._start(wanted.parts[0])
    failure = eventually(supervisor._tend)
    assert "for the 2th time" in failure and failure.endswith("broken")
    supervisor._stop()


def test_state_of_another_process_with_the_same_pid_is_not_ours(service, tmp_path) -> None:
    (tmp_path / "service.json").write_text(json.dumps({"pid": os.getpid(), "started": "1"}))
    assert service.read_state(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_torn_state_is_no_service(service, tmp_path, content: str) -> None:
    (tmp_path / "service.json").write_text(content)
    assert service.read_state(tmp_path) is None


def test_logs_are_bounded(service, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(service, "LOG_BYTES", 1000)
    wanted = service.Part("engine", [sys.executable, "-c", "for i in range(500): print(i, 'x' * 90)"], 1)
    child = service.Child(wanted, str(ROOT), tmp_path)
    child.process.wait()
    child.reap()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["engine.log", "engine.log.1", "engine.log.2", "engine.log.3"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert child.last_line.startswith("499 ")
