"""What a measurement was made on: the facts that make a stored profile valid here or foreign."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
CPUINFO = Path("/proc/cpuinfo")
NVIDIA = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class Machine:
    """`kernels` names implementation, instruction set and the build of the native module; `power` the frequency governor and the
    power limits of NVIDIA's devices."""

    cpu: str
    cores: int  # this process may use
    memory: int  # bytes, rounded to GiB: firmware takes a little more or less from boot to boot
    gpu: str
    driver: str
    power: str
    kernels: str

    def differs(self, other: Machine) -> list[str]:
        """`field: theirs -> ours` for everything that is not equal."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{f.name}: {theirs[f.name]} -> {mine[f.name]}" for f in fields(self) if mine[f.name] != theirs[f.name]]


def this_machine(kernels: str) -> Machine:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory=round(pages * size / 2**30) << 30,
        gpu=", ".join(sorted(_line(p, "Model:") for p in NVIDIA.glob("gpus/*/information"))),
        driver=_text(NVIDIA / "version").splitlines()[0] if (NVIDIA / "version").exists() else "",
        power=", ".join(part for part in (_text(GOVERNOR), device_power()) if part),
        kernels=kernels,
    )


def device_power(ask: Callable[[list[str]], str] | None = None) -> str:
    """`gpu 450.00 W` for each device, as nvidia-smi tells their limits; a lower limit is another machine. "" where it cannot."""
    if ask is None and not (NVIDIA.exists() and shutil.which("nvidia-smi")):
        return ""
    try:
        told = (ask or _run)(["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader"])
    except (OSError, subprocess.SubprocessError):
        return ""
    return ", ".join(f"gpu {line.strip()}" for line in told.splitlines() if line.strip())


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


def kernel_version(ops: object) -> str:
    """Name, instruction set and threads of the kernels, and which build of the native module they are."""
    parts = [str(getattr(ops, "name", type(ops).__name__)), str(getattr(ops, "isa", "")), str(getattr(ops, "threads", ""))]
    if parts[0] == "cpu":
        from engine import _native

        parts.append(hashlib.blake2b(Path(_native.__file__).read_bytes(), digest_size=6).hexdigest())
    elif parts[0] == "cuda":
        parts.append(getattr(ops, "numerics", ""))  # names the device's architecture
    return "-".join(p for p in parts if p)


def _cpu() -> str:
    return _line(CPUINFO, "model name") or platform.machine()


def _line(path: Path, key: str) -> str:
    found = (line for line in _text(path).splitlines() if line.startswith(key))
    return next(found, "").partition(":")[2].strip()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not on this kind of machine
