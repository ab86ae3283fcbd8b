from __future__ import annotations

import pytest
import torch

from tests.support.kernels import KERNELS, Kernels


@pytest.fixture(params=sorted(KERNELS))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return KERNELS[request.param]()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield
