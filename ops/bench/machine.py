"""What a measurement was made on, and how much of the machine others used meanwhile. Standard library only."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def describe(root: Path) -> dict[str, object]:
    """CPU, cores, memory, kernel and the commit that was measured."""
    cpu = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True).stdout.strip()
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "features": [
            name for name in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8") if name in flags.split()
        ],
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "commit": commit,
    }


def process_seconds(pids: list[int]) -> float:
    """CPU seconds used so far by these processes (the dead children they waited for included)."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        except OSError:
            continue
        total += sum(int(value) for value in fields[11:15])
    return total / TICKS


def descendants(pid: int) -> list[int]:
    """`pid` and every process below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(") ", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        queue += children.get(found[-1], [])
    return found


@dataclass
class Share:
    """Counts, from `start` on, the share of all cores that went to nobody of ours (other processes, other guests)."""

    total: float
    idle: float

    @staticmethod
    def start() -> Share:
        return Share(*Share._read())

    @staticmethod
    def _read() -> tuple[float, float]:
        fields = [int(value) / TICKS for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    def foreign(self, own_seconds: float) -> float:
        """0..1, given the CPU seconds that ours used since `start`."""
        total, idle = self._read()
        whole = max(total - self.total, 1e-9)
        return max(0.0, (whole - (idle - self.idle) - own_seconds) / whole)
