"""Runs a static Linux program on an x86 processor that this machine is not: Bochs, and a kernel of ours for a few system calls.

Nothing is booted. The ROM (emulated/start.S, emulated/kernel.c) goes to 64-bit mode, reads program and stdin from a disk image,
runs it and writes its stdout behind them. That takes half a second, and the program some 50 million instructions a second.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent / "emulated"
PROGRAM, STACK_BYTES, SECTOR = 0x400000, 1 << 20, 512  # as kernel.c has them
CYLINDER = 16 * 63 * SECTOR  # Bochs takes a disk in whole ones
FLAGS = ["-O1", "-Wall", "-Wextra", "-Werror", "-ffreestanding", "-fno-pic", "-mno-red-zone", "-mgeneral-regs-only"]
FLAGS += [
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-nostdlib",
    "-static",
    "-Wl,--no-warn-rwx-segments",
    "-Wl,--build-id=none",
]
SETTINGS = """
display_library: rfb, options="timeout=0"
memory: guest=768, host=768
romimage: file=rom.bin
vgaromimage: file=vga.bin
cpu: model={model}, count=1, ips=1000000, reset_on_triple_fault=0
clock: sync=none
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, path=disk.img, mode=flat, cylinders=0
boot: disk
port_e9_hack: enabled=1
log: bochs.log
panic: action=fatal
"""


class Failed(Exception):
    """The program, or the machine under it, ended badly: what they said."""


def build_rom(folder: Path) -> bytes:
    elf, rom = folder / "rom.elf", folder / "rom.bin"
    subprocess.run(["gcc", *FLAGS, "-T", HERE / "rom.ld", HERE / "start.S", HERE / "kernel.c", "-o", elf], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".rom", elf, rom], check=True)
    return rom.read_bytes()


def loaded(elf: bytes) -> list[tuple[int, int, int, int]]:
    """Of each part that is loaded: its place in the file, its address, its bytes there, its bytes in memory."""
    at, size, count = *struct.unpack_from("<Q", elf, 32), *struct.unpack_from("<HH", elf, 54)
    heads = [struct.unpack_from("<IIQQQQQQ", elf, at + i * size) for i in range(count)]
    return [(h[2], h[3], h[5], h[6]) for h in heads if h[0] == 1]


def offset_of(elf: bytes, address: int) -> int:
    return next(offset + address - start for offset, start, held, _ in loaded(elf) if start <= address < start + held)


def mended(program: Path) -> bytes:
    """The executable, the instructions that mend.h does for Bochs made undefined."""
    elf = bytearray(program.read_bytes())
    listing = subprocess.run(["objdump", "-d", "--wide", program], check=True, capture_output=True, text=True).stdout
    for address, raw, name in re.findall(r"^ *([0-9a-f]+):\t((?:[0-9a-f]{2} )+) *\t(vpinsrb|vcvtne2ps2bf16) ", listing, re.M):
        code = bytes.fromhex(raw)
        if code[0] == 0x62 and (name != "vpinsrb" or code[5] >> 6 == 1):  # EVEX; a short displacement
            elf[offset_of(elf, int(address, 16)) + 4] |= 0x80
    return bytes(elf)


def image(elf: bytes) -> tuple[bytes, int, int, int]:
    """Memory from PROGRAM on as a program starts with it; where it starts, its stack, its heap."""
    entry, at, size, count = *struct.unpack_from("<QQ", elf, 24), *struct.unpack_from("<HH", elf, 54)
    parts = loaded(elf)
    end = max(address + whole for _, address, _, whole in parts)
    memory = bytearray(end - PROGRAM)
    for offset, address, held, _ in parts:
        memory[address - PROGRAM : address - PROGRAM + held] = elf[offset : offset + held]
    stack = -(-end // 4096) * 4096 + STACK_BYTES
    name, one = stack + 256, stack + 264
    # argc, argv (one thread), environment; what libc wants: program headers (in the first part), size of a page, random bytes
    words = [2, name, one, 0, 0, 3, parts[0][1] + at, 4, size, 5, count, 6, 4096, 25, name, 0, 0]
    top = struct.pack(f"<{len(words)}Q", *words).ljust(256, b"\0") + b"kernels\x001".ljust(16, b"\0")
    memory = memory.ljust(stack - PROGRAM, b"\0") + top
    return bytes(memory), entry, stack, stack + 4096


def sectors(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // SECTOR) * SECTOR, b"\0")


def run(bochs: Path, model: str, rom: bytes, program: bytes, stdin: bytes, room: int, limit: int = 300) -> bytes:
    """What `program` writes to its stdout, at most `room` bytes, on a processor `model` of Bochs's."""
    memory, entry, stack, heap = image(program)
    head = struct.pack("<6Q", entry, stack, heap, len(memory), len(stdin), room)
    disk = sectors(head) + sectors(memory) + sectors(stdin)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = -(-(len(disk) + room + SECTOR) // CYLINDER) * CYLINDER
        (folder / "disk.img").write_bytes(disk.ljust(size, b"\0"))
        (folder / "rom.bin").write_bytes(rom)
        (folder / "vga.bin").write_bytes(bytes(2048))
        (folder / "bochsrc").write_text(SETTINGS.format(model=model))
        command = [bochs, "-q", "-f", "bochsrc"]
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit)
        said = done.stdout.decode(errors="replace")
        if not (end := re.search(r"output 0x(\w+); status 0x0{16}; ", said)):
            raise Failed(said[-800:] + (folder / "bochs.log").read_text(errors="replace")[-800:])
        output = (folder / "disk.img").read_bytes()[len(disk) :]
    return output[: int(end[1], 16)]
