"""Checkpoints with separate scales (fp8, nvfp4, mxfp4): loaded, they are the plain checkpoint of the numbers they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.errors import ModelError
from engine.models.load import load_model
from tests.support.kernels import Kernels
from tests.support.oracle import RouterWatch, assert_close, driver, tokens
from tests.support.tiny import make_tiny

WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}  # rows of whole blocks
LATENT = {"intermediate_size": 128, "q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 32}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
Tensors = dict[str, torch.Tensor]


def fp8(name: str, w: torch.Tensor, scale: torch.Tensor, suffix: str) -> tuple[Tensors, torch.Tensor]:
    """`scale` [n, 1], [1] or [n/128, k/128]."""
    spread = scale.repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1) if suffix == "_scale_inv" else scale
    numbers = (w / spread).to(torch.float8_e4m3fn)
    return {name: numbers, name + suffix: scale}, numbers.float() * spread


def blocks_128(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return fp8(name, w, torch.rand(-(-len(w) // 128), w.shape[1] // 128) * 0.01 + 0.001, "_scale_inv")


def one_a_row(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return fp8(name, w, w.abs().amax(1, keepdim=True) / 448, "_scale")


def one_scale(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    stored, value = fp8(name, w, w.abs().amax().reshape(1) / 448, "_scale")
    return {**stored, name.removesuffix("weight") + "input_scale": torch.ones(1)}, value


def codes_of(w: torch.Tensor, scale: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest e2m1 numbers, packed, and what they stand for before the scale."""
    spread = scale.repeat_interleave(group, 1)
    codes = (w[..., None] / spread[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, E2M1[codes.long()] * spread


def nvfp4(name: str, w: torch.Tensor, packed: str, whole: str, divides: bool) -> tuple[Tensors, torch.Tensor]:
    one = torch.tensor(0.125)
    scale = (w.unflatten(1, (-1, 16)).abs().amax(-1) / 6 / one).to(torch.float8_e4m3fn)
    numbers, value = codes_of(w / one, scale.float(), 16)
    return {name + packed: numbers, name + "_scale": scale, name + whole: 1 / one if divides else one}, value * one


def mxfp4(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    exponent = (w.unflatten(1, (-1, 32)).abs().amax(-1) / 6).log2().ceil().clamp(-126)
    numbers, value = codes_of(w, exponent.exp2(), 32)
    return {name + "_packed": numbers, name + "_scale": (exponent + 127).to(torch.uint8)}, value


KIND = {
    "fp8 blocks": ("fp8", blocks_128),
    "fp8 rows": ("compressed-tensors", one_a_row),
    "fp8 matrix": ("modelopt", one_scale),
    "nvfp4 modelopt": ("modelopt", lambda n, w: nvfp4(n, w, "", "_scale_2", False)),
    "nvfp4 compressed": ("compressed-tensors", lambda n, w: nvfp4(n, w, "_packed", "_global_scale", True)),
    "mxfp4 compressed": ("compressed-tensors", mxfp4),
}


def quantize(directory: Path, method: str, store: Callable) -> tuple[Path, Path]:
    """The checkpoint with its experts and projections quantized, and a plain one of the same values."""
    held = load_file(directory / "model.safetensors")
    small, plain = {}, {}
    for name, w in held.items():
        if w.dim() == 2 and "_proj" in name:
            stored, plain[name] = store(name, w)
            small |= stored
        else:
            small[name] = plain[name] = w
    config = json.loads((directory / "config.json").read_text())
    for part, tensors, extra in (("small", small, {"quantization_config": {"quant_method": method}}), ("plain", plain, {})):
        (directory / part).mkdir()
        save_file({n: t.contiguous() for n, t in tensors.items()}, directory / part / "model.safetensors", {"format": "pt"})
        (directory / part / "config.json").write_text(json.dumps(config | extra))
    return directory / "small", directory / "plain"


@pytest.mark.parametrize(("family", "kind"), [*(("qwen3_moe", kind) for kind in KIND), ("deepseek_v3", "fp8 blocks")])
def test_logits_are_those_of_the_plain_checkpoint(family: str, kind: str, tmp_path, kernels) -> None:
    make_tiny(family, tmp_path, **WIDE, **(LATENT if family == "deepseek_v3" else {}))
    small, plain = quantize(tmp_path, *KIND[kind])
    watch = RouterWatch()
    want = driver(plain, Kernels(watch, 0.0, kernels.kv_dtype)).chunks(0, tokens(50), [50])
    want[watch.close(50)] = torch.nan
    assert_close(driver(small, kernels).chunks(0, tokens(50), [40, 1]), want, kernels.tolerance)
    types = load_model(small, kernels.ops).info.types
    assert set(types) == {"float32", {"fp8": "F8_E4M3", "nvf": "NVFP4_SCALED", "mxf": "MXFP4"}[kind[:3]]}


def test_scales_that_are_missing(tmp_path, kernels) -> None:
    make_tiny("qwen3_moe", tmp_path, **WIDE)
    small, _ = quantize(tmp_path, *KIND["nvfp4 modelopt"])
    held = load_file(small / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    del held[name + "_scale_2"]
    save_file(held, small / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"'{name}' holds packed numbers without the scales"):
        load_model(small, kernels.ops)
