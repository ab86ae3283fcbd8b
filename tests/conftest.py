"""How far property tests search: the same examples in every run, or new ones."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Triton's interpreter runs the GPU kernels on the processor. That is decided when triton is imported, so here, before any test.
# TRITON_INTERPRET=0 is for tests marked gpu on a machine that has one.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Whoever changes nothing must see what was seen before, so the default searches where it always did; `explore` finds the new:
#   ops/test --fast --hypothesis-profile=explore
# A busy machine is no bug: neither an example nor making one has a time limit, a test as a whole has pytest's.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("fixed"), derandomize=False, print_blob=True, max_examples=500)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: what two processes share at the end, test by test, should be small (`ops/test`)."""
    slow: set[Path] = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup() -> None:
    """One thread for torch, whatever an engine has set that the test before built: its threads wait for each other at the end of
    every tiny operation, for milliseconds where other processes have the cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
