"""Real coding agents from npm, each through the real gateway in front of a scripted model: a session of two user turns.

Their prompts are recorded while the test runs and thrown away with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import meaning
from tests.support.agents import binary
from tests.support.gateway import Gateway, settings
from tests.support.scripted_model import Do, Say, ScriptedModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 240


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "alpha.txt").write_text("the first file\n")
    (folder / "beta.txt").write_text("the second file\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    (tmp_path / "home").mkdir()
    return folder


def shell(command: str) -> dict[str, dict[str, Any]]:
    """A command in the words of every agent's shell tool."""
    described = {"command": command, "description": "run a command"}
    return {"exec_command": {"cmd": command}, "shell_command": {"command": command}, "Bash": described, "bash": described}


def script(folder: Path) -> list[Say | Do]:
    read = [shell(f"cat {folder}/alpha.txt"), shell(f"cat {folder}/beta.txt")]
    return [
        Do("Two files: I can read both at once.", "Reading both.", read),
        Do("Now one that fails.", "", [shell(f"cat {folder}/missing.txt")]),
        Say("Both files are there; a third one is missing."),
        Do("Write it then.", "Writing.", [shell(f"echo 'the third file' > {folder}/missing.txt")]),
        Say("The third file is written."),
    ]


async def run(command: list[str | Path], folder: Path, **more: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder.parent / "home"), "TERM": "dumb"} | more
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, (out[-3000:] + err[-3000:]).decode(errors="replace")
    return out.decode(errors="replace")


def check(model: ScriptedModel, records: list[dict[str, Any]], path: str, meant) -> list[dict[str, Any]]:
    """Every exchange went well, and what the model received means what the agent sent. The requests with tools, as received."""
    bad = [r for r in records if r["status"] != 200 or r["outcome"] != "ok"]
    assert not bad, json.dumps([(r["route"], r["error"]) for r in bad])
    sent = [r for r in records if r["route"] == path and json.loads(r["received"]["body"]).get("tools")]
    received = [json.loads(r["sent"]["body"]) for r in sent]
    assert len(received) == 5 and model.steps == []
    for record, body in zip(sent, received, strict=True):
        asked = json.loads(record["received"]["body"])
        assert meaning.of_chat(body) == meant(asked)
    assert len({r["session"]["id"] for r in sent}) == 1 and sent[0]["session"]["source"].startswith("header:")
    return received


def check_history(model: ScriptedModel, received: list[dict[str, Any]]) -> None:
    """What the model said is what it gets to read again; its calls have their results at once; nothing is rewritten."""
    last = received[-1]["messages"]
    history = [m for m in last if m["role"] == "assistant"]
    for said, read in zip(model.said, history, strict=False):
        assert read["content"] == said["content"] and read.get("reasoning_content") == said.get("reasoning_content")
        assert [_call(c) for c in read.get("tool_calls", ())] == [_call(c) for c in said.get("tool_calls", ())]
    assert len(history) == len(model.said) - 1
    for i, message in enumerate(last):
        ids = [c["id"] for c in message.get("tool_calls", ())]
        assert sorted(m.get("tool_call_id", "") for m in last[i + 1 : i + 1 + len(ids)]) == sorted(ids)
    results = {m["tool_call_id"]: m["content"] for m in last if m["role"] == "tool"}
    assert "the first file" in results["call_0"] and "the second file" in results["call_1"]
    assert "No such file" in results["call_2"]
    for earlier, later in zip(received, received[1:], strict=False):
        assert later["tools"] == earlier["tools"]
        head = earlier["messages"]
        assert later["messages"][: len(head)] == head, "the prompt only grows"


def _call(call: dict[str, Any]) -> tuple[str, str, Any]:
    return call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])


async def session(
    workspace: Path, tmp_path: Path, first: list[Any], later: list[Any], prepare, env
) -> tuple[ScriptedModel, list]:
    async with ScriptedModel(script(workspace)) as model, Gateway(settings(model.base), tmp_path) as gw:
        prepare(gw.url)
        more = {k: v.replace("URL", gw.url) for k, v in env.items()}
        out = await run(first, workspace, **more)
        assert "a third one is missing" in out
        out = await run(later, workspace, **more)
        assert "The third file is written" in out
        assert (workspace / "missing.txt").read_text() == "the third file\n"
    # The writer is behind its queue; closed, the gateway has written them all.
    return model, [json.loads(line) for line in gw.path.read_text().splitlines()]


CODEX = """
model = "m"
model_provider = "local"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.local]
name = "local"
base_url = "URL/v1"
wire_api = "responses"
"""


