"""Logits of every family equal to transformers, whatever way the tokens are fed."""

from __future__ import annotations

import pytest
import torch

from tests.support import oracle as support
from tests.support.oracle import assert_close, tokens, truth
from tests.support.steps import Driver
from tests.support.tiny import KINDS, make_tiny

LENGTH = 97  # more than a page and no multiple of anything


@pytest.fixture(scope="module", params=sorted(KINDS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp(request.param)
    return make_tiny(request.param, directory), directory


@pytest.fixture
def driver(checkpoint, kernels) -> Driver:
    return support.driver(checkpoint[1], kernels)


@pytest.mark.parametrize("sizes", [[LENGTH], [1, 7, 13], [64, 1]], ids=["whole", "odd chunks", "page border"])
def test_prefill(checkpoint, driver, kernels, sizes) -> None:
    prompt = tokens(LENGTH)
    assert_close(driver.chunks(2, prompt, sizes), truth(*checkpoint, kernels, prompt), kernels.tolerance)


def test_decode_step_by_step(checkpoint, driver, kernels) -> None:
    prompt = tokens(80)
    assert_close(driver.chunks(1, prompt, [60, 1]), truth(*checkpoint, kernels, prompt), kernels.tolerance)


def test_batch_of_unequal_lengths_and_stages(checkpoint, driver, kernels) -> None:
    prompts = {0: tokens(90, 1), 1: tokens(33, 2), 3: tokens(71, 3)}
    first = driver.step({0: prompts[0][:65], 1: prompts[1][:1], 3: prompts[3][:40]})
    second = driver.step({3: prompts[3][40:41], 0: prompts[0][65:], 1: prompts[1][1:]})
    third = driver.step({3: prompts[3][41:]})
    for s, parts in {0: (first, second), 1: (first, second), 3: (first, second, third)}.items():
        assert_close(torch.cat([part[s] for part in parts]), truth(*checkpoint, kernels, prompts[s]), kernels.tolerance)


def test_rows_do_not_depend_on_batch_or_chunks(driver) -> None:
    """Bitwise: what cache reuse is built on."""
    prompt, other = tokens(LENGTH), tokens(50, 5)
    whole = driver.chunks(0, prompt, [LENGTH])
    assert torch.equal(driver.chunks(1, prompt, [5, 1, 58, 17]), whole)
    together = [driver.step({3: other[:20], 2: prompt[:41]})[2], driver.step({2: prompt[41:], 3: other[20:]})[2]]
    assert torch.equal(torch.cat(together), whole)
