"""A real coding agent, opencode, through gateway and engine with the demo model: a whole session without a protocol error.

Its prompts are recorded while the test runs and thrown away with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.agents import binary

from .harness import BOUNDED, Service, check_meaning

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TURNS = (
    "Read `settings.toml` and tell me the value of `listen_port`.",
    "List the files in `pkg`.",
    "Run `wc -l pkg/core.py`.",
)


@pytest.fixture
def workspace(tmp_path: Path, running: Service) -> Path:
    """A small git repository with opencode pointed at the gateway."""
    folder = tmp_path / "workspace"
    (folder / "pkg").mkdir(parents=True)
    shutil.copy(shutil.__file__, folder / "pkg/core.py")
    (folder / "settings.toml").write_text('[server]\nlisten_port = "8471"\n')
    model = {"name": BOUNDED, "reasoning": True, "tool_call": True, "limit": {"context": 32768, "output": 1024}}
    options = {"baseURL": running.base_url, "apiKey": "x"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": {BOUNDED: model}}
    config = {"provider": {"local": provider}, "model": f"local/{BOUNDED}", "autoupdate": False, "share": "disabled"}
    config["permission"] = {"edit": "allow", "bash": "allow", "webfetch": "allow"}
    (folder / "opencode.json").write_text(json.dumps(config))
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder


def run_turn(workspace: Path, home: Path, text: str, first: bool) -> list[dict]:
    """One `opencode run`; its events."""
    command = [binary("opencode"), "run", *([] if first else ["-c"]), "-m", f"local/{BOUNDED}", "--format", "json", text]
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"}
    run = subprocess.run(command, cwd=workspace, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def test_a_session_of_three_turns_has_no_protocol_error(running: Service, workspace: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    began = time.time()
    events = [run_turn(workspace, home, text, first=number == 0) for number, text in enumerate(TURNS)]
    for turn in events:
        kinds = {event["type"] for event in turn}
        assert "error" not in kinds, [event for event in turn if event["type"] == "error"]
        assert "step_finish" in kinds, "opencode understood how the turn ended"
    records = running.records(len(TURNS), since=began)
    bad = [r for r in records if r["status"] != 200 or r["outcome"] != "ok" or r["answer"]["malformed"]]
    assert not bad, json.dumps(bad)[:2000]
    for record in records:
        check_meaning(record)
    turns = [record for record in records if json.loads(record["received"]["body"]).get("tools")]
    assert len(turns) >= len(TURNS)
    prompts = [record["reuse"]["prompt"] for record in turns]
    reused = [record["reuse"]["common"] / min(a, b) for record, a, b in zip(turns[1:], prompts, prompts[1:], strict=False)]
    assert min(reused) > 0.5, f"every later turn starts from what was prefilled before: {reused}"
    calls = [call for record in turns for call in record["answer"]["tool_calls"]]
    assert calls, "the session was to use the agent's tools"
    for call in calls:
        json.loads(call["arguments"])
