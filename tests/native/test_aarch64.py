"""The Arm build's kernels, cross-compiled and run under qemu: the definition's bits, the truth's numbers, x86's bits.

See docs/kernels.md. Processors without a set's instructions prove that it is not chosen there; speed says nothing.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine import _native
from engine.kernels.cpu import CpuOps
from tests.native import program, program_edges
from tests.native.program import BLOCKS, same_bits

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-fno-math-errno", "-w", "-pthread"]
SHARED = [*(f"native/{name}.cpp" for name in ("ops", "halves", "pool", "cpu")), "tests/native/program.cpp"]
# As native/CMakeLists.txt has them: the files of a set and its flags.
SETS = {
    "base": (("linear", "attention", "delta", "rows", "table"), []),
    "i8mm": (("linear", "table"), ["-DMOORAGE_REST=base", "-march=armv8.2-a+i8mm"]),
}
# A processor that has the instructions of a set and not those of the next.
MODELS = {"base": "neoverse-n1", "i8mm": "max"}
# What avx2 multiplies as whole numbers (native/kernels/bytes.h), or without its scales (gemm_f8.h): its sums there are others.
WHOLE = tuple(kind for kind in BLOCKS if kind != "Q8_0")
MISSING = [tool for tool in (COMPILER, EMULATOR) if not shutil.which(tool)]
EXACT = 1e-5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: g++-aarch64-linux-gnu, qemu-user)"),
]


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sets in one program, two files at a time."""
    folder = tmp_path_factory.mktemp("arm")
    jobs = [(folder / f"{name}-{file}.o", f"native/kernels/{file}.cpp", [*flags, f"-DMOORAGE_ISA={name}"])
            for name, (files, flags) in SETS.items() for file in files]  # fmt: skip
    jobs += [(folder / f"{Path(file).stem}.o", file, []) for file in SHARED]

    def compile_one(job: tuple[Path, str, list[str]]) -> None:
        subprocess.run([COMPILER, *FLAGS, *job[2], "-c", job[1], "-o", job[0]], cwd=ROOT, check=True)

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


@pytest.fixture(scope="module", params=MODELS)
def machine(request: pytest.FixtureRequest, binary: Path) -> tuple[str, program.Run]:
    """The set, and what runs cases on it."""
    return request.param, on(binary, MODELS[request.param])


@pytest.fixture(scope="module")
def arm(machine) -> program.Run:
    return machine[1]


@pytest.fixture(scope="module")
def fma():
    """An x86 set with fused multiply-add: it runs the same additions in the same order."""
    return CpuOps(threads=1, isa="avx2") if "avx2" in _native.isas() else None


def chosen(run: program.Run) -> str:
    (best,) = run([program.Case(program.BEST, [], [], (1,))])
    return program.ARM_SETS[int(best)]


def test_the_best_set_of_a_processor_is_chosen(machine, binary) -> None:
    name, run = machine
    assert chosen(run) == name


@pytest.mark.parametrize(
    ("model", "name"),
    [("cortex-a53", "base"), ("cortex-a72", "base"), ("a64fx", "base"), ("max,sve=off", "i8mm"), ("max,sve-max-vq=4", "i8mm")],
)
def test_other_processors_choose(binary, model: str, name: str) -> None:
    run = on(binary, model)
    assert chosen(run) == name
    program.check_formats(run)


def same_as_fma(machine, kind: str) -> bool:
    """Whether avx2 runs the same additions in the same order."""
    return kind not in (WHOLE if machine[0] == "base" else BLOCKS)


def test_every_format_has_the_bits_of_its_definition(arm) -> None:
    program.check_formats(arm)


def test_products_are_exact_and_know_nothing_of_their_neighbours(machine, truth, fma) -> None:
    for kind, (x, w, out) in program.check_products(machine[1], truth, EXACT).items():
        if fma and same_as_fma(machine, kind):
            assert same_bits(out, fma.linear(x, w)), kind


def test_products_at_the_edges(arm, truth) -> None:
    program_edges.check_floats_of_any_shape(arm, truth, EXACT)
    program_edges.check_huge_values(arm)
    program_edges.check_largest_numbers(arm)
    program_edges.check_values_that_are_not_finite(arm)
    program_edges.check_many_rows(arm)


def test_experts(machine, truth, fma) -> None:
    for kind, (call, out) in program.check_experts(machine[1], truth, EXACT).items():
        if fma and same_as_fma(machine, kind):
            assert same_bits(out, fma.moe(*call)), kind


def test_half_layers(arm, truth) -> None:
    program.check_halves(arm, truth)


# What follows is compiled for base alone and shared by all sets.


@pytest.fixture(scope="module")
def best(binary) -> program.Run:
    return on(binary, MODELS["i8mm"])


@pytest.mark.parametrize(("hq", "hkv", "dim", "window"), [(8, 2, 64, 0), (6, 3, 20, 64)])
def test_attention(best, truth, fma, hq: int, hkv: int, dim: int, window: int) -> None:
    by, out = program.check_attention(best, truth, 530, hq, hkv, dim, window)
    if fma:
        assert same_bits(out, by(fma, torch.bfloat16))


# More heads than a task takes; more tokens than a span.
@pytest.mark.parametrize(("tokens", "heads"), [(80, 70), (530, 5)])
def test_latent_attention(best, truth, fma, tokens: int, heads: int) -> None:
    by, outs = program.check_latent_attention(best, truth, EXACT, tokens, heads)
    if fma:
        assert all(same_bits(a, b) for a, b in zip(outs, by(fma, torch.bfloat16), strict=True))


def test_delta(best, truth) -> None:
    program.check_delta(best, truth)


def test_norms_rotations_gates_and_routing(best, truth) -> None:
    program.check_rows(best, truth)
    program.check_routing(best, truth)
