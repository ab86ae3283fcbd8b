"""What every kernel here builds on: the one way two tiles are multiplied, and where programs find their work.

Activations are float32. The tensor unit multiplies bf16, so a value of x goes in as two (x = xh + xl, 2^-17 of it lost), and
a weight that does not fit into one bf16 does too. Rows of x are always the columns of a product (N), weights or keys its rows
(M): how many rows of x a tile holds then changes neither the instruction nor the order of its sum (a test looks at the PTX).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton import knobs

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # read when a kernel is compiled; 3.10 changes it, and with it bits
INTERPRETED = knobs.runtime.interpret  # decided when triton's kernels are decorated, so when this package is imported
# The interpreter multiplies bf16 wrongly, and numpy's float32 product sums in an order that depends on the shape. In float64 both
# are right to the last bit of float32.
WIDE_DOT = tl.constexpr(INTERPRETED)


@triton.jit
def dot(w, x, acc):
    """acc + w @ x of bf16 tiles [M, K] and [K, N], summed in float32."""
    if WIDE_DOT:
        return acc + tl.dot(w.to(tl.float64), x.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    return tl.dot(w, x, acc)


@triton.jit
def halves(x):
    """float32 as the two bf16 that sum to it, but for 2^-17."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def find_block(sizes, block, WIDTH: tl.constexpr):
    """Which of the runs of `sizes` the block-th piece of `WIDTH` belongs to, and where in it the piece begins.

    The run's number is that of its place in `sizes` [n], n or more when there are fewer pieces.
    """
    pieces = (sizes + WIDTH - 1) // WIDTH
    behind = tl.cumsum(pieces, 0)
    run = tl.sum((behind <= block).to(tl.int32), 0)
    before = tl.sum(tl.where(behind <= block, pieces, 0), 0)
    return run, (block - before) * WIDTH
