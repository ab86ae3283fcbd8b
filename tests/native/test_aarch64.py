"""The Arm build's kernels, cross-compiled and run under qemu: the definition's bits, the truth's numbers, x86's bits."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import _native
from engine.kernels.cpu import CpuOps
from engine.kernels.ops import KVLayer, Quant
from engine.kernels.reference import dequantize
from tests.native.helpers import PAGE, block_bytes, close, segments
from tests.native.test_formats import BLOCKS, meaning

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++20", "-O2", "-static", "-ffp-contract=off", "-fno-math-errno", "-DMOORAGE_ISA=base", "-w", "-pthread"]
SOURCES = [*(f"native/{name}.cpp" for name in ("ops", "pool", "cpu")), "tests/native/aarch64/main.cpp"]
SOURCES += [f"native/kernels/{name}.cpp" for name in ("linear", "attention", "delta", "rows", "table")]
# What avx2 multiplies as whole numbers (native/kernels/bytes.h): its sums there are others than float32's.
WHOLE = tuple(kind for kind in BLOCKS if kind not in ("Q8_0", "F8_E4M3"))
MISSING = [tool for tool in (COMPILER, EMULATOR) if not shutil.which(tool)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: g++-aarch64-linux-gnu, qemu-user)"),
]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory):
    """Runs cases [(code, numbers, arrays, shape of the result)] in one process on the emulated machine."""
    program = tmp_path_factory.mktemp("arm") / "kernels"
    subprocess.run([COMPILER, *FLAGS, *SOURCES, "-o", str(program)], cwd=ROOT, check=True)

    def run(cases: list[tuple]) -> list[torch.Tensor]:
        parts = []
        for code, numbers, arrays, _ in cases:
            parts += [struct.pack(f"<{1 + len(numbers)}i", code, *numbers), *(a.contiguous().numpy().tobytes() for a in arrays)]
        command = [EMULATOR, "-cpu", "max", program]
        done = subprocess.run(command, input=b"".join([*parts, b"\xff" * 4]), capture_output=True, check=True)
        values = torch.from_numpy(np.frombuffer(done.stdout, dtype=np.float32).copy())
        sizes = [int(np.prod(shape)) for *_, shape in cases]
        assert values.numel() == sum(sizes)
        return [part.view(shape) for part, (*_, shape) in zip(values.split(sizes), cases, strict=True)]

    return run


@pytest.fixture(scope="module")
def fma():
    """An x86 set with fused multiply-add: it runs the same additions in the same order."""
    return CpuOps(threads=1, isa="avx2") if "avx2" in _native.isas() else None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def code_of(kind: str) -> int:
    return _native.TYPES.index(kind)


def test_every_format_has_the_bits_of_its_definition(arm) -> None:
    weights = [block_bytes(kind, rows=3, cols=512, seed=3) for kind in BLOCKS]
    results = arm([(0, [code_of(w.type), *w.shape], [w.data], w.shape) for w in weights])
    for weight, out in zip(weights, results, strict=True):
        assert same_bits(out, torch.from_numpy(np.ascontiguousarray(meaning(weight)))), weight.type


def test_products_are_exact_and_know_nothing_of_their_neighbours(arm, truth, fma) -> None:
    x = torch.randn(37, 768, generator=torch.Generator().manual_seed(1))
    plain = torch.randn(45, 768, generator=torch.Generator().manual_seed(2))
    weights = [(kind, block_bytes(kind, rows=45, cols=768)) for kind in BLOCKS]
    weights += [("F32", plain), ("F16", plain.half()), ("BF16", plain.bfloat16())]

    def case(kind: str, w, rows: int) -> tuple:
        data = w.data if isinstance(w, Quant) else w.view(torch.uint8)
        return 1, [code_of(kind), rows, 45, 768], [x[:rows], data], (rows, 45)

    results = arm([case(kind, w, rows) for kind, w in weights for rows in (1, 2, 5, 37)])
    for i, (kind, w) in enumerate(weights):
        *few, many = results[4 * i : 4 * i + 4]
        close(many, truth.linear(x, dequantize(w) if isinstance(w, Quant) else w.float()), 1e-5)
        assert all(same_bits(part, many[: len(part)]) for part in few), kind
        if fma and kind not in WHOLE:
            assert same_bits(many, fma.linear(x, w)), kind


@pytest.mark.parametrize("kind", ["BF16", "Q4_K", "MXFP4", "Q8_0"])
def test_experts(arm, truth, fma, kind: str) -> None:
    n, k, experts, hidden, inter = 9, 2, 4, 256, 256
    gen = torch.Generator().manual_seed(4)
    x, weights = torch.randn(n, hidden, generator=gen), torch.rand(n, k, generator=gen)
    ids = torch.stack([torch.randperm(experts, generator=gen)[:k] for _ in range(n)]).int()
    if kind == "BF16":
        up = (torch.randn(experts, 2 * inter, hidden, generator=gen) / 16).bfloat16()
        down = (torch.randn(experts, hidden, inter, generator=gen) / 16).bfloat16()
        arrays, floats = [up.view(torch.uint8), down.view(torch.uint8)], (up.float(), down.float())
    else:
        flat = block_bytes(kind, experts * 2 * inter, hidden, 1), block_bytes(kind, experts * hidden, inter, 2)
        shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)
        up, down = (Quant(w.data.view(*s[:2], -1), kind, s[2]) for w, s in zip(flat, shapes, strict=True))
        arrays, floats = [up.data, down.data], tuple(dequantize(w).view(s) for w, s in zip(flat, shapes, strict=True))
    out, first = arm(
        [
            (2, [code_of(kind), rows, k, experts, hidden, inter], [x[:rows], ids[:rows], weights[:rows], *arrays], (rows, hidden))
            for rows in (n, 1)
        ]
    )
    close(out, truth.moe(x, ids, weights, *floats, "silu"), 1e-5)
    assert same_bits(first, out[:1])
    if fma and kind not in WHOLE:
        assert same_bits(out, fma.moe(x, ids, weights, up, down, "silu"))


@pytest.mark.parametrize(("hq", "hkv", "dim", "window"), [(8, 2, 64, 0), (6, 3, 20, 64)])
def test_attention(arm, truth, fma, hq: int, hkv: int, dim: int, window: int) -> None:
    n, gen = 530, torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, h, dim, generator=gen).bfloat16().float() for h in (hq, hkv, hkv))
    whole, steps = arm([(3, [n, step, hq, hkv, dim, window], [q, k, v], (n, hq, dim)) for step in (n, 37)])
    assert same_bits(whole, steps)
    pages = -(-n // PAGE)
    seg = segments([0, n], [0], [list(range(pages))], [0])
    for ops, dtype in ((truth, torch.float32), (fma, torch.bfloat16)):
        if ops is None:
            continue
        kv = KVLayer(*(torch.zeros(pages, hkv, PAGE, dim, dtype=dtype) for _ in range(2)))
        want = ops.attention(q, k, v, kv, seg, 0.125, window or None)
        close(whole, want, 5e-5) if ops is truth else None
        assert ops is truth or same_bits(whole, want)


def test_latent_attention(arm, truth, fma) -> None:
    n, heads, rank, dim, gen = 530, 70, 32, 48, torch.Generator().manual_seed(6)
    q, latent = torch.randn(n, heads, dim, generator=gen), torch.randn(n, dim, generator=gen).bfloat16().float()
    weight = torch.randn(heads, 24, rank, generator=gen)
    whole, steps = arm([(4, [n, step, heads, dim, rank], [q, latent], (n, heads, rank)) for step in (n, 37)])
    assert same_bits(whole, steps)
    seg = segments([0, n], [0], [list(range(-(-n // PAGE)))], [0])
    (product,) = arm([(5, [code_of("F32"), n, heads, 24, rank], [whole, weight.view(torch.uint8)], (n, heads, 24))])
    close(product, truth.heads_linear(whole, weight), 1e-5)
    for ops, dtype in ((truth, torch.float32), (fma, torch.bfloat16)):
        if ops is None:
            continue
        want = ops.latent_attention(q, latent, KVLayer(torch.zeros(9, 1, PAGE, dim, dtype=dtype), None), seg, 0.125, rank)
        close(whole, want, 5e-5)
        if ops is fma:
            assert same_bits(whole, want) and same_bits(product, ops.heads_linear(whole, weight))
