"""The arrows of docs/architecture.md: which room may import which."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# room -> module prefixes it must not import, anywhere in the file
FORBIDDEN = {
    "gateway": ("torch", "transformers"),
    # transformers and pickles can run code that a checkpoint brings along
    "engine": ("litellm", "gateway", "fastapi", "transformers", "pickle"),
    "engine/models": ("engine.nn", "engine.prefix", "engine.worker", "engine.scheduler", "engine.app", "starlette"),
    "engine/nn": (
        "engine.prefix",
        "engine.worker",
        "engine.scheduler",
        "engine.app",
        "engine.models.families",
        "starlette",
    ),
    "engine/kernels": (
        "engine.nn",
        "engine.models.families",
        "engine.prefix",
        "engine.worker",
        "engine.scheduler",
        "starlette",
    ),
    "engine/prefix": ("starlette", "aiohttp", "engine.app", "engine.worker", "engine.models.families"),
    "engine/experts": ("starlette", "aiohttp", "engine.app", "engine.worker", "engine.models.families"),
    "engine/api": ("torch", "engine.worker", "engine.scheduler", "engine.nn", "engine.models", "engine.prefix", "engine.app"),
    "engine/text": ("torch", "starlette", "engine.worker", "engine.nn", "engine.prefix"),
}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def hits(names: set[str], prefix: str) -> list[str]:
    return sorted(n for n in names if n == prefix or n.startswith(prefix + "."))


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_room_imports_nothing_forbidden(room: str) -> None:
    bad = []
    for path in sorted((ROOT / room).rglob("*.py")):
        names = imports(path)
        bad += [f"{path.relative_to(ROOT)} imports {h}" for p in FORBIDDEN[room] for h in hits(names, p)]
    assert not bad, "\n".join(bad)


def test_the_kernels_know_no_torch() -> None:
    sources = [p for p in (ROOT / "native").rglob("*") if p.suffix in (".cpp", ".h")]
    included = {
        line.split()[1].strip('<>"') for p in sources for line in p.read_text().splitlines() if line.startswith("#include")
    }
    assert "nanobind/nanobind.h" in included
    assert not [name for name in included if name.startswith(("torch/", "ATen/", "c10/", "Python.h"))]


def test_gateway_knows_only_the_engine_protocol() -> None:
    bad = []
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        bad += [
            f"{path.name}: {n}"
            for n in imports(path)
            if n.startswith("engine") and not n.startswith("engine.protocol") and n != "engine"
        ]
    assert not bad, "\n".join(bad)


def test_the_api_process_never_imports_the_worker() -> None:
    names = imports(ROOT / "engine/app.py") if (ROOT / "engine/app.py").exists() else set()
    assert not hits(names, "torch") and not hits(names, "engine.worker") and not hits(names, "engine.nn")
