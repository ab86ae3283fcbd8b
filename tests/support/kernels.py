"""The kernels that tests run on, each with the tolerance its numerics allow."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest
import torch

from engine.kernels.ops import Ops


@dataclass(frozen=True)
class Kernels:
    ops: Ops
    tolerance: float  # largest difference of a logit from the truth on the same kind of KV pages, relative to the largest logit
    kv_dtype: torch.dtype


def _reference() -> Kernels:
    from engine.kernels.reference import ReferenceOps

    return Kernels(ReferenceOps(), 1e-4, torch.float32)


def _cpu() -> Kernels:
    try:
        cpu = importlib.import_module("engine.kernels.cpu")
    except ImportError as error:
        pytest.skip(f"the native kernels are not built here: {error}")
    # two float32 results on either side of a bfloat16 border leave keys that differ by 2^-8
    return Kernels(cpu.CpuOps(threads=1), 5e-3, torch.bfloat16)


KERNELS = {"reference": _reference, "cpu": _cpu}
