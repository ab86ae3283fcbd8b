"""Which processors this process may compute on, and whether they are its own."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from pathlib import Path

SYSFS = Path("/sys/devices/system/cpu")
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # Linux's numbers of the call, which the C library does not have
SLICE_NS = 100_000  # the shortest there is


def parse_list(text: str) -> list[int]:
    """The kernel's list format, `0-3,8` (Documentation/admin-guide/cputopology.rst) -> [0, 1, 2, 3, 8]. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _read(path: Path) -> list[int]:
    try:
        return parse_list(path.read_text())
    except (OSError, ValueError):
        return []


def physical_cores(allowed: set[int] | None = None, sysfs: Path = SYSFS) -> list[int]:
    """One processor of every physical core among `allowed` (None: those of this process), ascending; never empty.

    Two hardware threads of a core share its ports and its path to memory: a second one brings these kernels nothing. Where the
    system does not tell who shares a core (containers, some virtual machines) every processor counts as a core.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    first: dict[tuple[int, ...], int] = {}
    for cpu in sorted(allowed):
        siblings = _read(sysfs / f"cpu{cpu}" / "topology" / "thread_siblings_list") or [cpu]
        first.setdefault(tuple(siblings), cpu)
    return list(first.values())


def own_cores(allowed: set[int] | None = None, sysfs: Path = SYSFS) -> list[int]:
    """The physical cores somebody set apart for this process (taskset, a cpuset); empty when it shares all of the machine's.

    Only cores of its own are worth being bound to: on shared ones the system must be free to move a thread off a busy core.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    online = set(_read(sysfs / "online"))
    return physical_cores(allowed, sysfs) if allowed < online else []


def wake_at_once(nanoseconds: int = SLICE_NS) -> bool:
    """Ask that this thread, when it wakes, need not wait until threads that compute had their turn: it works in short slices.

    For threads that only start input and output. A hint, False where the kernel does not know it (before Linux 6.12): nothing is
    allowed by it that was not before.
    """
    number = SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return False
    # struct sched_attr: size, policy (0: the ordinary one), flags, nice, priority, runtime (the slice here), deadline, period
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, nice, 0, nanoseconds, 0, 0)
    return ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0) == 0
