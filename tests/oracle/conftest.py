from __future__ import annotations

import pytest
import torch

from tests.support.kernels import KERNELS, Kernels, one_torch_thread


@pytest.fixture(params=sorted(KERNELS))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return KERNELS[request.param]()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    with one_torch_thread():
        yield


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield
