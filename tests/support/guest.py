"""A whole emulated machine that runs one Python program as its first process: a kernel of Debian's in qemu, without KVM.

Its disk holds this Python, the packages the program needs, `engine/`, and what the test adds; each is where it is here, so that
nothing is configured. The program's last line of JSON on the serial port is its answer.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QEMU = ROOT / ".cache" / "qemu"
MARK = "answer: "
PACKAGES = ("numpy", "numpy.libs", "msgspec", "gguf", "yaml", "safetensors", "typing_extensions.py")
LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "site-packages", "idlelib", "ensurepip", "*tkinter*", "config-*", "*.pyi", "*.a"
)
LIMIT_S = 600  # it takes 20 s of a quiet core, and five times as long beside other tests


class Failed(Exception):
    """The machine ended without an answer: the end of what it said."""


def missing() -> str:
    """Why there is no such machine here, in one line, or nothing."""
    found = subprocess.run([ROOT / "ops" / "virtual_machine", "--path"], capture_output=True, text=True)
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


def disk(folder: Path, program: Path, files: Sequence[Path] = ()) -> Path:
    """An image that runs `program` as `/program.py`; `files` are below `/files`."""
    tree, prefix, site = folder / "tree", Path(sys.base_prefix), Path(sysconfig.get_path("platlib"))
    for empty in ("proc", "sys", "dev", "tmp", "files"):
        (tree / empty).mkdir(parents=True)
    library = Path(sysconfig.get_path("stdlib"))
    python = prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    _copy(library, tree / library.relative_to("/"))
    _copy(python, tree / python.relative_to("/"))
    for package in PACKAGES:
        if (site / package).exists():
            _copy(site / package, tree / "site" / package)
    _copy(ROOT / "engine", tree / "site" / "engine")
    _copy(program, tree / "program.py")
    for file in files:
        shutil.copy(file, tree / "files" / file.name)
    binaries = [tree / python.relative_to("/"), *tree.rglob("*.so"), *tree.rglob("*.so.*")]
    for shared in sorted(_shared(binaries)):
        if not (tree / shared.relative_to("/")).exists():
            _copy(shared, tree / shared.relative_to("/"))
    image, size = folder / "disk.img", sum(p.stat().st_size for p in tree.rglob("*") if p.is_file())
    make = [QEMU / "run", "sbin/mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", tree, image, f"{size * 5 // 4 >> 20}M"]
    subprocess.run(make, check=True, capture_output=True)
    return image


def run(image: Path, machine: Sequence[str]) -> dict[str, Any]:
    """What the program answers on a machine of these options of qemu. Raises Failed."""
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    # the kernel hands what it does not know to the first process: settings with `=`, and what is behind `--`
    start = f"console=ttyS0 quiet panic=-1 root=/dev/nvme0n1 ro init={python} PYTHONPATH=/site PYTHONHOME={sys.base_prefix}"
    command = [
        QEMU / "run",
        "usr/bin/qemu-system-x86_64",
        "-L",
        QEMU / "tree/usr/share/qemu",
        "-L",
        QEMU / "tree/usr/share/seabios",
    ]
    command += ["-accel", "tcg,thread=multi", "-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio", "-cpu", "max"]
    command += ["-drive", f"file={image},format=raw,if=none,id=disk,snapshot=on", "-device", "nvme,serial=1,drive=disk", *machine]
    command += ["-kernel", QEMU / "kernel", "-append", f"{start} -- -B /program.py"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    said = done.stdout.splitlines()
    answers = [line.partition(MARK)[2] for line in said if MARK in line]
    if not answers:
        raise Failed("\n".join([*said[-30:], done.stderr[-1000:]]))
    return json.loads(answers[-1])


def _copy(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, to, ignore=LEFT_OUT)
    else:
        shutil.copy(source, to)


def _shared(binaries: Sequence[Path]) -> Iterator[Path]:
    """The system's libraries that these are linked with, and the one that loads them."""
    listed = subprocess.run(["ldd", *binaries], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        words = line.split()
        path = words[2] if len(words) > 2 and words[1] == "=>" else words[0] if words and words[0].startswith("/") else ""
        if path.startswith("/") and not path.endswith(":") and "/tree/" not in path and Path(path).is_file():
            yield Path(path)
