"""The README's first command with the real engine, the demo model and the real gateway; only the environment is lent."""

import json
import os
import re
import subprocess
import sys

import pytest

from .conftest import ROOT, processes_naming

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_up_once_builds_starts_answers_shows_reuse_and_stops(folder, free_port) -> None:
    env = {**os.environ, "MOORAGE_VENV": sys.prefix, "MOORAGE_RUN": str(folder)}
    command = [ROOT / "ops/up", "--once", "--engine-port", str(free_port()), "--port", str(free_port())]
    run = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=800)
    assert run.returncode == 0, run.stdout + run.stderr
    wanted = ["== environment", "building the native module", "== engine with ops/demo_model, gateway", "engine is ready on port"]
    wanted += [
        "gateway is ready on port",
        r"thinking \| \w",
        r'tool call \| read_file {"path": "config.toml"}',
        r"answer \| .*8471",
    ]
    wanted += [r"common=[1-9]\d* prompt=\d+", "engine \\| kv cache hit prompt=", r"== stopping \(--once\)"]
    found = [re.search(pattern, run.stdout) for pattern in wanted]
    assert all(found), f"{wanted[found.index(None)]!r} not in:\n{run.stdout}"
    assert [at.start() for at in found] == sorted(at.start() for at in found), run.stdout
    records = [json.loads(line) for line in (folder / "records/moorage.jsonl").read_text().splitlines()]
    assert [record["outcome"] for record in records] == ["ok", "ok"] and records[1]["reuse"]["common"] > 0
    assert not processes_naming(str(folder))
