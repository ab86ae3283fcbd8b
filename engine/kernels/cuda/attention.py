"""Causal attention over pages: grouped queries, sliding windows, decode and prefill with the same bits.

Keys are walked page after page inside a span of `SPAN` pages and spans are added in order, both cut at absolute positions.
Few rows take a program a span and are joined behind it; many rows walk their spans in one program. A page (or span) of which a
query sees nothing changes no bit of its sums, so what else a tile holds does not either.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engine.kernels.cuda.lang import dot, find_block, halves
from engine.kernels.ops import KVLayer, Segments

PAGE = tl.constexpr(64)  # tokens: engine.nn.batch.PAGE
SPAN = tl.constexpr(8)  # pages
KEYS = 32  # a step of the walk multiplies; 64 spill up to 544 bytes a thread (ops/bench/cuda_registers.py)
ALONE = 16  # rows of a step up to which spans get a program each; partial sums of a row take 4 bytes a span, head and dimension
QUERIES = 64  # of a tile, with heads of 64; wider ones keep fewer in the same registers


@triton.jit
def write_kernel(
    new, cache, cu, start, pages, sequences, stride, page_stride, table_width,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Row t's vector of one head into its page."""
    t, head = tl.program_id(0), tl.program_id(1)
    s = tl.arange(0, SEQUENCES)
    sequence = tl.sum((tl.load(cu + s + 1, mask=s < sequences, other=2147483647) <= t).to(tl.int32), 0)
    position = tl.load(start + sequence) + t - tl.load(cu + sequence)
    page = tl.load(pages + sequence * table_width + position // PAGE).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = c < DIM
    to = page * page_stride + (head * PAGE + position % PAGE) * DIM + c
    value = tl.load(new + t.to(tl.int64) * stride + head * DIM + c, mask=live, other=0.0)
    tl.store(cache + to, value.to(tl.bfloat16), mask=live)


@triton.jit
def _walk(
    q, q_tail, position, k_pages, v_pages, table, page_stride, head, first, last, end, scale, peak, total, acc,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, TAIL_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Softmax sums (largest score, sum, weighted values) over pages first..last, of which positions below `end` are written.

    With a `TAIL` keys are that much longer than values, and values are their first part. q and q_tail [BLOCK, N] come in halves.
    """
    c = tl.arange(0, BLOCK)
    j = tl.arange(0, KEYS)
    ones = tl.full((16, KEYS), 1.0, tl.float32).to(tl.bfloat16)  # its interpreter fills no bf16
    for part in range(first * (PAGE // KEYS), last * (PAGE // KEYS)):
        key = part * KEYS + j
        page = part // (PAGE // KEYS)
        at = tl.load(table + page).to(tl.int64) * page_stride
        at += (head * PAGE + (part - page * (PAGE // KEYS)) * KEYS) * (DIM + TAIL)
        written = (key < end)[:, None] & (c < DIM)[None, :]
        k = tl.load(k_pages + at + j[:, None] * (DIM + TAIL) + c[None, :], mask=written, other=0.0)
        score = dot(k, q[0], tl.zeros((KEYS, position.shape[0]), tl.float32))
        score = dot(k, q[1], score)
        if TAIL > 0:
            i = tl.arange(0, TAIL_BLOCK)
            more = (key < end)[:, None] & (i < TAIL)[None, :]
            k_tail = tl.load(k_pages + at + j[:, None] * (DIM + TAIL) + DIM + i[None, :], mask=more, other=0.0)
            score = dot(k_tail, q_tail[0], score)
            score = dot(k_tail, q_tail[1], score)
        score = score * scale
        seen = key[:, None] <= position[None, :]
        if WINDOW > 0:
            seen = seen & (key[:, None] > position[None, :] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peak - base)
        high, low = halves(tl.exp2(score - base[None, :]))
        # A sum over the keys of a tile would follow the tile's layout; as a product it follows the keys.
        weight = dot(ones, high, tl.zeros((16, position.shape[0]), tl.float32))
        weight = dot(ones, low, weight)
        total = tl.fma(total, shrink, tl.max(weight, 0))
        v = k
        if TAIL == 0:
            v = tl.load(v_pages + at + j[:, None] * DIM + c[None, :], mask=written, other=0.0)
        v = tl.trans(v)
        acc = acc * shrink[None, :]
        acc = dot(v, high, acc)
        acc = dot(v, low, acc)
        peak = higher
    return peak, total, acc


@triton.jit
def _fold(peak, total, acc, more_peak, more_total, more_acc):
    """Sums of earlier keys with those of the span behind them."""
    higher = tl.maximum(peak, more_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(peak - base), tl.exp2(more_peak - base)
    total = tl.fma(more_total, new, total * old)
    acc = tl.fma(more_acc, new[None, :].broadcast_to(acc.shape), acc * old[None, :])
    return higher, total, acc


@triton.jit
def attention_kernel(
    out, stats, q, k_pages, v_pages, cu, start, pages, sequences, q_stride, page_stride, table_width, rows, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, TAIL_BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    SEQUENCES: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """`WIDTH` queries (rows of one sequence, the `GROUP` heads of one key head) a program.

    out [rows, HEADS, DIM]; with SPLIT out [spans, rows, HEADS, DIM] and stats [2, spans, rows, HEADS]: a span's sums.
    """
    s = tl.arange(0, SEQUENCES)
    borders = tl.load(cu + s, mask=s < sequences, other=0)
    sizes = tl.where(s < sequences, tl.load(cu + s + 1, mask=s < sequences, other=0) - borders, 0) * GROUP
    sequence, offset = find_block(sizes, tl.program_id(0), WIDTH)
    if sequence >= sequences:
        return
    first_row, begin = tl.load(cu + sequence), tl.load(start + sequence)
    size = (tl.load(cu + sequence + 1) - first_row) * GROUP
    head = tl.program_id(1)
    f = offset + tl.arange(0, WIDTH)
    row, query_head = (first_row + f // GROUP).to(tl.int64), head * GROUP + f % GROUP
    position = begin + f // GROUP
    c = tl.arange(0, BLOCK)
    live = (c < DIM)[:, None] & (f < size)[None, :]
    q_at = q + (row * q_stride + query_head * (DIM + TAIL))[None, :]
    q_main = halves(tl.load(q_at + c[:, None], mask=live, other=0.0))
    q_tail = q_main
    if TAIL > 0:
        i = tl.arange(0, TAIL_BLOCK)
        q_tail = halves(tl.load(q_at + DIM + i[:, None], mask=(i < TAIL)[:, None] & (f < size)[None, :], other=0.0))
    end = begin + (tl.minimum(offset + WIDTH, size) - 1) // GROUP + 1
    first_page, last_page = 0, (end + PAGE - 1) // PAGE
    if WINDOW > 0:
        first_page = tl.maximum(begin + offset // GROUP + 1 - WINDOW, 0) // PAGE
    table = pages + sequence * table_width
    peak, total = tl.full((WIDTH,), float("-inf"), tl.float32), tl.zeros((WIDTH,), tl.float32)
    acc = tl.zeros((BLOCK, WIDTH), tl.float32)
    if SPLIT:
        span = tl.program_id(2)
        peak, total, acc = _walk(
            q_main, q_tail, position, k_pages, v_pages, table, page_stride, head, tl.maximum(span * SPAN, first_page),
            tl.minimum(span * SPAN + SPAN, last_page), end, scale, peak, total, acc, DIM, BLOCK, TAIL, TAIL_BLOCK, WINDOW, KEYS,
        )  # fmt: skip
        at = (span.to(tl.int64) * rows + row) * HEADS + query_head
        tl.store(stats + at, peak, mask=f < size)
        tl.store(stats + tl.num_programs(2).to(tl.int64) * rows * HEADS + at, total, mask=f < size)
        tl.store(out + at[None, :] * DIM + c[:, None], acc, mask=live & (peak > float("-inf"))[None, :])
    else:
        for span in range(first_page // SPAN, (last_page + SPAN - 1) // SPAN):
            own_peak, own_total, own = _walk(
                q_main, q_tail, position, k_pages, v_pages, table, page_stride, head, tl.maximum(span * SPAN, first_page),
                tl.minimum(span * SPAN + SPAN, last_page), end, scale,
                tl.full((WIDTH,), float("-inf"), tl.float32), tl.zeros((WIDTH,), tl.float32),
                tl.zeros((BLOCK, WIDTH), tl.float32), DIM, BLOCK, TAIL, TAIL_BLOCK, WINDOW, KEYS,
            )  # fmt: skip
            peak, total, acc = _fold(peak, total, acc, own_peak, own_total, own)
        at = (row * HEADS + query_head) * DIM
        tl.store(out + at[None, :] + c[:, None], acc / total[None, :], mask=live)


@triton.jit
def join_kernel(out, parts, stats, rows, spans, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The spans of one row, all its heads' queries apart, folded in order."""
    query = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    c = tl.arange(0, BLOCK)
    peak, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK, 1), tl.float32)
    queries = rows.to(tl.int64) * HEADS
    for span in range(0, spans):
        at = span * queries + query
        own_peak, own_total = tl.load(stats + at), tl.load(stats + spans * queries + at)
        seen = (c < DIM)[:, None] & (own_peak > float("-inf"))[None, :]
        own = tl.load(parts + at[None, :] * DIM + c[:, None], mask=seen, other=0.0)
        peak, total, acc = _fold(peak, total, acc, own_peak, own_total, own)
    tl.store(out + query[None, :] * DIM + c[:, None], acc / total[None, :], mask=(c < DIM)[:, None])


