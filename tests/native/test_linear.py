"""Matrix products: close to the float32 truth, and a row's bits are its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import _native
from engine.kernels.cpu import CpuOps
from engine.kernels.ops import Quant
from engine.kernels.reference import dequantize
from tests.native.helpers import block_bytes, close

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BLOCKS = [t for t in _native.TYPES if t not in ("F32", "F16", "BF16")]
EXACT = 3e-5  # two roundings of 2^-16 a product with AMX (docs/kernels.md); a bf16 rounding would be 4e-3


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 32, 64), (3, 33, 40), (17, 70, 129), (50, 5, 512), (1, 1, 1), (33, 64, 2048)])
def test_float_weights(ops, truth, rng, dtype, rows: int, n: int, k: int) -> None:
    x, w = torch.randn(rows, k, generator=rng), torch.randn(n, k, generator=rng).to(dtype)
    bias = torch.randn(n, generator=rng)
    close(ops.linear(x, w), truth.linear(x, w.float()), EXACT)
    close(ops.linear(x, w, bias), truth.linear(x, w.float(), bias), EXACT)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("rows", [1, 2, 37])
def test_block_weights(ops, truth, rng, kind: str, rows: int) -> None:
    w = block_bytes(kind, rows=50, cols=768)
    x = torch.randn(rows, 768, generator=rng)
    close(ops.linear(x, w), truth.linear(x, dequantize(w)), EXACT)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "NVFP4"])
@pytest.mark.parametrize("cols", [64, 192, 320, 832])
def test_rows_may_end_inside_a_step_of_256(ops, truth, rng, kind: str, cols: int) -> None:
    w, x = block_bytes(kind, rows=70, cols=cols), torch.randn(5, cols, generator=rng)
    close(ops.linear(x[:1], w), truth.linear(x[:1], dequantize(w)), EXACT)
    assert torch.equal(torch.cat([ops.linear(x[i : i + 1], w) for i in range(5)]), ops.linear(x, w))


@pytest.mark.parametrize("kind", ["bf16", "f32", *BLOCKS])
def test_a_row_is_the_same_in_any_batch(ops, rng, kind: str) -> None:
    k = 2304  # two whole parts of what three or four rows are multiplied in, and a rest
    w = torch.randn(70, k, generator=rng)
    w = {"bf16": w.bfloat16(), "f32": w}.get(kind) if kind in ("bf16", "f32") else block_bytes(kind, rows=70, cols=k)
    x = torch.randn(131, k, generator=rng)
    alone = torch.cat([ops.linear(x[i : i + 1], w) for i in range(len(x))])
    for size in (131, 64, 33, 17, 16, 5, 4, 3, 2):
        assert torch.equal(torch.cat([ops.linear(part.contiguous(), w) for part in x.split(size)]), alone), size


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "k"), [(33, 5), (9, 40), (41, 129), (8, 2085), (65, 4130)])
def test_a_row_of_any_length_is_the_same_in_any_batch(ops, rng, dtype, n: int, k: int) -> None:
    w, x = torch.randn(n, k, generator=rng).to(dtype), torch.randn(129, k, generator=rng)
    alone = torch.cat([ops.linear(x[i : i + 1], w) for i in range(len(x))])
    close(alone, x @ w.float().T, EXACT)
    for size in (129, 128, 40, 34, 33, 32, 4, 3, 2):
        assert torch.equal(torch.cat([ops.linear(part.contiguous(), w) for part in x.split(size)]), alone), size


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("cols", [256, 1024, 1280])
def test_values_beside_a_huge_one_stay_exact(ops, rng, kind: str, cols: int) -> None:
    w = block_bytes(kind, rows=9, cols=cols, seed=2)
    x = torch.randn(3, cols, generator=rng)
    x[:, 37] *= 3000.0  # such channels are what low precision of activations fails on
    x[1] *= 2.0**-60
    x[2] *= 2.0**60
    values, exact = dequantize(w).double(), x.double()
    error = (ops.linear(x, w).double() - exact @ values.T).abs()
    peak = exact.abs().view(3, -1, 32).amax(-1).repeat_interleave(32, 1)  # VNNI: the largest of its 32 bounds a value's error
    assert (error <= 2e-5 * (exact.abs() @ values.abs().T) + 2.0**-20 * (peak @ values.abs().T)).all()  # AMX: 2^-16 of itself


@pytest.mark.parametrize(
    ("kind", "at", "block", "exponents"), [("MXFP4", 0, 17, (100, -100)), ("NVFP4", 3, 36, (0,)), ("NVFP4_SCALED", 6, 76, (0,))]
)
def test_a_scale_of_eight_bits_may_have_any(ops, rng, kind: str, at: int, block: int, exponents: tuple[int, ...]) -> None:
    w = block_bytes(kind, rows=256, cols=256, seed=3)
    largest = 252 if kind == "MXFP4" else 126  # more is infinite as float32, or no number
    w.data.view(256, -1, block)[:, :, at] = torch.arange(256).clamp(max=largest).to(torch.uint8)[:, None]
    values = dequantize(w).double()
    for part, exponent in zip(range(0, 256, 256 // len(exponents)), exponents, strict=True):  # what is tiny meets what is huge
        rows = slice(part, part + 256 // len(exponents))
        x = torch.randn(1, 256, generator=rng) * 2.0**exponent
        error = (ops.linear(x, w).double() - x.double() @ values.T).abs()[:, rows]
        assert (error <= EXACT * (x.double().abs() @ values.abs().T)[:, rows]).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "Q8_0", "F8_E4M3"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_spoils_its_own_row_alone(ops, rng, kind: str, value: float) -> None:
    w = block_bytes(kind, rows=5, cols=512, seed=5)
    x = torch.randn(3, 512, generator=rng)
    clean = ops.linear(x, w)
    x[1, 300] = value
    out = ops.linear(x, w)
    assert not torch.isfinite(out[1]).any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("kind", BLOCKS)
def test_sums_of_the_largest_numbers_and_digits_do_not_overflow(ops, kind: str) -> None:
    cols = 512
    low_digits = -((128 << 8) + 128) / 2**20, -((128 << 7) + 64) / 2**20, -((64 << 7) + 64) / 2**19
    x = torch.stack([torch.full((cols,), v) for v in (1.0, -1.0, 2 - 2.0**-20, *low_digits)])
    x[3:, ::32] = 1.0  # the largest of 32: the others are then whole numbers whose lower digits are -128, -128 and -64, or -64
    for fill in (0x00, 0x77, 0x7F, 0x80, 0x88, 0xF8, 0xFF):
        w = block_bytes(kind, rows=2, cols=cols, fill=fill)
        values, exact = dequantize(w).double(), x.double()
        peak = exact.abs().view(len(x), -1, 32).amax(-1).repeat_interleave(32, 1)
        for size in (6, 4, 1):
            error = (torch.cat([ops.linear(part, w) for part in x.split(size)]).double() - exact @ values.T).abs()
            assert (error <= 2e-5 * (exact.abs() @ values.abs().T) + 2.0**-20 * (peak @ values.abs().T)).all(), (fill, size)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 21])
def test_a_weight_that_is_not_a_number_spoils_its_own_row_alone(ops, rng, rows: int) -> None:
    w = block_bytes("F8_E4M3", rows=7, cols=512, seed=5)
    x = torch.randn(rows, 512, generator=rng)
    clean = ops.linear(x, w)
    w.data[2, 132 + 4 + 77], w.data[5, 4] = 0x7F, 0xFF
    out, others = ops.linear(x, w), [0, 1, 3, 4, 6]
    assert out[:, [2, 5]].isnan().all()
    assert torch.equal(out[:, others], clean[:, others])


@pytest.mark.parametrize("kind", ["F8_E4M3", "Q8_0", "Q4_K", "IQ2_XXS"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_how_many_rows_a_matrix_has_changes_no_bit(ops, rng, kind: str, rows: int) -> None:
    """Rows of weights are read in an order that depends on how many a block has."""
    x, w = torch.randn(rows, 768, generator=rng), block_bytes(kind, rows=35, cols=768, seed=5)
    whole = ops.linear(x, w)
    for n in (1, 2, 3, 5, 8, 13, 31, 33):
        assert torch.equal(ops.linear(x, Quant(w.data[:n].contiguous(), kind, 768)), whole[:, :n]), n


@pytest.mark.parametrize("exponent", [-126, -60, -7, 0, 100])
def test_fp8_meets_rows_of_any_size(ops, rng, exponent: int) -> None:
    w = block_bytes("F8_E4M3", rows=5, cols=256, fill=0x3A)
    x = torch.rand(5, 256, generator=rng) + 0.5
    close(ops.linear(x * 2.0**exponent, w) * 2.0**-exponent, ops.linear(x, w), 3e-5)


def test_zeros_give_zeros(ops) -> None:
    for kind in BLOCKS:
        assert not ops.linear(torch.zeros(2, 256), block_bytes(kind, rows=4, cols=256)).any(), kind


@settings(max_examples=40)
@given(rows=st.integers(1, 80), n=st.integers(1, 70), k=st.integers(1, 300), cut=st.integers(0, 80), seed=st.integers(0, 99))
def test_any_shape_splits_anywhere(rows: int, n: int, k: int, cut: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x, w = torch.randn(rows, k, generator=gen), torch.randn(n, k, generator=gen).bfloat16()
    whole = BEST.linear(x, w)
    cut = min(cut, rows)
    assert torch.equal(whole, torch.cat([BEST.linear(x[:cut], w), BEST.linear(x[cut:], w)]))
    close(whole, x @ w.float().T, EXACT)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_bits(ops, rng, threads: int) -> None:
    x, w = torch.randn(40, 256, generator=rng), torch.randn(300, 256, generator=rng).bfloat16()
    assert torch.equal(CpuOps(threads=threads, isa=ops.isa).linear(x, w), ops.linear(x, w))


BEST = CpuOps(threads=1)