async def test_codex_finishes_a_session(workspace: Path, tmp_path: Path) -> None:
    codex = [binary("codex"), "exec", "--skip-git-repo-check"]

    def prepare(url: str) -> None:
        (tmp_path / "home/.codex").mkdir()
        (tmp_path / "home/.codex/config.toml").write_text(CODEX.replace("URL", url))

    later = [*codex, "resume", "--last", "Write the missing file."]
    model, records = await session(workspace, tmp_path, [*codex, "Read the files."], later, prepare, {})
    received = check(model, records, "/v1/responses", meaning.of_responses)
    check_history(model, received)


async def test_codex_runs_custom_tools_and_tools_of_a_namespace(workspace: Path, tmp_path: Path) -> None:
    code = """await tools.exec_command({cmd: "echo 'é {}' > new.txt"});\ntext("made");\n"""
    steps = [
        Do("Write code for it.", "", [{"exec": {"input": code}}]),
        Do("Ask the others.", "", [{"multi_agent_v1__close_agent": {"target": "nobody"}}]),
        Say("All done."),
    ]
    (tmp_path / "home/.codex").mkdir()
    async with ScriptedModel(steps) as model, Gateway(settings(model.base), tmp_path) as gw:
        config = CODEX.replace("URL", gw.url) + "[features]\ncode_mode = true\n"
        (tmp_path / "home/.codex/config.toml").write_text(config)
        out = await run([binary("codex"), "exec", "--skip-git-repo-check", "Make a file."], workspace)
        bodies = [r.json for r in model.requests]
    assert "All done." in out
    results = {m["tool_call_id"]: m["content"] for m in bodies[-1]["messages"] if m["role"] == "tool"}
    assert (workspace / "new.txt").read_text() == "é {}\n", results
    assert "made" in results["call_0"] and "nobody" in results["call_1"] and "unsupported" not in results["call_1"].lower()
    custom = next(m["tool_calls"][0] for m in bodies[-1]["messages"] if m.get("tool_calls"))
    assert json.loads(custom["function"]["arguments"]) == {"input": code}
    records = [json.loads(line) for line in gw.path.read_text().splitlines()]
    pairs = [(json.loads(r["received"]["body"]), json.loads(r["sent"]["body"])) for r in records if r["route"] == "/v1/responses"]
    assert pairs and all(meaning.of_chat(sent) == meaning.of_responses(asked) for asked, sent in pairs)
    own = [item for item in pairs[-1][0]["input"] if item.get("type") == "custom_tool_call"]
    assert [(item["call_id"], item["name"], item["input"]) for item in own] == [("call_0", "exec", code)]  # so it reached Codex
    assert any(item.get("type") == "custom_tool_call_output" and item["call_id"] == "call_0" for item in pairs[-1][0]["input"])


async def test_claude_code_finishes_a_session(workspace: Path, tmp_path: Path) -> None:
    claude = [binary("claude"), "--dangerously-skip-permissions"]
    env = {
        "ANTHROPIC_BASE_URL": "URL",
        "ANTHROPIC_API_KEY": "sk-ant-x",
        "ANTHROPIC_MODEL": "m",
        "ANTHROPIC_SMALL_FAST_MODEL": "m",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    first, later = [*claude, "-p", "Read the files."], [*claude, "-c", "-p", "Write the missing file."]
    model, records = await session(workspace, tmp_path, first, later, lambda url: None, env)
    received = check(model, records, "/v1/messages", meaning.of_messages)
    check_history(model, received)
    assert all("cache_control" not in json.dumps(b) for b in received)
    marks = [a for a in received[-1]["moorage"]["anchors"] if a["kind"] == "client_breakpoint"]
    assert marks, "its cache marks became hints"
    said = {d["rule"] for r in records for d in r["decisions"] if d["stage"] == "messages"}
    assert said >= {"context_management"}


async def test_opencode_finishes_a_session(workspace: Path, tmp_path: Path) -> None:
    opencode = [binary("opencode"), "run", "-m", "local/m"]

    def prepare(url: str) -> None:
        model = {"name": "m", "reasoning": True, "tool_call": True, "limit": {"context": 200000, "output": 8192}}
        options = {"baseURL": f"{url}/v1", "apiKey": "x"}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": {"m": model}}
        config = {"provider": {"local": provider}, "model": "local/m", "autoupdate": False, "share": "disabled"}
        config["permission"] = {"edit": "allow", "bash": "allow", "webfetch": "allow"}
        (workspace / "opencode.json").write_text(json.dumps(config))

    first, later = [*opencode, "Read the files."], [*opencode, "-c", "Write the missing file."]
    model, records = await session(workspace, tmp_path, first, later, prepare, {})
    received = check(model, records, "/v1/chat/completions", meaning.of_chat)
    check_history(model, received)
