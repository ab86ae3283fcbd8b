"""Routed experts: tokens by expert, gate, up and activation in one kernel, down in one, then the weighted sum.

Nothing here waits for the device: how many rows an expert has stays there, and each program finds its expert and rows by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.cuda.lang import find_block
from engine.kernels.cuda.products import FEW, MANY, TILE, product, shape_of, warps
from engine.kernels.cuda.rows import activate

CHUNK = 1024  # ids a program of `group_kernel` looks at in one go


@triton.jit
def group_kernel(order, starts, ids, count, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """One program an expert: its rows, ascending, at order[starts[e]:starts[e + 1]]."""
    expert = tl.program_id(0)
    before = tl.zeros((CHUNK,), tl.int32)
    for begin in range(0, count, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        before += (tl.load(ids + at, mask=at < count, other=EXPERTS) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + expert, place)
    for begin in range(0, count, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        mine = tl.load(ids + at, mask=at < count, other=EXPERTS) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + rank - 1, at, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, place)


@triton.jit
def _mine(starts, place, bank, block, EXPERTS: tl.constexpr, POWER: tl.constexpr, PLACED: tl.constexpr, WIDTH: tl.constexpr):
    """Of a block: the first of its rows in `order`, the end of its expert's, and the expert's row of the bank; -1: none."""
    e = tl.arange(0, POWER)
    start = tl.load(starts + e, mask=e < EXPERTS, other=0)
    end = tl.load(starts + e + 1, mask=e < EXPERTS, other=0)
    expert, offset = find_block(end - start, block, WIDTH)
    safe = tl.minimum(expert, EXPERTS - 1)
    last = tl.load(starts + safe + 1)
    first = tl.where(expert < EXPERTS, tl.load(starts + safe) + offset, last)
    at = safe
    if PLACED:
        at = tl.load(place + safe)
    return first, last, tl.where((at >= 0) & (at < bank), at, -1)


@triton.jit
def gate_up_kernel(
    out, x, w, order, starts, place, bank, inter, bank_size, row_size, x_stride,
    COLS: tl.constexpr, ACT: tl.constexpr, TOP: tl.constexpr, EXPERTS: tl.constexpr, POWER: tl.constexpr, PLACED: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, TWO: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """out [P, inter], rows as in `order`: act(gate x) * up x. x has a row for every `TOP` of the P."""
    first, last, at = _mine(starts, place, bank, tl.program_id(1), EXPERTS, POWER, PLACED, WIDTH)
    if first >= last:
        return
    n, j = tl.program_id(0) * TILE + tl.arange(0, TILE), first + tl.arange(0, WIDTH)
    live = n < tl.where(at >= 0, inter, 0)
    x_row = tl.load(order + j, mask=j < last, other=0).to(tl.int64) // TOP * x_stride
    row = tl.maximum(at, 0).to(tl.int64) * bank_size + n.to(tl.int64) * row_size
    steps: tl.constexpr = (COLS + 2 * HALF - 1) // (2 * HALF)
    zero = tl.zeros((TILE, WIDTH), tl.float32)
    gate = product(w, row, live, x, x_row, j < last, zero, 0, steps, COLS, KIND, HALF, TWO, SCALED)
    row += inter.to(tl.int64) * row_size
    up = product(w, row, live, x, x_row, j < last, zero, 0, steps, COLS, KIND, HALF, TWO, SCALED)
    target = out + j.to(tl.int64)[None, :] * inter + n[:, None]
    tl.store(target, activate(gate, ACT) * up, mask=(n < inter)[:, None] & (j < last)[None, :])


@triton.jit
def down_kernel(
    out, h, w, order, starts, place, bank, outer, bank_size, row_size,
    COLS: tl.constexpr, EXPERTS: tl.constexpr, POWER: tl.constexpr, PLACED: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, TWO: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """out [P, outer], rows as they came. What an expert without a place in the bank would give is not a number: never silent."""
    first, last, at = _mine(starts, place, bank, tl.program_id(1), EXPERTS, POWER, PLACED, WIDTH)
    if first >= last:
        return
    n, j = tl.program_id(0) * TILE + tl.arange(0, TILE), first + tl.arange(0, WIDTH)
    live = n < tl.where(at >= 0, outer, 0)
    row = tl.maximum(at, 0).to(tl.int64) * bank_size + n.to(tl.int64) * row_size
    steps: tl.constexpr = (COLS + 2 * HALF - 1) // (2 * HALF)
    zero = tl.zeros((TILE, WIDTH), tl.float32)
    acc = product(w, row, live, h, j.to(tl.int64) * COLS, j < last, zero, 0, steps, COLS, KIND, HALF, TWO, SCALED)
    acc = tl.where(at >= 0, acc, float("nan"))
    target = tl.load(order + j, mask=j < last, other=0).to(tl.int64) * outer
    tl.store(out + target[None, :] + n[:, None], acc, mask=(n < outer)[:, None] & (j < last)[None, :])


@triton.jit
def merge_kernel(out, parts, ids, weights, hidden, TOP: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = the sum of weights[t, r] parts[t, r], experts in ascending number, from zero."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, POWER)
    mine = tl.load(ids + t * TOP + r, mask=r < TOP, other=2147483647)
    before = (mine[None, :] < mine[:, None]) | ((mine[None, :] == mine[:, None]) & (r[None, :] < r[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP):
        at = t * TOP + tl.sum(tl.where(rank == i, r, 0), 0)
        part = tl.load(parts + at * hidden + column, mask=column < hidden, other=0.0)
        total = tl.fma(tl.load(weights + at).broadcast_to((BLOCK,)), part, total)
    tl.store(out + t * hidden + column, total, mask=column < hidden)


def expert_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: tuple[torch.Tensor, str, int],
    down: tuple[torch.Tensor, str, int],
    act: str,
    place: torch.Tensor | None,
) -> torch.Tensor:
    """x [P / TOP, H], ids [P] -> [P, H]; banks are (tensor, format, columns)."""
    count = ids.shape[0]
    (up, up_kind, hidden), (dn, down_kind, inter) = gate_up, down
    experts = len(up) if place is None else place.shape[0]
    order = torch.empty(count, dtype=torch.int32, device=x.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    group_kernel[(experts,)](order, starts, ids, count, EXPERTS=experts, CHUNK=CHUNK)
    width = FEW if count <= FEW * experts else MANY
    blocks = min(count, experts + count // width)
    shared = dict(
        EXPERTS=experts,
        POWER=triton.next_power_of_2(experts),
        PLACED=place is not None,
        TILE=TILE,
        WIDTH=width,
        num_warps=warps(width),
    )
    h = torch.empty(count, inter, dtype=torch.float32, device=x.device)
    gate_up_kernel[(triton.cdiv(inter, TILE), blocks)](
        h, x, up, order, starts, place, len(up), inter, up.stride(0), up.stride(1), x.stride(0),
        COLS=hidden, ACT=act, TOP=count // len(x), **shape_of(up_kind), **shared,
    )  # fmt: skip
    out = torch.empty(count, hidden, dtype=torch.float32, device=x.device)
    down_kernel[(triton.cdiv(hidden, TILE), blocks)](
        out, h, dn, order, starts, place, len(dn), hidden, dn.stride(0), dn.stride(1),
        COLS=inter, **shape_of(down_kind), **shared,
    )  # fmt: skip
    return out


def merge(parts: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    tokens, top, hidden = parts.shape
    out = torch.empty(tokens, hidden, dtype=torch.float32, device=parts.device)
    grid = (tokens, triton.cdiv(hidden, 1024))
    merge_kernel[grid](out, parts, ids, weights, hidden, TOP=top, POWER=triton.next_power_of_2(top), BLOCK=1024)
    return out
