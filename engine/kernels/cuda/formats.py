"""Weights as a checkpoint stores them, a step of columns at a time: what a format's bytes mean as numbers in registers.

A step is two halves of `half` columns. Numbers of a `scaled` format are whole or e4m3 (exact in bf16) and meet their scale, one a
step and row, after the product; those of the others are the weight itself, in one bf16 or (`two`) cut into two.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Format:
    half: int
    block: int = 0  # bytes of a block; 0: a float a column
    steps: int = 1  # in a block
    two: bool = False
    scaled: bool = False


FORMATS = {
    "BF16": Format(32),
    "F16": Format(32, two=True),
    "F32": Format(32, two=True),
    "Q8_0": Format(16, 34, scaled=True),
    "Q4_0": Format(16, 18, scaled=True),
    "MXFP4": Format(16, 17, scaled=True),
    "NVFP4": Format(32, 36),
    "NVFP4_SCALED": Format(32, 76, 2, scaled=True),
    "F8_E4M3": Format(64, 132, scaled=True),
    "Q4_K": Format(32, 144, 4, two=True),
    "Q6_K": Format(32, 210, 4, two=True),
}


@triton.jit
def columns(KIND: tl.constexpr, HALF: tl.constexpr, step):
    """The columns of both halves of a step, int32 [HALF] each."""
    j = tl.arange(0, HALF)
    if KIND == "NVFP4" or KIND == "NVFP4_SCALED":  # groups of 16: low nibbles are the first eight
        low = step * 64 + j // 8 * 16 + j % 8
        return low, low + 8
    if KIND == "Q6_K":  # 128 columns a half block; nibbles of one byte lie 64 apart
        low = step // 2 * 128 + step % 2 * 32 + j
        return low, low + 64
    low = step * (2 * HALF) + j
    return low, low + HALF


@triton.jit
def numbers(KIND: tl.constexpr, HALF: tl.constexpr, w, row, live, step, COLS: tl.constexpr):
    """Both halves of a step of the rows at `row` (int64 [N], bytes or elements): float32 [N, HALF] twice, scales [N]."""
    j = tl.arange(0, HALF)[None, :]
    rows, lives = row[:, None], live[:, None]
    one = tl.full(row.shape, 1.0, tl.float32)
    if KIND == "BF16" or KIND == "F16" or KIND == "F32":
        low, high = columns(KIND, HALF, step)
        a = tl.load(w + rows + low[None, :], mask=lives & (low[None, :] < COLS), other=0.0)
        b = tl.load(w + rows + high[None, :], mask=lives & (high[None, :] < COLS), other=0.0)
        return a.to(tl.float32), b.to(tl.float32), one
    if KIND == "Q8_0":
        at = w + row + step * 34
        a = _bytes(at[:, None] + 2 + j, lives).to(tl.int8, bitcast=True)
        b = _bytes(at[:, None] + 18 + j, lives).to(tl.int8, bitcast=True)
        return a.to(tl.float32), b.to(tl.float32), _half(at, live)
    if KIND == "Q4_0":
        at = w + row + step * 18
        q = _bytes(at[:, None] + 2 + j, lives)
        return (q & 15).to(tl.float32) - 8.0, (q >> 4).to(tl.float32) - 8.0, _half(at, live)
    if KIND == "MXFP4":
        at = w + row + step * 17
        q = _bytes(at[:, None] + 1 + j, lives)
        return _e2m1(q & 15), _e2m1(q >> 4), _e8m0(_bytes(at, live))
    if KIND == "NVFP4":
        a, b = _nvfp4(w + rows + step * 36, j, lives)
        return a, b, one
    if KIND == "NVFP4_SCALED":
        at = w + row + step // 2 * 76
        a, b = _nvfp4(at[:, None] + 4 + step % 2 * 36, j, lives)
        return a, b, _float(at, live)
    if KIND == "F8_E4M3":
        at = w + row + step * 132
        return _e4m3(_bytes(at[:, None] + 4 + j, lives)), _e4m3(_bytes(at[:, None] + 68 + j, lives)), _float(at, live)
    if KIND == "Q4_K":
        a, b = _q4_k(w + row + step // 4 * 144, live, j, step % 4)
        return a, b, one
    if KIND == "Q6_K":
        a, b = _q6_k(w + rows + step // 4 * 210, lives, j, step % 4)
        return a, b, one


@triton.jit
def _bytes(at, live):
    return tl.load(at, mask=live, other=0)


@triton.jit
def _half(at, live):
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=live, other=0.0).to(tl.float32)


@triton.jit
def _float(at, live):
    return tl.load(at.to(tl.pointer_type(tl.float32)), mask=live, other=0.0)


@triton.jit
def _e2m1(code):
    """Twice the value of a 4-bit float: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives."""
    c = (code & 7).to(tl.int32)
    value = tl.where(c < 4, c, (2 + (c & 1)) << tl.where(c < 4, 0, (c >> 1) - 1)).to(tl.float32)
    return tl.where(code >= 8, -value, value)


@triton.jit
def _e4m3(code):
    """An 8-bit float by the bits of a half, whose exponent is biased by 8 more; sm_86 has no instruction for it."""
    c = code.to(tl.uint16)
    bits = ((c & 0x7F) << 7) | ((c & 0x80) << 8)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((c & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _e8m0(code):
    """Half of 2^(code - 127): the numbers it belongs to are doubled."""
    c = code.to(tl.int32)
    bits = tl.where(c < 2, 0x00200000 << tl.where(c < 2, c, 0), tl.where(c < 2, 0, c - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _nvfp4(at, j, lives):
    """A block of 64: four scales, 32 bytes of numbers. Number times scale has six bits."""
    code = _bytes(at + j // 8, lives)
    scale = tl.where(code == 0x7F, 0.0, _e4m3_positive(code) * 0.5)
    q = _bytes(at + 4 + j, lives)
    return _e2m1(q & 15) * scale, _e2m1(q >> 4) * scale


@triton.jit
def _e4m3_positive(code):
    bits = (code.to(tl.uint16) & 0x7F) << 7
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _q4_k(at, live, j, part):
    """64 of a block of 256: sub-blocks 2 part and 2 part + 1, weight = d scale q - dmin min."""
    d, dmin = _half(at, live), _half(at + 2, live)
    q = _bytes(at[:, None] + 16 + part * 32 + j, live[:, None])
    scale, least = _six_bits(at + 4, live, 2 * part)
    a = (q & 15).to(tl.float32) * (d * scale)[:, None] - (dmin * least)[:, None]
    scale, least = _six_bits(at + 4, live, 2 * part + 1)
    b = (q >> 4).to(tl.float32) * (d * scale)[:, None] - (dmin * least)[:, None]
    return a, b


@triton.jit
def _six_bits(at, live, sub):
    """Scale and minimum of a sub-block out of the twelve bytes that pack eight of each."""
    own, later = _bytes(at + sub, live), _bytes(at + sub + 4, live)
    early = _bytes(at + tl.where(sub < 4, 0, sub - 4), live)
    scale = tl.where(sub < 4, own & 63, (later & 15) | ((early >> 6) << 4))
    least = tl.where(sub < 4, later & 63, (later >> 4) | ((own >> 6) << 4))
    return scale.to(tl.float32), least.to(tl.float32)


@triton.jit
def _q6_k(at, lives, j, part):
    """64 of a block of 256, weight = d scale (q - 32); q's low four bits and its high two lie apart."""
    half, which = part // 2, part % 2
    low = _bytes(at + half * 64 + which * 32 + j, lives).to(tl.int32)
    high = _bytes(at + 128 + half * 32 + j, lives).to(tl.int32) >> (which * 2)
    scales = at + 192 + half * 8 + which * 2 + j // 16
    d = _half(at + 208, lives)
    a = ((low & 15) | ((high & 3) << 4)).to(tl.float32) - 32.0
    b = ((low >> 4) | (((high >> 4) & 3) << 4)).to(tl.float32) - 32.0
    a = a * (d * _bytes(scales, lives).to(tl.int8, bitcast=True).to(tl.float32))
    b = b * (d * _bytes(scales + 4, lives).to(tl.int8, bitcast=True).to(tl.float32))
    return a, b
