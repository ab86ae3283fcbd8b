"""The GPU set: each test in Triton's interpreter, and on a device where there is one (`ops/gpu_test`)."""

from __future__ import annotations

import pytest
import torch

from tests.support.cuda import MODES, Carried, Carrier, cuda_kernels


@pytest.fixture(scope="session", params=MODES)
def kernels(request):
    """As the engine has them: tensors are the device's."""
    return cuda_kernels(request.param)


@pytest.fixture(scope="session")
def ops(kernels) -> Carried:
    """For tensors of host memory."""
    return Carried(kernels)


@pytest.fixture(scope="session")
def there(kernels) -> Carrier:
    """Calls of single kernels, for tensors of host memory."""
    return Carrier(kernels.device)


@pytest.fixture(scope="session")
def truth():
    from engine.kernels.reference import ReferenceOps

    return ReferenceOps()


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)
