"""Accelerators found in what the kernel shows, on made-up trees of real machines."""

from pathlib import Path

import pytest

from engine.experts.devices import Device, find_devices

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def pci(slot: str, **files: str) -> dict[str, str]:
    return {f"sys/bus/pci/devices/{slot}/{name.replace('klass', 'class')}": text for name, text in files.items()}


def nvidia(slot: str, model: str, resource: str, speed: str = "32.0 GT/s PCIe", width: str = "16") -> dict[str, str]:
    files = pci(slot, vendor="0x10de", device="0x2901", klass="0x030200", resource=resource)
    link = pci(slot, max_link_speed=speed, max_link_width=width)
    return files | link | {f"proc/driver/nvidia/gpus/{slot}/information": f"Model: \t\t {model}\nIRQ:   \t\t 77"}


def region(size: int, flags: int = 0x14220C) -> str:
    return f"0x{1 << 40:016x} 0x{(1 << 40) + size - 1:016x} 0x{flags:016x}"


SMALL = region(16 << 20, 0x40200)
BOARD = {"sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086", "sys/bus/pci/devices/0000:00:1f.0/class": "0x060100"}


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, ()),
        (BOARD, ()),
        (
            BOARD | nvidia("0000:01:00.0", "NVIDIA RTX 5090", f"{SMALL}\n{region(32 * GIB)}"),
            (Device("NVIDIA RTX 5090", 32 * GIB, False, 63e9),),
        ),
        (
            nvidia("0000:01:00.0", "NVIDIA GeForce RTX 3060", f"{SMALL}\n{region(256 << 20)}", "16.0 GT/s PCIe"),
            (Device("NVIDIA GeForce RTX 3060", 0, False, 31.5e9),),
        ),
        (
            nvidia("000f:01:00.0", "NVIDIA GB10", SMALL, "Unknown", "0"),
            (Device("NVIDIA GB10", 0, True, 0.0),),
        ),
        (
            {"proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0"},
            (Device("NVIDIA Jetson AGX Orin Developer Kit", 0, True, 0.0),),
        ),
        (
            pci("0000:c5:00.0", vendor="0x1002", device="0x1586", klass="0x038000")
            | pci("0000:c5:00.0", mem_info_vram_total=str(GIB // 2), mem_info_gtt_total=str(62 * GIB)),
            (Device("AMD 1586", GIB // 2, True, 0.0),),
        ),
        (
            pci("0000:03:00.0", vendor="0x1002", device="0x744c", klass="0x030000", product_name="Radeon RX 7900 XTX")
            | pci("0000:03:00.0", mem_info_vram_total=str(24 * GIB), mem_info_gtt_total=str(32 * GIB))
            | pci("0000:03:00.0", max_link_speed="16.0 GT/s PCIe", max_link_width="16"),
            (Device("Radeon RX 7900 XTX", 24 * GIB, False, 31.5e9),),
        ),
    ],
    ids=["nothing", "no-gpu", "whole-window", "small-window", "spark", "jetson", "apu", "radeon"],
)
def test_devices_and_their_memory_are_found(tmp_path, files: dict[str, str], want: tuple[Device, ...]) -> None:
    assert find_devices(write(tmp_path, files)) == want


def test_a_device_is_said_in_a_line() -> None:
    assert str(Device("NVIDIA GB10", 0, True, 0.0)) == "NVIDIA GB10, one memory with the processor"
    assert str(Device("NVIDIA RTX 5090", 32 * GIB, False, 63e9)) == "NVIDIA RTX 5090, 32 GiB, link 63.0 GB/s"
    assert str(Device("NVIDIA X", 0, False, 0.0)) == "NVIDIA X"


def test_this_machine_can_be_looked_at() -> None:
    assert all(device.name for device in find_devices())
