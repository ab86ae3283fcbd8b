"""The first process of the machine of test_two_nodes.py: it looks where memory lies and answers."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import mmap
import os
import sys
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
CHECKS: dict[str, Callable[[], object]] = {}
PAGE = mmap.PAGESIZE
POWER_OFF = 0x4321FEDC


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


def where(address: int, size: int) -> dict[str, int]:
    """Pages by the node they lie on; below zero: not there."""
    from engine.numa import MOVE_PAGES

    begin = -(-address // PAGE) * PAGE
    pages = array("Q", range(begin, (address + size) // PAGE * PAGE, PAGE))
    status = array("i", bytes(4 * len(pages)))
    arguments = (0, len(pages), pages.buffer_info()[0], 0, status.buffer_info()[0], 0)
    assert LIBC.syscall(ctypes.c_long(MOVE_PAGES[os.uname().machine]), *map(ctypes.c_ulong, arguments)) == 0
    return {str(node): count for node, count in sorted(Counter(status).items())}


def data(weight: object) -> object:
    return getattr(weight, "data", weight)


def of(weight: object) -> dict[str, int]:
    return where(data(weight).data_ptr(), data(weight).nbytes)


@contextmanager
def on(*cores: int) -> Iterator[None]:
    """Only there, as far as this thread goes."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@check
def nodes() -> object:
    from engine.numa import describe, nodes_of, our_nodes, spread

    cores = sorted(os.sched_getaffinity(0))
    return {
        "ours": our_nodes(),
        "named": describe(),
        "with_cores": nodes_of(cores),
        "two": spread(cores, 2),
        "three": spread(cores, 3),
    }


@check
def fresh_memory() -> object:
    from engine.hostmem import lazy
    from engine.numa import interleave

    found = []
    for told in (False, True):
        memory = lazy(4 << 20)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        done = told and interleave(address, 4 << 20)
        with on(0):
            memory[:] = bytes(4 << 20)
        found.append((done, where(address, 4 << 20)))
    return found


@check
def refused() -> object:
    """A cpuset that lost its nodes, a filter of system calls, a node that is none: one line, no more."""
    from engine import numa

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("engine.numa").addHandler(handler)
    memory = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    done = [numa.interleave(address, 1 << 20, (50, 51)) for _ in range(3)]
    logging.getLogger("engine.numa").removeHandler(handler)
    return {"done": done, "lines": lines}


@check
def a_cpuset_of_one_node() -> object:
    """In a process of its own, as `mems` follow it."""
    folder = Path("/tmp/cg")
    folder.mkdir()
    assert LIBC.mount(b"cgroup2", bytes(folder), b"cgroup2", 0, None) == 0
    (folder / "cgroup.subtree_control").write_text("+cpuset")
    (folder / "one").mkdir()
    (folder / "one" / "cpuset.mems").write_text("0")
    code = """
import os; from pathlib import Path
Path("/tmp/cg/one/cgroup.procs").write_text(str(os.getpid()))
from engine import numa
print(numa.our_nodes(), repr(numa.describe()), numa.interleave_thread())
"""
    reading, writing = os.pipe()
    child = os.posix_spawn(
        sys.executable, [sys.executable, "-B", "-c", code], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)]
    )
    os.close(writing)
    with open(reading) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text.strip()


@check
def files() -> object:
    """One that nobody has read, and one that a process of node 0 has read before."""
    from engine.mapped import MappedFile

    found = {}
    for name in ("cold", "warm"):
        path = Path(f"/files/{name}.bin")
        if name == "warm":
            with on(0), path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass
        file = MappedFile(path)
        if name == "warm":
            touched = memoryview(file.memory).cast("B")[::PAGE].tobytes()
            found["before"] = (len(touched), where(file.address, file.size))
            del touched
        with on(0):
            file.read_ahead()
        for reader in file._readers:
            reader.join()
        found[name] = where(file.address, file.size)
    return found


@check
def a_model() -> object:
    """Weights copied and weights mapped, and pages of conversations, made as a start makes them."""
    from engine import mapped, tensors
    from engine.kernels.cpu import CpuOps
    from engine.models.load import load_model
    from engine.nn.batch import allocate_cache

    found: dict[str, object] = {}
    path = Path("/files/model.gguf")
    with on(0, 1):
        ops = CpuOps(2)
    for how in ("copied", "mapped"):
        if how == "mapped":
            mapped.begin([path], 1 << 30)
        with on(0):  # whoever writes first
            model = load_model(path, ops, mapped=how == "mapped", library=tensors)
        for file in model.files:
            for reader in file._readers:
                reader.join()
        large = {name: weight for name, weight in model.weights.items() if data(weight).nbytes >= 1 << 20}
        found[how] = {name: of(weight) for name, weight in large.items()}
        found["mapped_bytes"] = model.mapped
    cache = allocate_cache(model.spec, 64, 2, ops.kv_dtype, library=tensors)
    with on(0):
        for layer in cache.kv:
            layer.k.array.fill(0)
            layer.v.array.fill(0)
    found["pages"] = [of(part) for layer in cache.kv for part in (layer.k, layer.v)]
    return found


@check
def slots() -> object:
    """Of experts, without torch: its stand-in has nearly all that they need."""
    from engine import tensors

    sys.modules["torch"] = tensors
    tensors.Tensor.bitwise_or_ = lambda tensor, number: tensor.array.__ior__(number)
    from engine.experts.pool import Room
    from engine.nn.experts import Bank

    one = tensors.frombuffer(bytearray(8 * 256 * 256), dtype=tensors.uint8).view(8, 256, 256)
    with on(0):
        room = Room(Bank(gate_up=one, down=one, act="silu"), 64)
    return [of(room.bank.gate_up), of(room.bank.down)]


@check
def threads() -> object:
    """Where those of the pool may run, with four and with three of five cores: the first thread is the caller."""
    from engine import tensors
    from engine.kernels.cpu import CpuOps

    found = []
    for count in (4, 3):
        with on(0, 1, 2, 3):
            before = set(os.listdir("/proc/self/task"))
            ops = CpuOps(count)
            ops.linear(tensors.empty(8, 1024).zero_(), tensors.empty(1024, 1024).zero_())
            new = [int(thread) for thread in sorted(os.listdir("/proc/self/task"), key=int) if thread not in before]
            while any(len(os.sched_getaffinity(thread)) > 1 for thread in new):
                os.sched_yield()
            found.append((ops.bound, sorted(min(os.sched_getaffinity(thread)) for thread in new)))
    return found


def main() -> None:
    for kind, folder in ((b"proc", b"/proc"), (b"sysfs", b"/sys"), (b"devtmpfs", b"/dev"), (b"tmpfs", b"/tmp")):
        LIBC.mount(kind, folder, kind, 0, None)
    answer: dict[str, object] = {"balancing": Path("/proc/sys/kernel/numa_balancing").read_text().strip()}
    for name, function in CHECKS.items():
        try:
            answer[name] = function()
        except Exception:
            answer[name] = traceback.format_exc()
    answer["seconds"] = math.ceil(float(Path("/proc/uptime").read_text().split()[0]))
    print("\nanswer: " + json.dumps(answer), flush=True)
    LIBC.reboot(POWER_OFF)


if __name__ == "__main__":
    main()
