"""Small banks in several formats and executors over them."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch

from engine.experts.executor import Tier, TieredExperts
from engine.experts.pool import HostPool
from engine.experts.split import Rates
from engine.kernels.blocks import MX_GROUP, NV_GROUP, f8_blocks, mxfp4_blocks, nvfp4_blocks
from engine.kernels.ops import Ops, Quant
from engine.kernels.reference import ReferenceOps
from engine.nn.experts import Bank
from tests.support.tiny_gguf import random_blocks

LAYERS, EXPERTS, TOP_K, HIDDEN, INTER = 3, 12, 3, 64, 32
# of which the package can only read: random blocks
UNWRITABLE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ4_NL", "IQ4_XS", "NVFP4")
WIDE, WIDE_KINDS = 256, (*UNWRITABLE, "F8_E4M3", "MXFP4", "NVFP4_SCALED")  # whose blocks are longer than INTER
EVEN = Rates(link=1e9, host=2e9, shared=1e9)  # half of the misses are fetched
SLOW = Rates(link=1e6, host=2e9, shared=1e9)  # by what it says; the copies are as fast as they are
ALL = LAYERS * EXPERTS
# name -> (mode, slots): everything resident; fetched, with room for two layers, for a batch, for less than one token's
# experts, over a link worth computing beside; split; computed in place
PLACEMENTS = {
    "resident": ("offload", ALL),
    "offload": ("offload", 2 * EXPERTS),
    "offload-small": ("offload", 5),
    "offload-tiny": ("offload", 2),
    "offload-late": ("offload", 2 * EXPERTS),
    "hybrid": ("hybrid", 14),
    "hybrid-small": ("hybrid", 2),
    "host": ("host", 4),
    "no-slots": ("hybrid", 0),
}


def kernels(name: str) -> Ops:
    if name == "reference":
        return ReferenceOps()
    try:
        return importlib.import_module("engine.kernels.cpu").CpuOps(threads=1)
    except ImportError as error:
        pytest.skip(f"the native kernels are not built here: {error}")


def banks(ops: Ops, kind: str, layers: int = LAYERS, seed: int = 0) -> list[Bank]:
    """Random experts stored as `kind`: bf16, f16, f32 or a ggml type."""
    generator = torch.Generator().manual_seed(seed)

    hidden, inter = (WIDE, WIDE) if kind in WIDE_KINDS else (HIDDEN, INTER)

    def bank() -> Bank:
        shapes = (EXPERTS, 2 * inter, hidden), (EXPERTS, hidden, inter)
        gate_up, down = (ops.prepare(stored(torch.randn(s, generator=generator) / 8, kind)) for s in shapes)
        return Bank(gate_up, down, "silu")

    return [bank() for _ in range(layers)]


def stored(weight: torch.Tensor, kind: str):
    dtypes = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    if kind in dtypes:
        return weight.to(dtypes[kind])
    if kind == "F8_E4M3":
        return f8_blocks(weight.to(torch.float8_e4m3fn), torch.tensor(0.5))
    if kind in ("MXFP4", "NVFP4_SCALED"):
        return stored_in_four_bits(weight, kind)
    import gguf

    if kind in UNWRITABLE:  # other ones for every weight
        seed = int(weight.flatten()[0].abs() * 1e6)
        data = random_blocks(tuple(weight.shape), gguf.GGMLQuantizationType[kind], seed)
        return Quant(torch.from_numpy(data).view(*weight.shape[:-1], -1), kind, weight.shape[-1])
    flat = weight.reshape(-1, weight.shape[-1]).numpy()
    data = gguf.quants.quantize(flat, gguf.GGMLQuantizationType[kind])
    return Quant(torch.from_numpy(data).view(*weight.shape[:-1], -1), kind, weight.shape[-1])


def stored_in_four_bits(weight: torch.Tensor, kind: str) -> Quant:
    *lead, cols = weight.shape
    numbers = weight[..., ::2].contiguous().view(torch.uint8)[..., : cols // 2].contiguous()  # any bits are numbers
    if kind == "MXFP4":
        return mxfp4_blocks(numbers, torch.full((*lead, cols // MX_GROUP), 124, dtype=torch.uint8))
    return nvfp4_blocks(numbers, torch.full((*lead, cols // NV_GROUP), 0.5).to(torch.float8_e4m3fn), torch.tensor(0.2))


@contextlib.contextmanager
def tiered(pool: list[Bank], ops: Ops, slots: int, mode: str = "offload", **more):
    more = {"rates": EVEN, **more}
    executor = TieredExperts(HostPool(pool), ops, Tier(slots=slots, mode=mode, **more))
    try:
        yield executor
    finally:
        executor.close()


def step(generator: torch.Generator, rows: int, kind: str = "") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, weights of a layer call with a skewed router, for experts stored as `kind`."""
    x = torch.randn(rows, WIDE if kind in WIDE_KINDS else HIDDEN, generator=generator)
    logits = torch.randn(rows, EXPERTS, generator=generator) - torch.arange(EXPERTS) / 6
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return x, ids.int(), (weights / weights.sum(-1, keepdim=True)).contiguous()
