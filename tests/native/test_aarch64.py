"""The Arm build's kernels, cross-compiled and run under qemu: the definition's bits, the truth's numbers, x86's bits.

See docs/kernels.md. Processors without a set's instructions prove that it is not chosen there; speed says nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import _native
from engine.kernels.cpu import CpuOps
from tests.native import program, program_edges
from tests.native.arm import MISSING, MODELS, build, on
from tests.native.program import BLOCKS, same_bits

EXACT = {"base": 1e-5, "i8mm": 3e-5}  # two bf16 of a number (docs/kernels.md)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: g++-aarch64-linux-gnu, qemu-user)"),
]


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("arm"))


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
    """Whether avx2 runs the same additions in the same order: it multiplies blocks as whole numbers, or without their scales."""
    return kind not in (BLOCKS if machine[0] == "base" else (*BLOCKS, "BF16"))


def test_every_format_has_the_bits_of_its_definition(arm) -> None:
    program.check_formats(arm)


def test_products_are_exact_and_know_nothing_of_their_neighbours(machine, truth, fma) -> None:
    for kind, (x, w, out) in program.check_products(machine[1], truth, EXACT[machine[0]]).items():
        if fma and same_as_fma(machine, kind):
            assert same_bits(out, fma.linear(x, w)), kind


def test_products_at_the_edges(machine, arm, truth) -> None:
    program_edges.check_floats_of_any_shape(arm, truth, EXACT[machine[0]])
    program_edges.check_huge_values(arm)
    program_edges.check_largest_numbers(arm)
    program_edges.check_values_that_are_not_finite(arm)
    program_edges.check_many_rows(arm)
    program_edges.check_fp8(arm)


def test_experts(machine, truth, fma) -> None:
    for kind, (call, out) in program.check_experts(machine[1], truth, EXACT[machine[0]]).items():
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
    by, outs = program.check_latent_attention(best, truth, EXACT["base"], tokens, heads)
    if fma:
        assert all(same_bits(a, b) for a, b in zip(outs, by(fma, torch.bfloat16), strict=True))


def test_delta(best, truth) -> None:
    program.check_delta(best, truth)


def test_norms_rotations_gates_and_routing(best, truth) -> None:
    program.check_rows(best, truth)
    program.check_routing(best, truth)
