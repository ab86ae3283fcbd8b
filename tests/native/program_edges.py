"""Matrix products at the edges of what a set can hold: cases of test_linear.py for machines that run the kernels as a program."""

from __future__ import annotations

import torch

from engine.kernels.reference import ReferenceOps, dequantize
from tests.native.helpers import block_bytes, close
from tests.native.program import BLOCKS, LINEAR, Case, Run, code_of, gen, same_bits, stored

FILLS = (0x00, 0x77, 0x7F, 0x80, 0x88, 0xF8, 0xFF)


def product(x: torch.Tensor, kind: str, w) -> Case:
    return Case(LINEAR, [code_of(kind), len(x), *w.shape], [x, stored(w)], (len(x), w.shape[0]))


def bounded(out: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> bool:
    """AMX loses 2^-16 of a value, VNNI 2^-20 of the largest of its 32 (docs/kernels.md)."""
    exact, weights = x.double(), values.double()
    peak = exact.abs().view(len(x), -1, 32).amax(-1).repeat_interleave(32, 1)
    error = (out.double() - exact @ weights.T).abs()
    return bool((error <= 2e-5 * (exact.abs() @ weights.abs().T) + 2.0**-20 * (peak @ weights.abs().T)).all())


def check_huge_values(run: Run) -> None:
    given = []
    for cols in (256, 1280):
        x = torch.randn(3, cols, generator=gen(20))
        x[:, 37] *= 3000.0
        x[1] *= 2.0**-60
        x[2] *= 2.0**60
        given += [(x, kind, block_bytes(kind, rows=5, cols=cols, seed=2)) for kind in BLOCKS]
    for (x, kind, w), out in zip(given, run([product(*case) for case in given]), strict=True):
        assert bounded(out, x, dequantize(w)), (kind, x.shape)


def check_largest_numbers(run: Run) -> None:
    low_digits = -((128 << 8) + 128) / 2**20, -((64 << 7) + 64) / 2**19
    x = torch.stack([torch.full((256,), v) for v in (1.0, -1.0, 2 - 2.0**-20, *low_digits)])
    x[3:, ::32] = 1.0  # the largest of 32: the others are then whole numbers whose lower digits are -128, or -64
    given = [(x, kind, block_bytes(kind, rows=1, cols=256, fill=fill)) for kind in BLOCKS for fill in FILLS]
    for (_, kind, w), out in zip(given, run([product(*case) for case in given]), strict=True):
        assert bounded(out, x, dequantize(w)), kind


def check_many_rows(run: Run) -> None:
    """More than a set takes at a time, the last time one or two: the bits of a row alone."""
    x, many = torch.randn(67, 512, generator=gen(24)), (67, 34, 33, 3, 1)
    weights = {kind: block_bytes(kind, rows=9, cols=512, seed=6) for kind in ("Q4_0", "Q4_K", "Q6_K", "Q2_K", "Q8_0", "F8_E4M3")}
    plain = torch.randn(9, 512, generator=gen(25))
    kinds = {**weights, "F32": plain, "BF16": plain.bfloat16()}
    results = run([product(x[:n], kind, w) for kind, w in kinds.items() for n in many])
    for i, kind in enumerate(kinds):
        whole, *parts = results[len(many) * i : len(many) * (i + 1)]
        assert all(same_bits(part, whole[: len(part)]) for part in parts), kind


def check_values_that_are_not_finite(run: Run) -> None:
    clean = torch.randn(3, 512, generator=gen(21))
    spoilt = [clean.clone(), clean.clone()]
    for x, value in zip(spoilt, (float("inf"), float("nan")), strict=True):
        x[1, 300] = value
    kinds = {kind: block_bytes(kind, rows=5, cols=512, seed=5) for kind in ("Q4_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "Q8_0")}
    results = run([product(x, kind, w) for kind, w in kinds.items() for x in (clean, *spoilt)])
    for i, kind in enumerate(kinds):
        want, *outs = results[3 * i : 3 * i + 3]
        for out in outs:
            assert not torch.isfinite(out[1]).any() and same_bits(out[[0, 2]], want[[0, 2]]), kind


def check_fp8(run: Run) -> None:
    """Rows of any size, and numbers that are none: they spoil their own row of weights alone."""
    x, w, sizes = torch.rand(5, 256, generator=gen(26)) + 0.5, block_bytes("F8_E4M3", rows=7, cols=256, seed=5), (-126, -60, 100)
    clean, *others = run([product(x * 2.0**e, "F8_E4M3", w) for e in (0, *sizes)])
    for e, out in zip(sizes, others, strict=True):
        close(out * 2.0**-e, clean, 3e-5)
    w.data[2, 132 + 4 + 77], w.data[5, 4] = 0x7F, 0xFF
    (out,), kept = run([product(x, "F8_E4M3", w)]), [0, 1, 3, 4, 6]
    assert out[:, [2, 5]].isnan().all() and same_bits(out[:, kept].contiguous(), clean[:, kept].contiguous())


def check_floats_of_any_shape(run: Run, truth: ReferenceOps, exact: float) -> None:
    given = []
    for rows, n, k in ((1, 32, 64), (3, 33, 40), (17, 70, 129), (20, 5, 512), (1, 1, 1)):
        x, w = torch.randn(rows, k, generator=gen(22)), torch.randn(n, k, generator=gen(23))
        given += [(x, "F32", w), (x, "F16", w.half()), (x, "BF16", w.bfloat16())]
    for (x, kind, w), out in zip(given, run([product(*case) for case in given]), strict=True):
        close(out, truth.linear(x, w.float()), exact)
        assert out.shape == (len(x), len(w)), kind
