"""Threads: one a physical core, bound to it only where the cores are this process's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cores import own_cores, parse_list, physical_cores, wake_at_once

ROOT = Path(__file__).resolve().parents[3]


def machine(path: Path, siblings: list[str], online: str) -> Path:
    path.mkdir(parents=True)
    (path / "online").write_text(online + "\n")
    for cpu, shared in enumerate(siblings):
        (path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(shared + "\n")
    return path


@pytest.fixture
def eight(tmp_path) -> Path:
    """Four cores of two hardware threads each, numbered as Linux does on x86."""
    return machine(tmp_path / "cpu", ["0,4", "1,5", "2,6", "3,7"] * 2, "0-7")


def test_one_thread_a_core(eight) -> None:
    assert physical_cores(set(range(8)), eight) == [0, 1, 2, 3]
    assert physical_cores({1, 4, 5}, eight) == [1, 4], "of a core only the second thread may be ours"


def test_a_machine_that_tells_nothing_has_as_many_cores_as_processors(tmp_path) -> None:
    assert physical_cores({0, 3}, tmp_path) == [0, 3]
    (tmp_path / "cpu0" / "topology").mkdir(parents=True)
    (tmp_path / "cpu0" / "topology" / "thread_siblings_list").write_text("what?")
    assert physical_cores({0, 3}, tmp_path) == [0, 3]


def test_only_cores_set_apart_are_own(eight, tmp_path) -> None:
    assert own_cores({2, 3, 6, 7}, eight) == [2, 3]
    assert own_cores(set(range(8)), eight) == [], "the whole machine is shared with everybody"
    assert own_cores({0, 1}, tmp_path) == [], "nobody knows whose they are"


@given(st.sets(st.integers(0, 300), min_size=1))
def test_lists_of_the_kernel(numbers: set[int]) -> None:
    ordered, spans = sorted(numbers), []
    for n in ordered:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    assert parse_list(",".join(f"{a}-{b}" if a != b else str(a) for a, b in spans) + "\n") == ordered


BOUND = """
import json, os, sys, time, torch
from pathlib import Path
from engine import _native
def where():
    return {t.name: sorted(os.sched_getaffinity(int(t.name))) for t in Path("/proc/self/task").iterdir()}
torch.set_num_threads(1)  # threads of torch are not the pool's
before = where()
ops = _native.Ops(2, "", json.loads(sys.argv[1]))
x, w, out = torch.ones(1, 256), torch.ones(512, 256, dtype=torch.bfloat16), torch.empty(1, 512)
ops.linear(out, x, w, "", None)
assert torch.equal(out, torch.full((1, 512), 256.0))
workers = lambda: [where().get(t) for t in sorted(set(where()) - set(before))]
until = time.monotonic() + 30  # a thread binds itself when it first runs, and the machine may be busy
while json.loads(sys.argv[1]) and any(len(w) > 1 for w in workers()) and time.monotonic() < until:
    time.sleep(0.01)
print(json.dumps(workers()))
print(json.dumps(sorted(os.sched_getaffinity(0))))
"""


@pytest.mark.parametrize("bound", [False, True])
def test_a_bound_pool_stays_on_its_cores_and_leaves_the_caller_free(bound: bool) -> None:
    pytest.importorskip("engine._native")
    allowed = sorted(os.sched_getaffinity(0))
    cpus = [allowed[0], allowed[-1]] if bound else []
    run = subprocess.run(
        [sys.executable, "-c", BOUND, json.dumps(cpus)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    workers, caller = (json.loads(line) for line in run.stdout.splitlines())
    assert workers == [[allowed[-1]] if bound else allowed]
    assert caller == allowed


@pytest.mark.parametrize(("cpus", "why"), [([0], "one for each thread"), ([0, -1], "must be in"), ([0, 1 << 20], "must be in")])
def test_processors_that_cannot_be(cpus: list[int], why: str) -> None:
    native = pytest.importorskip("engine._native")
    with pytest.raises(ValueError, match=why):
        native.Ops(2, "", cpus)


def test_a_thread_that_wakes_at_once_keeps_its_policy_and_its_nice_value() -> None:
    seen = []

    def work() -> None:
        before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        known = wake_at_once()
        seen.append((known, before, (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((known, before, after),) = seen
    assert isinstance(known, bool) and before == after


SLICES = """
import ctypes, json, os, struct, sys, time, torch
from pathlib import Path
from engine import _native
from engine.cores import SLICE_NS, wake_at_once
def slice_of(thread):
    data = ctypes.create_string_buffer(64)
    number = {"x86_64": 315, "aarch64": 275}[os.uname().machine]  # sched_getattr
    ctypes.CDLL(None).syscall(number, thread, data, 56, 0)
    return struct.unpack_from("=IIQiIQ", data)[5]
def threads():
    return {int(t.name) for t in Path("/proc/self/task").iterdir()}
torch.set_num_threads(1)
before = threads()
ops = _native.Ops(2, "", [])
ops.linear(torch.empty(1, 512), torch.ones(1, 256), torch.ones(512, 256, dtype=torch.bfloat16), "", None)
workers = threads() - before
wake_at_once()
until = time.monotonic() + 30  # a thread asks when it first runs, and the machine may be busy
while slice_of(0) == SLICE_NS and {slice_of(t) for t in workers} != {SLICE_NS} and time.monotonic() < until:
    time.sleep(0.01)
print(json.dumps([[slice_of(t) for t in workers], slice_of(0) == SLICE_NS, SLICE_NS]))
"""


def test_threads_of_the_pool_work_in_short_slices_where_the_kernel_knows_them() -> None:
    pytest.importorskip("engine._native")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", SLICES], capture_output=True, text=True, cwd=ROOT, env=env)
    assert run.returncode == 0, run.stderr
    found, known, short = json.loads(run.stdout)
    if not known:
        pytest.skip("this kernel has no slices of a thread's own")
    assert found == [short]
