"""docs/experts-claims.md: every test it names exists, every figure is within its bound; and sentences no other test holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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


def test_the_links_rate_is_corrected_where_everything_is_fetched_too() -> None:
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(0)
    told = Rates(link=1e9, host=2e9, shared=1e9)
    with tiered(banks(ops, "f32"), ops, EXPERTS, rates=told, link_rate=1e8) as experts:
        for _ in range(40):
            for layer in range(LAYERS):
                experts.run(layer, *step(generator, 2))
        assert experts.fetch_count(EXPERTS) == EXPERTS, "all misses at once"
        now = experts.status()["rates"]["now"]
        assert now["link"] < 0.8e9 and (now["host"], now["shared"]) == (2e9, 1e9), "nothing else was seen at work"


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


@pytest.mark.parametrize("rows", [40, 64])
def test_of_a_large_chunk_in_hybrid_the_processor_computes_some_misses_while_others_come(rows: int) -> None:
    ops, generator = ReferenceOps(), torch.Generator().manual_seed(0)
    pool, computed = banks(ops, "f32"), []
    with tiered(pool, ops, EXPERTS, "hybrid") as experts:
        real = ops.expert_rows

        def noted(x: torch.Tensor, ids: torch.Tensor, up: torch.Tensor, *more: object) -> torch.Tensor:
            computed.append(up is pool[0].gate_up)
            return real(x, ids, up, *more)

        ops.expert_rows = noted
        x, ids, weights = step(generator, rows)
        out = experts.run(0, x, ids, weights)
        misses = experts.slots.counts.misses
        assert misses == len(ids.unique()) and 0 < experts.slots.counts.fetched < misses
        assert computed[0] and not all(computed), "the pool's first, while the link copies; then what came"
        assert torch.equal(out, ops.moe(x, ids, weights, pool[0].gate_up, pool[0].down, "silu"))


IDLE = """
import os, torch
from engine.kernels.cpu import CpuOps
ops = CpuOps(threads=4)
ops.linear(torch.randn(4, 512), torch.randn(512, 512))
print("computed", flush=True)
input()
"""


def test_workers_sleep_when_nothing_is_computed() -> None:
    """Each thread of the kernels ends up waiting: one that went on spinning would always be running."""
    pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", IDLE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"computed\n"
        tasks = Path(f"/proc/{child.pid}/task")
        assert len(list(tasks.iterdir())) >= 4
        until = time.monotonic() + 60
        while {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()} != {"S"}:
            assert time.monotonic() < until, "a thread is still spinning"
            time.sleep(0.01)  # polls a condition
    finally:
        child.kill()
        child.communicate()