def write_pages(new: torch.Tensor, cache: torch.Tensor, seg: Segments) -> None:
    """new [T, Hkv, D] into the pages of its sequences."""
    rows, heads, dim = new.shape
    sequences = seg.start.shape[0]
    write_kernel[(rows, heads)](
        new, cache, seg.cu, seg.start, seg.pages, sequences, new.stride(0), cache.stride(0), seg.pages.shape[1],
        DIM=dim, BLOCK=triton.next_power_of_2(dim), SEQUENCES=triton.next_power_of_2(sequences),
    )  # fmt: skip


def attend(
    q: torch.Tensor,
    kv: KVLayer,
    seg: Segments,
    scale: float,
    window: int | None = None,
    tail: int = 0,
    split: bool | None = None,
) -> torch.Tensor:
    """q [T, Hq, D + tail] over what the pages hold -> [T, Hq, D]; `split` (None: by the number of rows) changes its speed alone.

    `tail`: of keys, behind the values.
    """
    rows, heads, dim = *q.shape[:2], q.shape[2] - tail
    sequences, group = seg.start.shape[0], heads // kv.k.shape[1]
    split = rows <= ALONE if split is None else split
    block = max(16, triton.next_power_of_2(dim))
    width = 16 if split else max(16, min(QUERIES, QUERIES * 64 // block))
    tiles = sequences + rows * group // width
    spans = -(-seg.pages.shape[1] // SPAN.value)
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=q.device)
    parts = torch.empty(spans, rows, heads, dim, dtype=torch.float32, device=q.device) if split else out
    stats = torch.empty(2, spans, rows, heads, dtype=torch.float32, device=q.device) if split else out
    attention_kernel[(tiles, heads // group, spans if split else 1)](
        parts, stats, q, kv.k, kv.k if kv.v is None else kv.v, seg.cu, seg.start, seg.pages, sequences, q.stride(0),
        kv.k.stride(0), seg.pages.shape[1], rows, scale * math.log2(math.e),
        HEADS=heads, GROUP=group, DIM=dim, BLOCK=block, TAIL=tail, TAIL_BLOCK=max(16, triton.next_power_of_2(max(1, tail))),
        WINDOW=window or 0, SEQUENCES=triton.next_power_of_2(sequences), SPLIT=split, WIDTH=width, KEYS=KEYS,
        num_warps=4 if split and block <= 128 else 8,
    )  # fmt: skip
    if split:
        join_kernel[(rows * heads,)](out, parts, stats, rows, spans, HEADS=heads, DIM=dim, BLOCK=block)
    return out
