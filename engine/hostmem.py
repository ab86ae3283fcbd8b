"""Host memory: how much this process may still take (what the kernel calls available, the container's limit), and huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
STATUS = Path("/proc/self/status")
PRESSURE = Path("/proc/pressure/memory")

HUGE_PAGE = 2 << 20  # of x86-64, and of aarch64 with pages of 4 KiB


def prefer_huge_pages(address: int, size: int) -> bool:
    """Ask the kernel for huge pages where [address, address + size) is touched first: fewer address look-ups while weights stream
    by, and a first touch two to three times as fast. A hint: False when the memory is small or the system has none to give.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is None or length < 2 * HUGE_PAGE:  # less holds no whole one for certain
        return False
    return _madvise(start, length, advice)


def lazy(size: int) -> mmap.mmap:
    """`size` bytes of zeros that take memory page by page when they are first written, however many are asked for.

    Raises MemoryError where the system refuses even that (a limit on address space, strict accounting).
    """
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # 0x4000 on x86-64 and aarch64
        return mmap.mmap(-1, max(1, size), flags=flags)
    except OSError as problem:
        raise MemoryError(f"{size} bytes of address space are refused ({problem.strerror})") from problem


def huge(size: int) -> mmap.mmap:
    """`size` bytes at least, in huge pages where the system has them: direct reads into ordinary ones have half the rate.

    Raises MemoryError.
    """
    memory = lazy(-(-size // HUGE_PAGE) * HUGE_PAGE)  # the kernel puts whole ones on their borders
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(len(memory))
    return memory


def give_back(address: int, size: int) -> int:
    """Return what lies in [address, address + size) to the system; it reads as zeros afterwards. For memory of `lazy` only.

    Whole pages of the system alone can go; returns their bytes.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length <= 0 or not _madvise(start, length, mmap.MADV_DONTNEED):
        return 0
    return length


def _madvise(start: int, length: int, advice: int) -> bool:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise(start, length, advice) == 0


@dataclass(frozen=True)
class Limit:
    """The memory limit of one control group: bytes allowed, used, of these page cache, and of that what can be dropped."""

    most: int
    held: int
    cache: int
    droppable: int

    @property
    def used(self) -> int:
        return self.held - self.droppable

    def room(self, mapped: int, resident: int) -> int:
        """Of `mapped` bytes that must not be dropped, `resident` are there already and part of `cache`."""
        others = min(self.droppable, max(0, self.cache - mapped)) if mapped else self.droppable
        return self.most - self.held + others - max(0, mapped - resident)


def available_bytes(
    meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN_GROUPS, mapped: int = 0, status: Path = STATUS
) -> int | None:
    """The smaller of the machine's MemAvailable and the room left under each cgroup limit; None when neither can be read.

    Both count page cache as available. `mapped` bytes of it are files this process computes on: they are not.
    """
    resident = sum(_machine(status, "RssFile")) if mapped else 0
    rooms = [limit.room(mapped, resident) for limit in limits(cgroup, own)]
    return min([*(size - mapped for size in _machine(meminfo, "MemAvailable")), *rooms], default=None)


def total_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int | None:
    """All memory this process could ever have: the machine's, or a smaller cgroup limit."""
    return min([*_machine(meminfo, "MemTotal"), *(limit.most for limit in limits(cgroup, own))], default=None)


def limits(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> list[Limit]:
    """Those of this process' control group and the groups above it, as far as they are visible (version 2 and version 1)."""
    names = [line.split(":", 2) for line in _read(own).splitlines() if line.count(":") >= 2]
    found = []
    for hierarchy, controllers, path in names or [["0", "", "/"], ["1", "memory", "/"]]:
        if hierarchy == "0":
            found += [_v2(group) for root in (cgroup, cgroup / "unified") for group in _upwards(root, path)]
        elif "memory" in controllers.split(","):
            found += [_v1(group) for group in _upwards(cgroup / "memory", path)]
    return [limit for limit in found if limit is not None]


def pressure_file(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> Path:
    """Where the kernel says how long tasks waited for memory: those of our control group, or all of the machine."""
    names = [line[3:] for line in _read(own).splitlines() if line.startswith("0::")]
    groups = [group / "memory.pressure" for path in names or ["/"] for group in reversed(_upwards(cgroup, path))]
    return next((path for path in groups if path.exists()), PRESSURE)


def _upwards(root: Path, path: str) -> list[Path]:
    """The groups above it, from the top, and the group. A container may not see its own path: then it is the root."""
    group = root if ".." in path else root / path.lstrip("/")
    return [root, *reversed([each for each in (group, *group.parents) if root in each.parents])]


def _machine(meminfo: Path, key: str) -> list[int]:
    lines = (line.split() for line in _read(meminfo).splitlines())
    return [int(line[1]) * 1024 for line in lines if line and line[0] == f"{key}:"]


def _v2(group: Path) -> Limit | None:
    return _limit(group, "memory.max", "memory.current", "")


def _v1(group: Path) -> Limit | None:
    return _limit(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _limit(group: Path, most: str, used: str, prefix: str) -> Limit | None:
    allowed, now = _read(group / most).strip(), _read(group / used).strip()
    if not allowed.isdigit() or not now.isdigit():  # "max" means no limit
        return None
    return Limit(int(allowed), int(now), *_cache(group / "memory.stat", prefix))


def _cache(stat: Path, prefix: str) -> tuple[int, int]:
    """Page cache, counted as used by the cgroup, and what the kernel drops of it before it refuses memory. Of what was read more
    than once, half: a checkpoint read twice goes as easily, but the pages of our own program would come back at once."""
    lines = dict(line.split(" ", 1) for line in _read(stat).splitlines() if " " in line)
    inactive, active = (int(lines.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return inactive + active, inactive + active // 2


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not this kind of system; the caller takes the other sources
