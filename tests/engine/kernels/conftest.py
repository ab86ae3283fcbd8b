from __future__ import annotations

import pytest

from tests.support.kernels import one_torch_thread


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    with one_torch_thread():
        yield
