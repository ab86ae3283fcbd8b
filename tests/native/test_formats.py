"""Every block format means exactly what the `gguf` package or ml_dtypes says, on every instruction set."""

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch

from engine import _native
from engine.kernels import blocks
from engine.kernels.ops import Quant
from engine.kernels.reference import dequantize
from tests.native.helpers import block_bytes

E2M1 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn
BLOCKS = [t for t in _native.TYPES if t not in ("F32", "F16", "BF16")]


def meaning(weight: Quant) -> np.ndarray:
    """What the format's definition says, by `gguf` or ml_dtypes; [rows, cols] float32."""
    raw = weight.data.numpy()
    if weight.type == "F8_E4M3":
        blocks = raw.reshape(-1, 132)
        return (blocks[:, 4:].view(E4M3).astype(np.float32) * blocks[:, :4].copy().view(np.float32)).reshape(weight.shape)
    if weight.type == "NVFP4_SCALED":
        whole, inner = raw.reshape(-1, 76)[:, :4].copy().view(np.float32), raw.reshape(-1, 76)[:, 4:]
        values = gguf.quants.dequantize(np.ascontiguousarray(inner), gguf.GGMLQuantizationType.NVFP4).astype(np.float32)
        return (values.reshape(len(whole), -1) * whole).reshape(weight.shape)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[weight.type]).astype(np.float32)


@pytest.mark.parametrize("kind", BLOCKS)
def test_dequantizes_to_the_bits_of_its_definition(ops, kind: str) -> None:
    weight = block_bytes(kind, rows=5, cols=1024)
    out = torch.empty(weight.shape)
    ops._ops.dequantize(out, weight.data, kind)
    want = meaning(weight)
    assert np.array_equal(out.numpy().view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_floats_are_exact(ops, dtype: torch.dtype) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)  # all of them, infinities and NaN included
    patterns = patterns[: 65536 // 24 * 24].view(-1, 24).contiguous()  # 24: whole lanes and a tail
    out = torch.empty(patterns.shape)
    ops._ops.dequantize(out, patterns, "")
    want = patterns.float()
    assert torch.equal(out.nan_to_num(1.0), want.nan_to_num(1.0)) and torch.equal(out.isnan(), want.isnan())


@pytest.mark.parametrize("kind", BLOCKS)
def test_embed_reads_the_named_rows(ops, kind: str) -> None:
    table = block_bytes(kind, rows=40, cols=512)
    ids = torch.tensor([39, 0, 7, 7], dtype=torch.int32)
    assert torch.equal(ops.embed(table, ids), dequantize(table)[ids.long()])


def dequantized(ops, weight: Quant) -> torch.Tensor:
    out = torch.empty(weight.shape)
    ops._ops.dequantize(out, weight.data, weight.type)
    return out


def same_bits(a: torch.Tensor, b: np.ndarray) -> bool:
    return np.array_equal(a.numpy().view(np.int32), np.ascontiguousarray(b, dtype=np.float32).view(np.int32))


def test_every_fp8_number(ops) -> None:
    raw = torch.arange(256, dtype=torch.uint8).view(2, 128)
    out = dequantized(ops, blocks.f8_blocks(raw.view(torch.float8_e4m3fn), torch.tensor([[1.0], [1.0]])))
    want = raw.numpy().view(E4M3).astype(np.float32)
    assert np.array_equal(out.numpy(), want, equal_nan=True) and np.isnan(want).sum() == 2


@pytest.mark.parametrize("scales", ["one", "row", "blocks"])
def test_fp8_checkpoints_keep_their_values(ops, rng, scales: str) -> None:
    rows, cols = 200, 384
    numbers = torch.randn(rows, cols, generator=rng).to(torch.float8_e4m3fn)
    shape = {"one": (1,), "row": (rows, 1), "blocks": (2, 3)}[scales]
    scale = torch.rand(shape, generator=rng) + 0.5
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1) if scales == "blocks" else scale
    weight = blocks.f8_blocks(numbers, scale)
    want = numbers.view(torch.uint8).numpy().view(E4M3).astype(np.float32) * spread.numpy()
    assert same_bits(dequantized(ops, weight), want) and same_bits(dequantize(weight), want)


def test_nvfp4_checkpoints_keep_their_values(ops, rng) -> None:
    codes = torch.randint(0, 16, (7, 256), generator=rng, dtype=torch.uint8)
    scales = (torch.rand(7, 16, generator=rng) * 100).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.0123)
    weight = blocks.nvfp4_blocks(codes[:, ::2] | codes[:, 1::2] << 4, scales, whole)
    number = codes.numpy().view(E2M1).astype(np.float32) + 0.0  # ggml knows no negative zero
    scale = scales.view(torch.uint8).numpy().view(E4M3).astype(np.float32).repeat(16, axis=1)
    assert same_bits(dequantized(ops, weight), number * scale * whole.numpy())
    assert same_bits(dequantize(weight), number * scale * whole.numpy())


def test_mxfp4_checkpoints_keep_their_values(ops, rng) -> None:
    codes = torch.randint(0, 16, (7, 96), generator=rng, dtype=torch.uint8)
    scales = torch.randint(0, 250, (7, 3), generator=rng, dtype=torch.uint8)
    weight = blocks.mxfp4_blocks(codes[:, ::2] | codes[:, 1::2] << 4, scales)
    number = codes.numpy().view(E2M1).astype(np.float32) + 0.0
    scale = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(32, axis=1)
    assert same_bits(dequantized(ops, weight), number * scale)


def test_scales_that_do_not_fit_are_refused() -> None:
    numbers = torch.zeros(256, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="do not cover"):
        blocks.f8_blocks(numbers, torch.ones(3, 2))
    with pytest.raises(ValueError, match="multiple of 128"):
        blocks.f8_blocks(numbers[:, :100], torch.ones(1))
    packed = torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="negative or not a number"):
        blocks.nvfp4_blocks(packed, torch.full((4, 8), -1.0).to(torch.float8_e4m3fn), torch.ones(()))
    with pytest.raises(ValueError, match="not a number"):
        blocks.mxfp4_blocks(packed, torch.full((4, 4), 255, dtype=torch.uint8))
    with pytest.raises(ValueError, match="need 4 scales"):
        blocks.mxfp4_blocks(packed, torch.zeros(4, 3, dtype=torch.uint8))
