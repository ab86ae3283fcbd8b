"""codex (Responses) and Claude Code (Messages) through gateway and engine with the demo model: sessions without a protocol error.

Their prompts are recorded while the tests run and thrown away with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.agents import binary

from .harness import BOUNDED, CUT, Service, check_meaning

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TURNS = ("Read `settings.toml` and tell me the value of `listen_port`.", "List the files in `pkg`.")
CODEX = """
model = "MODEL"
model_provider = "local"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.local]
name = "local"
base_url = "URL"
wire_api = "responses"
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    (folder / "pkg").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (folder / "pkg/core.py").write_text("print('core')\n")
    (folder / "settings.toml").write_text('[server]\nlisten_port = "8471"\n')
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder


def run(command: list[str | Path], workspace: Path, env: dict[str, str], fails: bool = False) -> str:
    """What the agent printed. Its exit code must be zero unless it `fails`."""
    env = {"PATH": os.environ["PATH"], "HOME": str(workspace.parent / "home"), "TERM": "dumb"} | env
    done = subprocess.run(command, cwd=workspace, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500)
    said = done.stdout[-2000:] + done.stderr[-2000:]
    assert (done.returncode != 0) == fails, said
    return said


def codex(running: Service, workspace: Path, model: str) -> list[str | Path]:
    """The command line of codex, set up to ask the gateway for `model`."""
    home = workspace.parent / "home/.codex"
    home.mkdir()
    (home / "config.toml").write_text(CODEX.replace("URL", running.base_url).replace("MODEL", model))
    return [binary("codex"), "exec", "--skip-git-repo-check"]


def claude(running: Service, model: str) -> tuple[list[str | Path], dict[str, str]]:
    """The command line and environment of Claude Code for the gateway."""
    # Four tools instead of twenty-four: with all of them the prompt is longer than the demo model's context.
    command = [binary("claude"), "--dangerously-skip-permissions", "--tools", "Bash,Read,Edit,Write"]
    env = {name: model for name in ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")}
    env |= {"ANTHROPIC_BASE_URL": running.gateway.url, "ANTHROPIC_API_KEY": "sk-ant-x", "IS_SANDBOX": "1"}
    return command, env | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}


def exchanges(running: Service, since: float, dialect: str, least: int) -> list[dict]:
    """The agent's requests that offered tools. Every exchange, these and others, ended well in the agent's own dialect."""
    records = [r for r in running.records(least, since) if r["dialect"] == dialect]
    bad = [(r["status"], r["outcome"], r["error"]) for r in records if r["status"] != 200 or r["outcome"] != "ok"]
    assert not bad
    for record in records:
        check_meaning(record)
    return [r for r in records if json.loads(r["received"]["body"]).get("tools")]


def check_session(turns: list[dict]) -> None:
    """One session, and later prompts found what they share with the one before in the cache."""
    assert len(turns) >= len(TURNS) and len({r["session"]["id"] for r in turns}) == 1
    prompts = [r["reuse"]["prompt"] for r in turns]
    reused = [r["reuse"]["common"] / min(a, b) for r, a, b in zip(turns[1:], prompts, prompts[1:], strict=False)]
    assert min(reused) > 0.5, f"every later turn starts from what was prefilled before: {reused}"


def test_codex(running: Service, workspace: Path) -> None:
    command, began = codex(running, workspace, BOUNDED), time.time()
    run([*command, TURNS[0]], workspace, {})
    run([*command, "resume", "--last", TURNS[1]], workspace, {})
    check_session(exchanges(running, began, "responses", len(TURNS)))


def test_claude_code(running: Service, workspace: Path) -> None:
    (command, env), began = claude(running, BOUNDED), time.time()
    run([*command, "-p", TURNS[0]], workspace, env)
    run([*command, "-c", "-p", TURNS[1]], workspace, env)
    check_session(exchanges(running, began, "messages", len(TURNS)))


def test_codex_is_told_that_an_answer_was_cut(running: Service, workspace: Path) -> None:
    command, began = codex(running, workspace, CUT), time.time()
    said = run([*command, TURNS[0]], workspace, {}, fails=True)
    assert "max_output_tokens" in said
    assert {r["answer"]["finish_reason"] for r in exchanges(running, began, "responses", 1)} == {"length"}


def test_claude_code_is_told_that_an_answer_was_cut(running: Service, workspace: Path) -> None:
    (command, env), began = claude(running, CUT), time.time()
    said = run([*command, "-p", TURNS[0]], workspace, env, fails=True)
    assert "output token maximum" in said
    assert {r["answer"]["finish_reason"] for r in exchanges(running, began, "messages", 1)} == {"length"}
