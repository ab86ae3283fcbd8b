"""Page-locking the pool: as much as limits allow, and what is short said aloud. The kernel's own figure is the judge."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.experts.locking import HINT, Locked, lock_banks, this_machines
from engine.experts.pool import bank_bytes
from engine.kernels.reference import ReferenceOps
from tests.engine.experts.tiers import banks

ROOT = Path(__file__).resolve().parents[3]
# Locks 8 banks of 1 MiB with a limit of 4.5 MiB, without the right to go beyond it.
LIMITED = """
import ctypes, json, logging, os, resource, sys, torch
from engine.experts.locking import lock_banks
from engine.experts.pool import Room
from engine.nn.experts import Bank
limit, budget = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
if os.geteuid() == 0:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    assert libc.capset(header, (ctypes.c_uint32 * 6)()) == 0  # none of root's rights
resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(limit, 1 << 20), limit))
logging.basicConfig(stream=sys.stderr, format="%(message)s")
like = Bank(torch.empty(0, 256, 512, dtype=torch.bfloat16), torch.empty(0, 512, 128, dtype=torch.bfloat16), "silu")
rooms = [Room(Bank(like.gate_up, torch.empty(0, 512, 256, dtype=torch.bfloat16), "silu"), 2).bank for _ in range(8)]
found = lock_banks(rooms, budget)
kernel = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmLck"))
print(json.dumps([found.bytes, found.short, found.by, found.why, kernel]))
"""
MIB = 1 << 20


def limited(limit: int, budget: int) -> tuple[list, str]:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard != resource.RLIM_INFINITY and hard < limit:
        pytest.skip("this user may lock less than the test wants to be allowed")
    command = [sys.executable, "-c", LIMITED, str(limit), str(budget)]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


def test_a_low_limit_locks_what_it_allows_and_says_how_much_is_short_and_how_to_raise_it() -> None:
    (size, short, by, why, kernel), said = limited(limit=4 * MIB + MIB // 2, budget=1 << 40)
    assert size == kernel == 4 * MIB + MIB // 2 and short == 8 * MIB - size and by == "mlock"
    assert "4.5 MiB may be locked" in why
    assert "page-locked memory is short" in said and "short=" in said and HINT in said


def test_no_more_than_the_budget_is_locked_and_nothing_is_short_then() -> None:
    (size, short, _, why, kernel), said = limited(limit=4 * MIB + MIB // 2, budget=3 * MIB)
    assert size == kernel == 3 * MIB and (short, why) == (0, "") and "short" not in said


def test_without_any_right_to_lock_nothing_is_locked_and_the_engine_goes_on() -> None:
    (size, short, by, why, kernel), _ = limited(limit=0, budget=1 << 40)
    assert (size, kernel, by) == (0, 0, "") and short == 8 * MIB and why


class Cuda:
    """A made-up device: registers until `room` is used up."""

    def __init__(self, room: int) -> None:
        self.room, self.seen = room, []

    def is_available(self) -> bool:
        return True

    def cudart(self) -> SimpleNamespace:
        def register(address: int, size: int, flags: int) -> int:
            self.room -= size
            self.seen.append((address, size, flags))
            return 0 if self.room >= 0 else 2

        return SimpleNamespace(cudaHostRegister=register)


@pytest.mark.parametrize("fit", [0, 1, 3])
def test_beside_a_device_the_pool_is_registered_with_it(fit: int, caplog) -> None:
    pool = banks(ReferenceOps(), "f32")
    each = bank_bytes(pool[0])
    cuda = Cuda(fit * each)
    found = lock_banks(pool, 1 << 40, this_machines(cuda))
    assert found.bytes == fit * each and found.short == (len(pool) - fit) * each
    assert cuda.seen[0] == (pool[0].gate_up.data_ptr(), pool[0].gate_up.nbytes, 0)
    if fit < len(pool):
        assert "cudaHostRegister failed with error 2" in caplog.text


def test_nothing_to_lock_is_nothing() -> None:
    assert lock_banks([], 1 << 40) == Locked()
