"""docs/kernels-claims.md: every test it names exists, every figure is within its bound; and what compares figures."""

import json

import pytest

from tests.support.claims import ROOT, check


def summary(name: str) -> list[dict]:
    return json.loads((ROOT / "docs" / "results" / name).read_text())["summary"]


def test_every_row_names_a_test_that_exists_or_a_figure_within_its_bound() -> None:
    check("kernels-claims.md", "tests", least=19)


@pytest.mark.parametrize("name", ["engine-zen3-steps-hybrid-q4_0.json", "engine-zen3-steps-q8_0.json"])
def test_tokens_per_second_grow_with_every_step(name: str) -> None:
    steps = {row["size"]: row["moorage"] for row in summary(name) if row["kind"] == "step"}
    assert list(steps) == [4, 8, 16, 32, 64, 128]
    assert list(steps.values()) == sorted(steps.values())


@pytest.mark.parametrize("files", ["warm", "cold"])
def test_weights_are_there_before_a_mapping_server_is_ready(files: str) -> None:
    found = {row["what"]: row for row in summary("engine-zen3-start.json") if row["files"] == files}
    for ours in ("moorage", "moorage, packed"):
        assert found[ours]["weights"] < found["llama.cpp"]["ready"]


def test_matrix_instructions_of_arm_save_instructions() -> None:
    for row in summary("arm-instructions.json"):
        assert row["arithmetic of base"] <= 3 / 4, row
        assert row["rows"] == 1 or row["all of base"] <= 2 / 5, row
