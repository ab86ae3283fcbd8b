"""Matrices that a safetensors checkpoint stores as small numbers with separate scales: what belongs together, read as blocks.

Understood (`quant_method` of `quantization_config`): `fp8` (DeepSeek's and Qwen's blocks of 128 x 128, or one scale),
`compressed-tensors` and `modelopt` (fp8 with one scale or one a row, nvfp4, mxfp4). What a matrix is follows from its tensors,
because
every such checkpoint leaves some matrices unquantized. Activations are never quantized: their scales are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from engine.kernels.blocks import NV_SCALED, f8_blocks, mxfp4_blocks, nvfp4_blocks
from engine.kernels.ops import Quant
from engine.lean import torch
from engine.models.errors import ModelError

METHODS = ("fp8", "compressed-tensors", "modelopt")
PACKED = ("U8", "I8")  # two 4-bit numbers a byte
UNUSED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".activation_scale")  # of activations
BYTES_PER_128 = {"F8_E4M3": 132, "NVFP4_SCALED": 76, "MXFP4": 68}

Header = tuple[tuple[int, ...], str]  # shape and dtype name of a tensor
Read: TypeAlias = "Callable[[str], torch.Tensor]"


@dataclass(frozen=True)
class Scaled:
    """One matrix: the tensor of its numbers, that of its scales, and a scale of the whole (which it `divides`)."""

    kind: str
    shape: tuple[int, ...]
    numbers: str
    scale: str
    whole: str = ""
    divides: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for name in (self.numbers, self.scale, self.whole) if name)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // 128 * BYTES_PER_128[self.kind]

    def read(self, tensor: Read) -> Quant:
        """The matrix as blocks. Raises ModelError."""
        try:
            numbers, scale = tensor(self.numbers), tensor(self.scale)
            if self.kind == "F8_E4M3":
                return f8_blocks(numbers, scale)
            if self.kind == "MXFP4":
                return mxfp4_blocks(numbers.view(torch.uint8), scale)
            whole = tensor(self.whole).float()
            return nvfp4_blocks(numbers.view(torch.uint8), scale, 1.0 / whole if self.divides else whole)
        except ValueError as error:
            raise ModelError(
                f"tensor '{self.numbers}': {error}; fetch the file again or use a GGUF file of this model"
            ) from error


def find(headers: Mapping[str, Header]) -> dict[str, Scaled]:
    """The scaled matrices of a checkpoint, each under the name it would have as one plain tensor. Raises ModelError."""
    found = {}
    for name, (shape, dtype) in headers.items():
        if name.endswith(("_scale", ".scale", "_scale_inv")):
            continue
        if dtype == "F8_E4M3":
            found[name] = _fp8(name, shape, headers)
        elif dtype in PACKED:
            plain = name.removesuffix("_packed")
            found[plain] = _fp4(name, plain, shape, headers)
    return found


def _fp8(name: str, shape: tuple[int, ...], headers: Mapping[str, Header]) -> Scaled:
    scale = next((n for n in (f"{name}_scale_inv", f"{name}_scale") if n in headers), "")
    if not scale:
        raise ModelError(f"tensor '{name}' is stored as F8_E4M3 without scales, which is not supported; use the BF16 checkpoint")
    _check_columns(name, shape)
    return Scaled("F8_E4M3", shape, name, scale)


def _fp4(name: str, plain: str, shape: tuple[int, ...], headers: Mapping[str, Header]) -> Scaled:
    shape = (*shape[:-1], shape[-1] * 2)
    _check_columns(name, shape)
    scale = next((n for n in (f"{plain}_scale", f"{plain.removesuffix('.weight')}.scale") if n in headers), "")
    dtype = headers[scale][1] if scale else ""
    if dtype in ("U8", "F8_E8M0"):
        return Scaled("MXFP4", shape, name, scale)
    for whole, divides in ((f"{plain}_scale_2", False), (f"{plain}_global_scale", True)):
        if dtype == "F8_E4M3" and whole in headers:
            return Scaled("NVFP4_SCALED", shape, name, scale, whole, divides)
    raise ModelError(
        f"tensor '{name}' holds packed numbers without the scales of nvfp4 or mxfp4; "
        f"this quantization is not supported, use the BF16 checkpoint or a GGUF file"
    )


def _check_columns(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) < 2 or shape[-1] % NV_SCALED:
        raise ModelError(
            f"tensor '{name}' {list(shape)} is quantized in rows that are no multiple of {NV_SCALED}, which is not supported; "
            f"use the BF16 checkpoint or a GGUF file"
        )
