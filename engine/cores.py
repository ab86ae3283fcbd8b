"""Which processors this process may compute on, and whether they are its own."""

from __future__ import annotations

import os
from pathlib import Path

SYSFS = Path("/sys/devices/system/cpu")


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
