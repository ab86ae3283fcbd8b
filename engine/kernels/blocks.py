"""Block formats of checkpoints that keep numbers and scales in separate tensors: the scales moved beside what they belong to.

One row is then one run of bytes, like a GGUF matrix, and all that handles `ops.Quant` handles it: experts, joined matrices,
kernels. Each function here is a permutation of bits; no number changes. `dequantize` is the meaning, in torch.

    F8_E4M3        128 weights: float32 scale, 128 e4m3fn numbers (132 bytes)
    NVFP4_SCALED   128 weights: float32 scale of the matrix, two ggml NVFP4 blocks: 4 scales e4m3, 4 x 16 e2m1 numbers (76 bytes)
    MXFP4          ggml's: e8m0 scale, 32 e2m1 numbers (17 bytes); for MXFP4 checkpoints and DeepSeek's fp4 experts
"""

from __future__ import annotations

from engine.kernels.ops import Quant
from engine.lean import torch

F8_GROUP, NV_GROUP, NV_SCALED, MX_GROUP = 128, 16, 128, 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def f8_blocks(numbers: torch.Tensor, scales: torch.Tensor) -> Quant:
    """numbers [..., N, K] float8_e4m3fn, scales: one float, [..., N, 1], or [..., n, k] for blocks of 128 x 128 -> F8_E4M3.

    Raises ValueError when K is no multiple of 128 or the scales do not cover the matrix.
    """
    *lead, rows, cols = numbers.shape
    if cols % F8_GROUP:
        raise ValueError(f"rows of {cols} fp8 numbers are no multiple of {F8_GROUP}")
    groups = cols // F8_GROUP
    scales = scales.float()
    if scales.numel() == 1:
        each = scales.reshape(1, 1).expand(*lead, rows, groups)
    elif scales.shape[-2:] == (rows, 1):
        each = scales.expand(*lead, rows, groups)
    elif scales.shape[-2:] == (-(-rows // F8_GROUP), groups):
        each = scales.repeat_interleave(F8_GROUP, dim=-2)[..., :rows, :]
    else:
        raise ValueError(f"scales {list(scales.shape)} do not cover {list(numbers.shape)} fp8 numbers in blocks of 128 x 128")
    return _joined(each, numbers.view(torch.uint8), groups, "F8_E4M3", cols)


def nvfp4_blocks(packed: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor) -> Quant:
    """packed uint8 [..., N, K/2] (even column in the low nibble), scales float8_e4m3fn [..., N, K/16], whole: one float.

    Raises ValueError when K is no multiple of 128 or a scale is negative or NaN.
    """
    cols = packed.shape[-1] * 2
    if cols % NV_SCALED or scales.shape[-1] * NV_GROUP != cols:
        raise ValueError(
            f"rows of {cols} nvfp4 numbers with {scales.shape[-1]} scales are not blocks of {NV_SCALED} and {NV_GROUP}"
        )
    raw = scales.view(torch.uint8)
    if (raw >= 0x7F).any():
        raise ValueError("a scale of an nvfp4 matrix is negative or not a number")
    lead = packed.shape[:-1]
    halves = _split_nibbles(packed, NV_GROUP).view(*lead, cols // 64, 32)
    blocks = torch.cat([raw.reshape(*lead, cols // 64, 4), halves], dim=-1).view(*lead, cols // NV_SCALED, 72)
    return _joined(whole.float().reshape(1, 1).expand(*lead, cols // NV_SCALED), blocks, cols // NV_SCALED, "NVFP4_SCALED", cols)


def mxfp4_blocks(packed: torch.Tensor, scales: torch.Tensor) -> Quant:
    """packed uint8 [..., N, K/2] (even column in the low nibble), scales e8m0 as uint8 [..., N, K/32] -> ggml's MXFP4.

    Raises ValueError when the scales do not cover the rows or one is NaN (255).
    """
    cols = packed.shape[-1] * 2
    raw = scales.view(torch.uint8)
    if scales.shape[-1] * MX_GROUP != cols:
        raise ValueError(f"rows of {cols} mxfp4 numbers need {cols / MX_GROUP:g} scales, not {scales.shape[-1]}")
    if (raw == 0xFF).any():
        raise ValueError("a scale of an mxfp4 matrix is not a number")
    lead, groups = packed.shape[:-1], cols // MX_GROUP
    blocks = torch.cat([raw.reshape(*lead, groups, 1), _split_nibbles(packed, MX_GROUP).view(*lead, groups, 16)], dim=-1)
    return Quant(blocks.reshape(*lead, groups * 17).contiguous(), "MXFP4", cols)


def dequantize(weight: Quant) -> torch.Tensor | None:
    """float32 of a format that is ours alone; None for ggml's."""
    if weight.type == "F8_E4M3":
        blocks = weight.data.reshape(-1, 4 + F8_GROUP)
        scale, numbers = blocks[:, :4].contiguous().view(torch.float32), blocks[:, 4:].contiguous().view(torch.float8_e4m3fn)
        return (numbers.float() * scale).view(weight.shape)
    if weight.type == "NVFP4_SCALED":
        blocks = weight.data.reshape(-1, 76)
        whole, halves = blocks[:, :4].contiguous().view(torch.float32), blocks[:, 4:].reshape(-1, 36)
        scale = halves[:, :4].contiguous().view(torch.float8_e4m3fn).float()
        codes = halves[:, 4:].reshape(-1, 4, 8)
        values = torch.tensor([*E2M1, *(0.0 - v for v in E2M1)])[torch.cat([codes & 15, codes >> 4], dim=-1).long()]
        return ((values * scale[..., None]).view(len(blocks), -1) * whole).view(weight.shape)
    return None


def _split_nibbles(packed: torch.Tensor, group: int) -> torch.Tensor:
    """Nibbles of neighbouring columns -> low nibbles the first half of each group of columns, high nibbles the second."""
    pairs = packed.reshape(-1, group // 2)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).view(-1, group)
    return codes[:, : group // 2] | codes[:, group // 2 :] << 4


def _joined(scales: torch.Tensor, numbers: torch.Tensor, groups: int, kind: str, cols: int) -> Quant:
    """Each scale in front of its numbers. scales [..., groups], numbers [..., groups * n] or [..., groups, n], bytes."""
    lead = scales.shape[:-1]
    parts = [scales.contiguous().view(torch.uint8).view(*lead, groups, 4), numbers.reshape(*lead, groups, -1)]
    return Quant(torch.cat(parts, dim=-1).view(*lead, -1).contiguous(), kind, cols)
