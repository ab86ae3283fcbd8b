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


def test_a_plain_start_imports_no_pydantic() -> None:
    code = """
import sys
from engine import cli
sys.argv = ["engine", "serve", "/nonexistent", "--port", "0"]
try:
    cli.main()
except SystemExit as end:
    print(end.code, "pydantic" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"] and "no such file" in done.stderr
