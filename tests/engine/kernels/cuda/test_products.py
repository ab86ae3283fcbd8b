"""Matrix products: the float32 truth, and a row's bits are its own whatever program computes it."""

import pytest
import torch

from engine.kernels.cuda.formats import FORMATS
from engine.kernels.cuda.products import FEW, MANY, linear, table_rows
from engine.kernels.ops import Quant
from engine.kernels.reference import dequantize
from tests.native.helpers import block_bytes, close

EXACT = 5e-5  # x in two bf16 loses 2^-17 of a value, a weight in two 2^-16 (docs/kernels.md)
BLOCKS = [kind for kind, found in FORMATS.items() if found.block]
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def stored(kind: str, rows: int, cols: int):
    """A weight as stored and as float32."""
    if kind in BLOCKS:
        weight = block_bytes(kind, rows, cols)
        return weight.data, dequantize(weight)
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(3)).to(FLOATS[kind])
    return weight, weight.float()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_of_a_table_has_the_bits_of_its_format(there, kind: str) -> None:
    data, values = stored(kind, 19, 768 if kind in BLOCKS else 77)
    ids = torch.tensor([3, 0, 18, 3], dtype=torch.int32)
    assert torch.equal(there(table_rows)(data, kind, values.shape[1], ids), values[ids.long()])


@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_float32s_and_know_nothing_of_their_neighbours(there, truth, rng, kind: str) -> None:
    """768 columns are two spans; few rows with a program a span, many with one for all."""
    cols = 768 if kind in ("BF16", "Q4_K") else 256
    data, values = stored(kind, 20, cols)
    x, bias = torch.randn(18, cols, generator=rng), torch.randn(20, generator=rng)
    run = there(linear)
    whole = run(x, data, kind, cols, bias, MANY, False)
    close(whole, truth.linear(x, values, bias), EXACT)
    assert torch.equal(run(x[16:], data, kind, cols, bias, FEW, True), whole[16:])


@pytest.mark.parametrize(("rows", "outer", "cols"), [(1, 1, 1), (3, 33, 40), (5, 5, 600)])
def test_odd_shapes(ops, truth, rng, rows: int, outer: int, cols: int) -> None:
    x, w = torch.randn(rows, cols, generator=rng), torch.randn(outer, cols, generator=rng).bfloat16()
    close(ops.linear(x, w), truth.linear(x, w.float()), EXACT)


def test_columns_of_a_wider_tensor(ops, truth, rng) -> None:
    x, w = torch.randn(3, 200, generator=rng)[:, 30:130], torch.randn(9, 100, generator=rng).bfloat16()
    close(ops.linear(x, w), truth.linear(x, w.float()), EXACT)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_spoils_its_own_row_alone(ops, rng, value: float) -> None:
    x, w = torch.randn(3, 64, generator=rng), torch.randn(5, 64, generator=rng).bfloat16()
    clean = ops.linear(x, w)
    x[1, 30] = value
    out = ops.linear(x, w)
    assert not torch.isfinite(out[1]).any() and torch.equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 70])  # a program of many rows has 64
def test_any_rows_any_program(there, truth, rng, kind: str, rows: int) -> None:
    data, values = stored(kind, 50, 1280)
    x = torch.randn(rows, 1280, generator=rng)
    run = there(linear)
    whole = run(x, data, kind, 1280, None, MANY, False)
    close(whole, truth.linear(x, values), EXACT)
    for width, split in ((FEW, False), (FEW, True), (MANY, True)):
        assert torch.equal(run(x, data, kind, 1280, None, width, split), whole)
    assert torch.equal(run(x[rows // 2 :], data, kind, 1280, None, FEW, True), whole[rows // 2 :])


def test_kernels_refuse_a_format_they_do_not_know(ops) -> None:
    with pytest.raises(ValueError, match="IQ2_XS has no kernel; supported: F8_E4M3"):
        ops.prepare(block_bytes("IQ2_XS", 1, 256))


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_a_matrix_for_each_head(ops, truth, rng, kind: str) -> None:
    data, values = stored(kind, 3 * 20, 96)
    weight = Quant(data.view(3, 20, -1), kind, 96) if kind in BLOCKS else data.view(3, 20, -1)
    x = torch.randn(18, 3, 96, generator=rng)
    whole = ops.heads_linear(x, weight)
    close(whole, truth.heads_linear(x, values.view(3, 20, 96)), EXACT)
    assert torch.equal(ops.heads_linear(x[16:], weight), whole[16:])
