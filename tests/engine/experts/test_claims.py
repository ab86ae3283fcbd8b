"""docs/experts-claims.md: every test it names exists, every figure is within its bound; and sentences no other test holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.experts.split import Rates
from engine.kernels.reference import ReferenceOps
from tests.engine.experts.tiers import EXPERTS, HIDDEN, LAYERS, TOP_K, banks, step, tiered
from tests.support.claims import check

ROOT = Path(__file__).resolve().parents[3]


def test_every_row_names_a_test_that_exists_or_a_figure_within_its_bound() -> None:
    check("experts-claims.md", "tests/engine", least=41)


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
