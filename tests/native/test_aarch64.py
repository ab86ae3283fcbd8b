"""The Arm build's kernels, cross-compiled and run under qemu: the definition's bits, the truth's numbers, x86's bits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from engine import _native
from engine.kernels.cpu import CpuOps
from tests.native import program
from tests.native.program import BLOCKS, same_bits

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++20", "-O2", "-static", "-ffp-contract=off", "-fno-math-errno", "-DMOORAGE_ISA=base", "-w", "-pthread"]
SOURCES = [*(f"native/{name}.cpp" for name in ("ops", "halves", "pool", "cpu")), "tests/native/program.cpp"]
SOURCES += [f"native/kernels/{name}.cpp" for name in ("linear", "attention", "delta", "rows", "table")]
# What avx2 multiplies as whole numbers (native/kernels/bytes.h), or without its scales (gemm_f8.h): its sums there are others.
WHOLE = tuple(kind for kind in BLOCKS if kind != "Q8_0")
MISSING = [tool for tool in (COMPILER, EMULATOR) if not shutil.which(tool)]
EXACT = 1e-5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: g++-aarch64-linux-gnu, qemu-user)"),
]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> program.Run:
    """Runs cases in one process on the emulated machine."""
    binary = tmp_path_factory.mktemp("arm") / "kernels"
    subprocess.run([COMPILER, *FLAGS, *SOURCES, "-o", str(binary)], cwd=ROOT, check=True)

    def run(cases: list[program.Case]) -> list[torch.Tensor]:
        command = [EMULATOR, "-cpu", "max", binary, "2"]
        done = subprocess.run(command, input=program.stdin_of(cases), capture_output=True, check=True)
        return program.results_of(cases, done.stdout)

    return run


@pytest.fixture(scope="module")
def fma():
    """An x86 set with fused multiply-add: it runs the same additions in the same order."""
    return CpuOps(threads=1, isa="avx2") if "avx2" in _native.isas() else None


def test_every_format_has_the_bits_of_its_definition(arm) -> None:
    program.check_formats(arm)


def test_products_are_exact_and_know_nothing_of_their_neighbours(arm, truth, fma) -> None:
    for kind, (x, w, out) in program.check_products(arm, truth, EXACT).items():
        if fma and kind not in WHOLE:
            assert same_bits(out, fma.linear(x, w)), kind


def test_experts(arm, truth, fma) -> None:
    for kind, (call, out) in program.check_experts(arm, truth, EXACT).items():
        if fma and kind not in WHOLE:
            assert same_bits(out, fma.moe(*call)), kind


@pytest.mark.parametrize(("hq", "hkv", "dim", "window"), [(8, 2, 64, 0), (6, 3, 20, 64)])
def test_attention(arm, truth, fma, hq: int, hkv: int, dim: int, window: int) -> None:
    by, out = program.check_attention(arm, truth, 530, hq, hkv, dim, window)
    if fma:
        assert same_bits(out, by(fma, torch.bfloat16))


def test_latent_attention(arm, truth, fma) -> None:
    by, outs = program.check_latent_attention(arm, truth, EXACT, 530, 70)
    if fma:
        assert all(same_bits(a, b) for a, b in zip(outs, by(fma, torch.bfloat16), strict=True))


def test_delta(arm, truth) -> None:
    program.check_delta(arm, truth)


def test_norms_rotations_gates_and_routing(arm, truth) -> None:
    program.check_rows(arm, truth)
    program.check_routing(arm, truth)


def test_half_layers(arm, truth) -> None:
    program.check_halves(arm, truth)
