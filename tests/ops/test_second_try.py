"""`ops/test` tries a few failed tests once more, alone, and says so; what fails again stays failed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAKY = """
from pathlib import Path
import pytest
@pytest.mark.parametrize("which", ["a b", "c"])
def test_flaky(which):
    seen = Path(__file__).with_name(which)
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")
"""
BROKEN = "def test_broken(): raise AssertionError('always')\n"
MANY = "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_many(n): raise AssertionError\n"


@pytest.mark.parametrize(
    ("tests", "code", "said"),
    [
        ([FLAKY], 0, "PASSED ONLY ALONE"),
        ([FLAKY, BROKEN], 1, "once more, alone"),
        ([MANY], 1, "4 failed"),
        (["def test_good(): pass\n"], 0, "1 passed"),
    ],
    ids=["flaky", "broken", "many", "good"],
)
def test_a_few_failures_get_one_more_try(tmp_path: Path, tests: list[str], code: int, said: str) -> None:
    tree = tmp_path / "tree"
    for name in ("ops/test", "ops/find_python", "ops/env.py", "tests/support/failed.py", "pyproject.toml"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "ops/build_native").write_text("#!/bin/sh\n")
    (tree / "ops/build_native").chmod(0o755)
    for n, text in enumerate(tests):
        (tree / "tests" / f"test_{n}.py").write_text(text)
    environment = {**os.environ, "MOORAGE_VENV": str(Path(sys.executable).parents[1])}
    done = subprocess.run([tree / "ops/test", "--fast"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and said in done.stdout, done.stdout + done.stderr
    assert (said == "PASSED ONLY ALONE") == ("PASSED ONLY ALONE" in done.stdout)
    assert ("once more" in done.stdout) == (said not in ("4 failed", "1 passed"))
