"""A pytest plugin of `ops/test`: the names of the tests that failed, a line each, in the file that $MOORAGE_FAILED names."""

import os
from pathlib import Path

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("failed", "error") for report in terminalreporter.getreports(kind)]
    names = dict.fromkeys(report.nodeid for report in reports)
    Path(os.environ["MOORAGE_FAILED"]).write_text("".join(f"{name}\n" for name in names))
