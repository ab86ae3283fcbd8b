"""The kernel tests run on every instruction set this machine has, against the torch truth."""

from __future__ import annotations

import pytest
import torch

_native = pytest.importorskip("engine._native", reason="native module not built: run ops/build_native")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", _native.isas(), scope="session")


@pytest.fixture(scope="session")
def ops(isa: str):
    from engine.kernels.cpu import CpuOps

    return CpuOps(threads=1, isa=isa)  # tests of threads make their own


@pytest.fixture(scope="session")
def truth():
    from engine.kernels.reference import ReferenceOps

    return ReferenceOps()


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)
