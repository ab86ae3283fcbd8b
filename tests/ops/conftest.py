"""Loads ops/*.py (scripts, no package) for tests, and makes sure that no test leaves a process behind."""

import importlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import ports

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_part.py")


@pytest.fixture
def ops(monkeypatch) -> Callable[[str], object]:
    """`ops("service")` -> the module ops/service.py."""
    monkeypatch.syspath_prepend(str(ROOT / "ops"))
    return importlib.import_module


@pytest.fixture
def load(ops, monkeypatch):
    """`load("kernels")` -> the module ops/bench/kernels.py."""

    def load(name: str):
        monkeypatch.syspath_prepend(str(ROOT / "ops" / "bench"))
        spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / f"ops/bench/{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, f"bench_{name}", module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def free_port() -> Callable[[], int]:
    return ports.free_port


def eventually(condition: Callable[[], object], seconds: float = 15.0) -> object:
    """Poll until `condition` is truthy; return its value. Fails the test when it never is."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)
    return value


def processes_naming(text: str) -> list[int]:
    """Pids whose command line contains `text` (the test's own folder: nobody else's)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text in (entry / "cmdline").read_text(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """A state folder; whatever still runs with its name at the end is a failure, and is killed."""
    yield tmp_path
    left = processes_naming(str(tmp_path))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"


def fake_command(port: int, mode: str, folder: Path) -> list[str]:
    return [sys.executable, str(FAKE), str(port), mode, str(folder)]
