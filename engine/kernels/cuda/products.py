"""Matrix products and rows of a table, from weights as stored.

One row of x has the same bits among any others: columns are summed in spans of `SPAN`, ascending, and spans are added in order,
whether one program walks them all (many rows) or each has its own (few rows, where one program a tile would leave most of the
device idle).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.cuda.formats import FORMATS, columns, numbers
from engine.kernels.cuda.lang import dot, halves

SPAN = 512  # columns of x one partial sum covers: a 2,048-wide layer becomes four times as many programs for one row
TILE = 64  # rows of a weight a program takes: the M of Hopper's wgmma, and four m16 tiles elsewhere
FEW, MANY = 16, 64  # rows of x a program takes


@triton.jit
def product(
    w, row, live, x, x_row, x_live, acc, first, last,
    COLS: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, TWO: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """acc [N, T] + steps first..last of the rows of w at `row` [N] times the rows of x at `x_row` [T]."""
    for step in range(first, last):
        a, b, scale = numbers(KIND, HALF, w, row, live, step, COLS)
        low, high = columns(KIND, HALF, step)
        if SCALED:
            group = tl.zeros(acc.shape, tl.float32)
            group = _half_step(a, _x(x, x_row, x_live, low, COLS), group, TWO)
            group = _half_step(b, _x(x, x_row, x_live, high, COLS), group, TWO)
            acc = tl.fma(scale[:, None].broadcast_to(acc.shape), group, acc)
        else:
            acc = _half_step(a, _x(x, x_row, x_live, low, COLS), acc, TWO)
            acc = _half_step(b, _x(x, x_row, x_live, high, COLS), acc, TWO)
    return acc


@triton.jit
def _x(x, row, live, column, COLS: tl.constexpr):
    """x transposed, [HALF, T]."""
    return tl.load(x + row[None, :] + column[:, None], mask=live[None, :] & (column[:, None] < COLS), other=0.0)


@triton.jit
def _half_step(w, x, acc, TWO: tl.constexpr):
    high, low = halves(x)
    w_high, w_low = halves(w)
    acc = dot(w_high, high, acc)
    acc = dot(w_high, low, acc)
    if TWO:
        acc = dot(w_low, high, acc)
    return acc


@triton.jit
def linear_kernel(
    out, x, w, bias, rows, outer, row_size, x_stride,
    COLS: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr, BIASED: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr, HALF: tl.constexpr, TWO: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """out [rows, outer]; with SPLIT [spans, rows, outer], the partial sum of each span."""
    n, t = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row, x_row = n.to(tl.int64) * row_size, t.to(tl.int64) * x_stride
    per_span: tl.constexpr = SPAN // (2 * HALF)
    steps: tl.constexpr = (COLS + 2 * HALF - 1) // (2 * HALF)
    spans: tl.constexpr = (steps + per_span - 1) // per_span
    first = 0
    last = spans
    if SPLIT:
        first = tl.program_id(2)
        last = first + 1
    total = tl.zeros((TILE, WIDTH), tl.float32)
    for span in range(first, last):
        acc = tl.zeros((TILE, WIDTH), tl.float32)
        end = tl.minimum(span * per_span + per_span, steps)
        acc = product(w, row, n < outer, x, x_row, t < rows, acc, span * per_span, end, COLS, KIND, HALF, TWO, SCALED)
        total += acc
    if BIASED and not SPLIT:
        total += tl.load(bias + n, mask=n < outer, other=0.0)[:, None]
    at = t.to(tl.int64)[None, :] * outer + n[:, None]
    if SPLIT:
        at += first.to(tl.int64) * rows * outer
    tl.store(out + at, total, mask=(n < outer)[:, None] & (t < rows)[None, :])


@triton.jit
def join_kernel(out, parts, bias, size, outer, SPANS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """The spans' sums [SPANS, size] added in order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for span in range(SPANS):
        total += tl.load(parts + span * size.to(tl.int64) + at, mask=at < size, other=0.0)
    if BIASED:
        total += tl.load(bias + at % outer, mask=at < size, other=0.0)
    tl.store(out + at, total, mask=at < size)


