"""Where the coding agents from npm are that some tests run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def binary(name: str) -> Path:
    path = Path(os.environ.get("MOORAGE_NODE", ROOT / ".cache/node")) / "node_modules/.bin" / name
    if not path.exists():
        pytest.skip(f"{name} is not installed (ops/test installs it where npm is)")
    return path
