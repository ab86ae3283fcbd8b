"""avx512, avx512vnni and amx, which this machine may not have: the module's objects, run by an emulator of such processors.

See docs/kernels.md. Bits and batches are exact; speed says nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native import emulator, program, program_edges

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native"
# A processor of Bochs's for each set: the best one it has is what the program takes.
MODELS = {"avx512": "corei7_skylake_x", "avx512vnni": "tigerlake", "amx": "sapphire_rapids"}


def missing() -> str:
    """Why nothing can be run here, in one line, or nothing."""
    if not (BUILD / "build.ninja").exists():
        return "native/ was not built in this checkout (run ops/build_native)"
    found = subprocess.run([ROOT / "ops" / "emulator", "--path"], capture_output=True, text=True)
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """The emulated machine's ROM and the program."""
    if reason := missing():
        pytest.skip(reason)
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
    subprocess.run([cmake, "--build", BUILD, "--target", "kernels_program"], check=True, capture_output=True)
    return emulator.build_rom(tmp_path_factory.mktemp("rom")), emulator.mended(BUILD / "kernels_program")


@pytest.fixture(scope="module", params=MODELS)
def machine(request: pytest.FixtureRequest, kernels):
    """The set, and what runs cases on it."""
    rom, elf = kernels

    def run(cases: list[program.Case]):
        room = 4 * sum(int(program.np.prod(case.shape)) for case in cases)
        stdout = emulator.run(ROOT / ".cache/bochs/bochs", MODELS[request.param], rom, elf, program.stdin_of(cases), room)
        return program.results_of(cases, stdout)

    return request.param, run


@pytest.fixture(scope="module")
def run(machine):
    return machine[1]


@pytest.fixture(scope="module")
def exact(machine) -> float:
    return 3e-5 if machine[0] == "amx" else 1e-5  # two bf16 of a number (docs/kernels.md)


def test_the_best_set_of_a_processor_is_chosen(machine) -> None:
    name, run = machine
    (best,) = run([program.Case(program.BEST, [], [], (1,))])
    assert program.SETS[int(best)] == name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("trinity_apu", "base"),  # FMA without AVX2
        ("corei7_haswell_4770", "avx2"),
        ("arrow_lake", "avx2"),  # VNNI without AVX-512
        ("corei3_cnl", "avx512"),  # VBMI without VNNI
    ],
)
def test_other_processors_choose(kernels, model: str, name: str) -> None:
    rom, elf = kernels
    case = program.Case(program.BEST, [], [], (1,))
    out = emulator.run(ROOT / ".cache/bochs/bochs", model, rom, elf, program.stdin_of([case]), 4)
    assert program.SETS[int(program.results_of([case], out)[0])] == name


def test_a_program_that_ends_badly_is_noticed(kernels) -> None:
    with pytest.raises(emulator.Failed, match="status 0x0000000000000002"):
        emulator.run(ROOT / ".cache/bochs/bochs", MODELS["avx512"], *kernels, stdin=b"", room=64)


def test_every_format_has_the_bits_of_its_definition(run) -> None:
    program.check_formats(run)


def test_products_are_exact_and_know_nothing_of_their_neighbours(run, truth, exact) -> None:
    program.check_products(run, truth, exact)


def test_products_at_the_edges(run, truth, exact) -> None:
    program_edges.check_floats_of_any_shape(run, truth, exact)
    program_edges.check_huge_values(run)
    program_edges.check_largest_numbers(run)
    program_edges.check_values_that_are_not_finite(run)


def test_experts(run, truth, exact) -> None:
    program.check_experts(run, truth, exact)


# The second is longer than a span.
@pytest.mark.parametrize(("tokens", "hq", "hkv", "dim", "window"), [(80, 8, 2, 64, 0), (530, 3, 1, 20, 0), (80, 6, 3, 20, 64)])
def test_attention(run, truth, tokens: int, hq: int, hkv: int, dim: int, window: int) -> None:
    program.check_attention(run, truth, tokens, hq, hkv, dim, window)


@pytest.mark.parametrize(("tokens", "heads"), [(80, 5), (9, 70)])
def test_latent_attention(run, truth, exact, tokens: int, heads: int) -> None:
    program.check_latent_attention(run, truth, exact, tokens, heads)


def test_delta(run, truth) -> None:
    program.check_delta(run, truth)


def test_norms_rotations_gates_and_routing(run, truth) -> None:
    program.check_rows(run, truth)
    program.check_routing(run, truth)


def test_half_layers(run, truth) -> None:
    program.check_halves(run, truth)
