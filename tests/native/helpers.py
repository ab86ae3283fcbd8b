"""Inputs for the kernel tests."""

from __future__ import annotations

import numpy as np
import torch

from engine.kernels.ops import Quant, Segments

PAGE = 64


HALVES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]}
NO_HALVES = ("MXFP4", "NVFP4", "NVFP4_SCALED", "F8_E4M3")
OURS = {"NVFP4_SCALED": (128, 76), "F8_E4M3": (128, 132)}


def block_bytes(kind: str, rows: int, cols: int, seed: int = 0, fill: int | None = None) -> Quant:
    """Random blocks of a type: every bit pattern of the numbers, or `fill` in all bytes; finite scales of a sane size."""
    import gguf

    rng = np.random.default_rng(seed)
    per_block, size = OURS.get(kind) or gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (rows, cols // per_block, size), dtype=np.uint8)
    if fill is not None:
        raw[:] = fill

    def scale(offset: int, dtype) -> None:
        value = rng.uniform(-0.02, 0.02, raw.shape[:2]).astype(dtype)
        raw[..., offset : offset + value.itemsize] = value[..., None].view(np.uint8)

    for offset in HALVES.get(kind, [] if kind in NO_HALVES else [0]):
        scale(offset, np.float16)
    if kind in OURS:
        scale(0, np.float32)
    if kind == "MXFP4":
        raw[..., 0] = rng.integers(112, 124, raw.shape[:2])
    if kind == "NVFP4_SCALED":
        raw[..., [*range(4, 8), *range(40, 44)]] &= 0x3F  # positive scales below 2
    if kind == "F8_E4M3":
        numbers = raw[..., 4:]
        numbers[numbers & 0x7F == 0x7F] = 0  # NaN
    return Quant(torch.from_numpy(raw.reshape(rows, -1)), kind, cols)


def segments(cu: list[int], start: list[int], pages: list[list[int]], slot: list[int]) -> Segments:
    width = max(len(row) for row in pages)
    table = [row + [-1] * (width - len(row)) for row in pages]
    return Segments(*(torch.tensor(x, dtype=torch.int32) for x in (cu, start, table, slot)))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    """Largest difference relative to the largest value of the truth `b`."""
    scale = b.abs().max().item() or 1.0
    assert torch.isfinite(a).all()
    assert (a - b).abs().max().item() <= tolerance * scale, f"{(a - b).abs().max().item() / scale:.2e} > {tolerance:.0e}"
