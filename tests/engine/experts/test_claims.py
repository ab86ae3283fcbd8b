"""docs/experts-claims.md: every test it names exists, every figure is within its bound; and sentences no other test holds."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.experts.split import Rates
from engine.kernels.reference import ReferenceOps
from tests.engine.experts.tiers import EXPERTS, HIDDEN, LAYERS, TOP_K, banks, step, tiered

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = ROOT / "docs" / "experts-claims.md"
TEST = re.compile(r"`([a-z_/]+\.py)::(test_\w+)`")
FIGURE = re.compile(r"`([\w-]+\.json): ([\w.]+) (>=|within) ([\d.]+)`")


def rows() -> list[str]:
    return [line for line in CLAIMS.read_text().splitlines() if line.startswith("| ") and "`" in line]


def test_every_row_names_a_test_that_exists_or_a_figure_within_its_bound() -> None:
    assert len(rows()) > 40
    for row in rows():
        tests, figures = TEST.findall(row), FIGURE.findall(row)
        assert tests or figures, row
        assert row.count(".py::") == len(tests) and row.count(".json:") == len(figures), f"not understood: {row}"
        for path, name in tests:
            assert name in _tests_of(path), f"{path} has no {name}"
        for file, path, how, bound in figures:
            value = _figure(file, path)
            assert value >= float(bound) if how == ">=" else abs(value) <= float(bound), f"{file}: {path} is {value}"


@cache
def _tests_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / "engine" / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _figure(file: str, path: str) -> float:
    value = json.loads((ROOT / "docs" / "results" / file).read_text())
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


@pytest.mark.parametrize(("file", "least"), [("experts.json", {4, 16, 64, 256}), ("experts-zen3.json", {4, 16})])
def test_the_measured_choice_of_prefill_is_near_the_better_way(file: str, least: set[int]) -> None:
    for run in json.loads((ROOT / "docs" / "results" / file).read_text())["runs"]:
        sizes = run["prefill"]
        assert {each["rows"] for each in sizes} >= least
        for each in sizes:
            assert each["chosen"] <= 1.05 * min(each["demand"], each["ahead"]), each


def test_a_running_engine_corrects_its_rates_and_shows_them() -> None:
    """A link a thousand times slower than calibrated: what is shown approaches it, and fewer misses are fetched for it."""
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(0)
    pool = banks(ops, "f32")
    told = Rates(link=1e9, host=2e9, shared=1e9)
    with tiered(pool, ops, EXPERTS, "hybrid", rates=told, link_rate=1e7) as experts:
        before = experts.fetch_count(8)
        for _ in range(40):
            for layer in range(LAYERS):
                experts.run(layer, *step(generator, 2))
        shown = experts.status()["rates"]
        assert shown["calibrated"]["link"] == 1e9 and shown["observations"] > 20
        assert shown["now"]["link"] < 0.8e9, "a paced link can only be slower"
        assert shown["now"]["shared"] != 1e9 or shown["now"]["host"] != 2e9
        experts.rates.now = Rates(1e7, 2e9, 1e9)
        assert experts.fetch_count(8) == 1 < before, "and the split follows"


@pytest.mark.parametrize("rows", [2, 8])
def test_a_batch_copies_each_distinct_expert_once(rows: int) -> None:
    ops, pool = ReferenceOps(), banks(ReferenceOps(), "f32")
    ids = torch.arange(TOP_K).int().expand(rows, -1).contiguous()
    weights = torch.full((rows, TOP_K), 1 / TOP_K)
    with tiered(pool, ops, LAYERS * EXPERTS) as experts:
        x = torch.randn(rows, HIDDEN)
        out = experts.run(0, x, ids, weights)
        assert torch.equal(out, ops.moe(x, ids, weights, pool[0].gate_up, pool[0].down, "silu"))
        assert experts.link.bytes == TOP_K * experts.slot_bytes and experts.slots.counts.misses == TOP_K
