"""Which accelerators this machine has, from what the kernel shows alone: no driver library is loaded to find them.

A GB10 (DGX Spark), a Jetson, and a processor with built-in graphics share one memory between processor and device: that is found
out here, not configured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.lean import here, torch

ROOT = Path("/")
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
DISPLAY, ACCELERATOR = "0x03", "0x12"  # PCI classes
ONE_MEMORY = ("GB10", "Orin", "Thor", "Xavier", "Tegra")  # NVIDIA's chips on which processor and device share their memory
PREFETCHABLE = 0x8  # a PCI region's flag
LEAST_WINDOW = 1 << 30  # a smaller window into a device's memory says nothing about its size
SMALL_CARD = 4 << 30  # AMD: what has less and may use more of the machine's is part of the processor
LANE = {"2.5": 2.0e9, "5.0": 4.0e9, "8.0": 7.88e9, "16.0": 15.75e9, "32.0": 31.5e9, "64.0": 60.5e9}  # GT/s -> bits a second


@dataclass(frozen=True)
class Device:
    """`memory` bytes of its own, 0 when the kernel does not show it; `link` bytes a second of its slot, 0 when there is none."""

    name: str
    memory: int
    unified: bool
    link: float

    def __str__(self) -> str:
        size = "one memory with the processor" if self.unified else f"{self.memory / 2**30:.0f} GiB" if self.memory else ""
        slot = f"link {self.link / 1e9:.1f} GB/s" if self.link and not self.unified else ""
        return ", ".join(text for text in (self.name, size, slot) if text)


def memory_info(cuda: Any = None) -> Callable[[], tuple[int, int]] | None:
    """What tells the free and all bytes of the device that this process computes on; None where it has none."""
    if cuda is None and not here():
        return None
    cuda = cuda or torch.cuda
    return cuda.mem_get_info if cuda.is_available() else None


def find_devices(root: Path = ROOT) -> tuple[Device, ...]:
    """Accelerators in the order of their slots; without one of a kind we know, nothing."""
    found = [_pci(path, root) for path in sorted((root / "sys/bus/pci/devices").glob("*"))]
    board = _text(root / "proc/device-tree/model").strip("\0")
    if "Jetson" in board:  # its device is on no bus
        found.append(Device(board, 0, True, 0.0))
    return tuple(device for device in found if device is not None)


def _pci(path: Path, root: Path) -> Device | None:
    vendor = VENDORS.get(_text(path / "vendor"))
    kind = _text(path / "class")
    if vendor is None or not kind.startswith((DISPLAY, ACCELERATOR)):
        return None
    link = LANE.get(_text(path / "max_link_speed").partition(" ")[0], 0.0) / 8 * _number(path / "max_link_width")
    if vendor == "AMD":
        own, shared = _number(path / "mem_info_vram_total"), _number(path / "mem_info_gtt_total")
        name = _text(path / "product_name") or f"AMD {_text(path / 'device').removeprefix('0x')}"
        return Device(name, own, own < SMALL_CARD and shared > own, link)
    name = _model(root / "proc/driver/nvidia/gpus" / path.name / "information") or f"NVIDIA {_text(path / 'device')[2:]}"
    one = any(chip in name for chip in ONE_MEMORY)
    return Device(name, 0 if one else _window(path / "resource"), one, link)


def _model(information: Path) -> str:
    lines = (line.partition(":") for line in _text(information).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "Model"), "")


def _window(resource: Path) -> int:
    """The largest region through which the processor sees the device's memory: all of it where it is resizable."""
    sizes = [0]
    for line in _text(resource).splitlines():
        first, last, flags = (int(part, 16) for part in line.split()[:3])
        if flags & PREFETCHABLE:
            sizes.append(last - first + 1)
    return max(sizes) if max(sizes) >= LEAST_WINDOW else 0


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""  # not on this kind of machine
