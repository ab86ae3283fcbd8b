"""The bench that is no part of any build compiles as its head says."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ of an x86-64 machine")
def test_wall_compiles_against_the_kernels_as_they_are() -> None:
    (command,) = re.findall(r"^//     (g\+\+ .*)$", (ROOT / "ops/bench/wall.cpp").read_text(), re.M)
    checked = [word for word in command.split() if word not in ("-O3", "-o", "wall", "-pthread")]
    assert "ops/bench/wall.cpp" in checked
    done = subprocess.run([*checked, "-fsyntax-only"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
