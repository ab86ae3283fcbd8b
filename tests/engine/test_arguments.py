"""Arguments of `serve` that typer need not look at mean what typer makes of them."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from engine import cli
from engine.arguments import plain

PLAIN = [
    ["model"],
    ["--port", "0", "model", "--kv-memory", "8G", "--threads", "2"],
    ["model", "--max-context", "000123", "--name", "a b", "--kv-disk", "", "--prefill-chunk", "1"],
]
UNUSUAL = [
    [],
    ["--help"],
    ["model", "--help"],
    ["one", "two"],
    ["model", "--port"],
    ["model", "--prot", "1"],
    ["model", "--port=1"],
    ["model", "--port", "1", "--port", "2"],
    ["model", "--port", "x"],
    ["model", "--port", "1.0"],
    ["model", "--port", "65536"],
    ["model", "--max-running", "0"],
    ["model", "--threads", "-1"],
    ["model", "--name", "--port"],
    ["--", "model"],
]


@pytest.mark.parametrize("words", PLAIN, ids=" ".join)
def test_plain_arguments_are_what_typer_makes_of_them(words) -> None:
    given: dict = {}
    app = typer.Typer()
    app.command()(_recording(given))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    defaults = {name: parameter.default for name, parameter in inspect.signature(cli.serve).parameters.items()}
    assert {**defaults, **plain(cli.serve, words)} == given


def _recording(given: dict) -> Callable[..., None]:
    """What takes the arguments of `serve`."""

    @functools.wraps(cli.serve)
    def serve(**values: object) -> None:
        given.update(values)

    return serve


@pytest.mark.parametrize("words", UNUSUAL, ids=" ".join)
def test_the_unusual_is_left_to_typer(words) -> None:
    assert plain(cli.serve, words) is None


def test_a_plain_start_imports_no_typer() -> None:
    words = ["-X", "importtime", "-m", "engine.cli", "serve", "/nonexistent", "--port", "0"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 1 and "no such file" in done.stderr
    assert "msgspec" in imported and not imported & {"typer", "click", "pydantic"}


def test_serving_imports_what_answers_requests_alone() -> None:
    """Command lines, servers of metrics and templates come when somebody asks for them."""
    code = """
import sys
from engine import launch
for package in launch.ALONE:
    launch.modules_alone(package)
import engine.server
print(*sys.modules)
from engine.api.metrics import Metrics
assert Metrics().render()[0].startswith(b"# HELP moorage_")
import uvicorn, prometheus_client
assert uvicorn.run and prometheus_client.make_asgi_app
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    never = {"click", "jinja2", "typer", "uvicorn.main", "prometheus_client.exposition", "numpy", "torch"}
    assert not set(done.stdout.split()) & never
