"""One engine and one gateway for all end-to-end tests of a run; a test that kills something starts its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import DEMO_MODEL, Service, service


@pytest.fixture(scope="session")
def demo_model() -> Path:
    assert (DEMO_MODEL / "config.json").exists(), f"{DEMO_MODEL} is not there: the demo model is part of the repository"
    return DEMO_MODEL


@pytest.fixture(scope="session")
def running(demo_model: Path, tmp_path_factory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("service"), demo_model) as up:
        yield up
