"""Pages that say which test or figure holds a promise: every test named exists, every figure is within its bound."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST = re.compile(r"`([a-z0-9_/]+\.py)::(\w+)`")
FIGURE = re.compile(r"`([\w-]+\.json): ([\w. -]+) (>=|<=|within) ([\d.]+)`")


def check(page: str, folder: str, least: int) -> None:
    """`page` in docs/ has `least` rows or more; the tests it names lie below `folder`, the figures in docs/results/."""
    rows = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= least
    for row in rows:
        tests, figures = TEST.findall(row), FIGURE.findall(row)
        assert tests or figures, row
        assert row.count(".py::") == len(tests) and row.count(".json:") == len(figures), f"not understood: {row}"
        for path, name in tests:
            assert name in _tests_of(ROOT / folder / path), f"{path} has no {name}"
        for file, path, how, bound in figures:
            value, limit = _figure(file, path), float(bound)
            held = value >= limit if how == ">=" else value <= limit if how == "<=" else abs(value) <= limit
            assert held, f"{file}: {path} is {value}, not {how} {bound}"


@cache
def _tests_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return functions | {
        target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if hasattr(target, "id")
    }


def _figure(file: str, path: str) -> float:
    value = json.loads((ROOT / "docs" / "results" / file).read_text())
    while path:
        if isinstance(value, list):
            place, _, path = path.partition(".")
            value = value[int(place)]
        else:  # names may hold a dot
            key = max((k for k in value if path == k or path.startswith(k + ".")), key=len, default=path)
            value, path = value[key], path[len(key) + 1 :]
    return value