@triton.jit
def rows_kernel(
    out, table, ids, count, row_size,
    COLS: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[t] = row ids[t] of a table, `ROWS` rows and a step of columns a program."""
    t, step = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    live = t < count
    row = tl.load(ids + t, mask=live, other=0).to(tl.int64) * row_size
    a, b, scale = numbers(KIND, HALF, table, row, live, step, COLS)
    if SCALED:
        a, b = a * scale[:, None], b * scale[:, None]
    low, high = columns(KIND, HALF, step)
    at = out + t.to(tl.int64)[:, None] * COLS
    tl.store(at + low[None, :], a, mask=live[:, None] & (low[None, :] < COLS))
    tl.store(at + high[None, :], b, mask=live[:, None] & (high[None, :] < COLS))


@triton.jit
def heads_kernel(
    out, x, w, rows, outer, head_size, row_size, x_stride,
    COLS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr, HALF: tl.constexpr, TWO: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """out [rows, heads, outer]: a matrix of its own for each head of x [rows, heads, COLS]."""
    n, t = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    head = tl.program_id(2).to(tl.int64)
    row, x_row = head * head_size + n.to(tl.int64) * row_size, t.to(tl.int64) * x_stride + head * COLS
    steps: tl.constexpr = (COLS + 2 * HALF - 1) // (2 * HALF)
    acc = tl.zeros((TILE, WIDTH), tl.float32)
    acc = product(w, row, n < outer, x, x_row, t < rows, acc, 0, steps, COLS, KIND, HALF, TWO, SCALED)
    at = (t.to(tl.int64) * tl.num_programs(2) + head)[None, :] * outer + n[:, None]
    tl.store(out + at, acc, mask=(n < outer)[:, None] & (t < rows)[None, :])


def warps(width: int) -> int:
    """Twice as many for the wide tile: its sums would spill out of the registers of four."""
    return 4 if width == FEW else 8


def shape_of(kind: str) -> dict[str, object]:
    """The constants of a format every product takes."""
    found = FORMATS[kind]
    return {"KIND": kind, "HALF": found.half, "TWO": found.two, "SCALED": found.scaled}


def linear(
    x: torch.Tensor, w: torch.Tensor, kind: str, cols: int, bias: torch.Tensor | None, width: int, split: bool
) -> torch.Tensor:
    """x [T, K] times w [N, ...] of a format; `width` and `split` change its speed alone."""
    rows, outer = x.shape[0], w.shape[0]
    spans = -(-cols // SPAN)
    split = split and spans > 1
    out = torch.empty((spans, rows, outer) if split else (rows, outer), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(outer, TILE), triton.cdiv(rows, width), spans if split else 1)
    linear_kernel[grid](
        out, x, w, bias, rows, outer, w.stride(0), x.stride(0),
        COLS=cols, SPAN=SPAN, SPLIT=split, BIASED=bias is not None, TILE=TILE, WIDTH=width, **shape_of(kind),
        num_warps=warps(width),
    )  # fmt: skip
    if not split:
        return out
    joined = torch.empty(rows, outer, dtype=torch.float32, device=x.device)
    join_kernel[(triton.cdiv(rows * outer, 256),)](
        joined, out, bias, rows * outer, outer, SPANS=spans, BIASED=bias is not None, BLOCK=256
    )
    return joined


def table_rows(table: torch.Tensor, kind: str, cols: int, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix as float32, each number as its format defines it."""
    count = ids.shape[0]
    out = torch.empty(count, cols, dtype=torch.float32, device=ids.device)
    found, rows = FORMATS[kind], min(32, triton.next_power_of_2(max(1, count)))
    rows_kernel[(triton.cdiv(count, rows), triton.cdiv(cols, 2 * found.half))](
        out, table, ids, count, table.stride(0), COLS=cols, KIND=kind, HALF=found.half, SCALED=found.scaled, ROWS=rows
    )
    return out


def heads_linear(x: torch.Tensor, w: torch.Tensor, kind: str, cols: int) -> torch.Tensor:
    """x [T, heads, K], w [heads, N, ...] -> [T, heads, N]."""
    rows, heads, outer = x.shape[0], x.shape[1], w.shape[1]
    width = FEW if rows <= FEW else MANY
    out = torch.empty(rows, heads, outer, dtype=torch.float32, device=x.device)
    heads_kernel[(triton.cdiv(outer, TILE), triton.cdiv(rows, width), heads)](
        out, x, w, rows, outer, w.stride(0), w.stride(1), x.stride(0),
        COLS=cols, TILE=TILE, WIDTH=width, **shape_of(kind), num_warps=warps(width),
    )  # fmt: skip
    return out
