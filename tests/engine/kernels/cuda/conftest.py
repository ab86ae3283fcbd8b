"""Kernels of the GPU set on the processor, in Triton's interpreter (tests/conftest.py turns it on before triton is imported)."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreter import mend

pytest.importorskip("triton", reason="triton is not installed: ops/test installs it")


@pytest.fixture(scope="session")
def ops():
    from engine.kernels.cuda.lang import INTERPRETED
    from engine.kernels.cuda.ops import CudaOps

    if not INTERPRETED:  # these compare bits on the processor; a GPU has no tests of its kernels yet
        pytest.skip("TRITON_INTERPRET=0: these run in the interpreter only")
    mend()
    return CudaOps()


@pytest.fixture(scope="session")
def truth():
    from engine.kernels.reference import ReferenceOps

    return ReferenceOps()


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)
