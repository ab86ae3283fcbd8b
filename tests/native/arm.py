"""The program of program.cpp as the Arm build's: cross-compiled, and run under qemu as one processor or another."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.native import program

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ("-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-w", "-pthread")
SHARED = (*(f"native/{name}.cpp" for name in ("ops", "halves", "pool", "cpu")), "tests/native/program.cpp")
# As native/CMakeLists.txt has them: the files of a set and its flags.
SETS = {
    "base": (("linear", "attention", "delta", "rows", "table"), ()),
    "i8mm": (("linear", "table"), ("-DMOORAGE_REST=base", "-march=armv8.2-a+i8mm+bf16")),
}
# A processor that has the instructions of a set and not those of the next.
MODELS = {"base": "neoverse-n1", "i8mm": "max"}
MISSING = [tool for tool in (COMPILER, EMULATOR) if not shutil.which(tool)]


def build(folder: Path, optimise: str = "-O2") -> Path:
    """All sets in one program, two files at a time."""
    jobs = [(folder / f"{Path(file).stem}.o", file, ()) for file in SHARED]
    for name, (files, flags) in SETS.items():
        jobs += [(folder / f"{name}-{f}.o", f"native/kernels/{f}.cpp", (*flags, f"-DMOORAGE_ISA={name}")) for f in files]

    def compile_one(job: tuple[Path, str, tuple[str, ...]]) -> None:
        subprocess.run([COMPILER, *FLAGS, optimise, *job[2], "-c", job[1], "-o", job[0]], cwd=ROOT, check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, jobs))
    subprocess.run([COMPILER, "-static", *(job[0] for job in jobs), "-o", folder / "kernels"], check=True)
    return folder / "kernels"


def on(binary: Path, model: str) -> program.Run:
    """Runs cases in one process on an emulated processor."""

    def run(cases: list[program.Case]) -> list[torch.Tensor]:
        command = [EMULATOR, "-cpu", model, binary, "2"]
        done = subprocess.run(command, input=program.stdin_of(cases), capture_output=True, check=True)
        return program.results_of(cases, done.stdout)

    return run
