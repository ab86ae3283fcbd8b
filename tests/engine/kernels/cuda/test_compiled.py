"""What Triton's compiler makes of the kernels for every target, without a GPU: recorded figures, and some compiled anew."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SCRIPT, RECORDED = ROOT / "ops" / "bench" / "cuda_registers.py", ROOT / "docs" / "results" / "cuda-registers.json"
TARGETS = {"sm_86", "sm_89", "sm_90", "sm_120", "sm_121"}
SHARED = {"sm_90": 227 * 1024}  # bytes a block may have; 99 KB on the others
PAIRS = (("few", "many"), ("spans", "walk"))


def check(rows: list[dict], spilled: int) -> None:
    by_name = {(row["kernel"], row["target"]): row for row in rows}
    for row in rows:
        assert row["shared_bytes"] <= SHARED.get(row["target"], 99 * 1024), row
        assert row["spilled_bytes"] <= spilled, row
        for few, many in PAIRS:
            if row["kernel"].endswith(few):  # one instruction, so one row has the same bits among few and among many
                other = by_name[row["kernel"].removesuffix(few) + many, row["target"]]
                assert row["tensor"] and row["tensor"] == other["tensor"], (row, other)


def test_recorded_kernels_fit_every_target_and_use_one_instruction_for_few_rows_and_many() -> None:
    rows = json.loads(RECORDED.read_text())["kernels"]
    assert {row["target"] for row in rows} == TARGETS and len(rows) >= 5 * 50
    check(rows, spilled=448)
    assert sum(row["spilled_bytes"] == 0 for row in rows) >= 0.75 * len(rows)


@pytest.mark.slow
def test_kernels_compile_as_recorded(tmp_path) -> None:
    """As the interpreter is on in this process, a process of its own."""
    output, match = tmp_path / "made.json", "linear Q4_0|attention 128 spans"
    command = [sys.executable, SCRIPT, "--match", match, "--targets", "86", "90", "--output", output]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == 0, told.stderr
    rows = json.loads(output.read_text())["kernels"]
    recorded = {(row["kernel"], row["target"]): row for row in json.loads(RECORDED.read_text())["kernels"]}
    assert len(rows) == 2 * 3
    for row in rows:
        assert row["tensor"] == recorded[row["kernel"], row["target"]]["tensor"]
        assert row["spilled_bytes"] <= recorded[row["kernel"], row["target"]]["spilled_bytes"] + 64


def test_the_tests_for_a_gpu_say_in_one_line_that_there_is_none() -> None:
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a GPU")
    told = subprocess.run([ROOT / "ops" / "gpu_test"], capture_output=True, text=True)
    assert told.returncode == 1 and not told.stdout
    assert told.stderr.startswith("moorage: no test was run: ") and told.stderr.count("\n") == 1
