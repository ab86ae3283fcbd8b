"""`moorage logs`: from requests through a real gateway to the answer a user reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import zstandard
from typer.testing import CliRunner

from engine import cli as engine_cli
from engine import prefix
from gateway.config import NormaliseRule
from gateway.diagnostics.cli import logs
from gateway.diagnostics.compare import REMEDIES
from gateway.diagnostics.reader import Reader
from gateway.diagnostics.report import report
from gateway.diagnostics.why import ENGINE_REASONS, UPSTREAM_CAUSES, why
from tests.support.fake_upstream import FakeUpstream, Stream, content, finish, usage
from tests.support.gateway import Gateway, settings

SYSTEM = "You are an agent. The time is 10:15. " + "Follow the rules of this house. " * 200
TURNS = [("Fix the bug", 2000, 0), ("Now run the tests", 2040, 2000), ("And commit", 2080, 300), ("Thanks", 2100, 2080)]


async def conversation(tmp: Path) -> list[dict[str, Any]]:
    """Four turns; before the third the clock in the system prompt moves, and only what stands before it is reused."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    async with FakeUpstream() as up, Gateway(settings(up.base, kind="openai"), tmp) as gw:
        for i, (text, prompt, cached) in enumerate(TURNS):
            if i == 2:
                messages[0] = {"role": "system", "content": SYSTEM.replace("10:15", "10:52")}
            messages.append({"role": "user", "content": text})
            up.script(Stream([content("Done."), finish(), usage(prompt, 3, cached)]))
            body = {"model": "m", "stream": True, "messages": messages, "prompt_cache_key": "desk-1"}
            assert (await gw.post(body, user_agent="codex/1.0")).status == 200
            messages.append({"role": "assistant", "content": "Done."})
        return await gw.records(len(TURNS))


async def test_why_names_the_place_the_cause_and_the_remedy(tmp_path: Path) -> None:
    records = await conversation(tmp_path)
    run = CliRunner().invoke(logs, ["why", records[2]["id"], "-r", str(tmp_path / "records.jsonl")])
    assert run.exit_code == 0, run.output
    at = SYSTEM.index("15.")
    for said in (
        "prompt=2080 common=300",
        f"messages[0].content, character {at} (clock)",
        "10:15",
        "10:52",
        "normalise.clock",
    ):
        assert said in run.output
    fine = CliRunner().invoke(logs, ["why", "last", "-r", str(tmp_path / "records.jsonl")])
    assert "cause:   none" in fine.output and records[1]["id"] not in fine.output


async def test_report_counts_per_agent_and_turn_class(tmp_path: Path) -> None:
    await conversation(tmp_path)
    run = CliRunner().invoke(logs, ["report", str(tmp_path / "records.jsonl"), "--json"])
    rows = {(r["agent"], r["turn_class"]): r for r in json.loads(run.output)}
    user = rows["codex", "user"]
    assert (user["requests"], user["failed"], user["prompt_p50"]) == (3, 0, 2080)
    assert user["reuse"] == pytest.approx((2000 + 300 + 2080) / (2040 + 2080 + 2100))
    assert [(c["cause"], c["requests"]) for c in user["causes"]] == [("clock", 1)] and "content" in user["first_token_ms_p50"]
    table = CliRunner().invoke(logs, ["report", str(tmp_path / "records.jsonl")])
    assert "codex" in table.output and "clock in 1 requests" in table.output


def made(id: str, at: float, messages: list[dict[str, Any]], deployment: str = "a", **reuse: Any) -> dict[str, Any]:
    body = json.dumps({"messages": messages})
    return {
        "id": id,
        "time": at,
        "outcome": "ok",
        "session": {"id": "s", "agent": "x", "turn_class": "user"},
        "attempts": [{"deployment": deployment}],
        "sent": {"body": body, "encoding": "utf-8", "deployment": deployment},
        "reuse": reuse or None,
    }


HISTORY = [{"role": "user", "content": "word " * 2000}]
LONGER = [*HISTORY, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "next"}]


@pytest.mark.parametrize(
    ("later", "cause"),
    [
        (made("2", 9, LONGER, prompt=2100, common=2000, new=100), ""),
        (made("2", 9, LONGER, prompt=2100, common=0, new=2100), "expired"),
        (made("2", 9, LONGER, "b", prompt=2100, common=0, new=2100), "rerouted"),
        (made("2", 9, LONGER, prompt=2100, common=0, new=2100, lost=2000, reason="disk-cache-full"), "evicted"),
        (made("2", 9, LONGER, prompt=2100, common=0, new=2100, lost=2000, reason="no-checkpoint"), "no_checkpoint"),
        (made("2", 9, [{"role": "user", "content": "Other"}], prompt=9, common=0, new=9), "other_session"),
        (made("2", 9, LONGER), "unknown"),
    ],
)
def test_causes_behind_the_upstream(later: dict[str, Any], cause: str) -> None:
    first = made("1", 1, HISTORY, prompt=2000, common=0, new=2000)
    found = why(later, [first])
    assert found.cause == cause and bool(found.remedy) == bool(cause)
    assert why(first, []).cause == "first"


def test_a_side_request_between_two_turns_does_not_hide_the_conversation() -> None:
    side = made("s", 5, [{"role": "user", "content": "Write a title"}], prompt=10, common=0, new=10)
    later = made("2", 9, LONGER, prompt=2100, common=2000, new=100)
    rows = report([made("1", 1, HISTORY, prompt=2000, common=0, new=2000), side, later])
    assert "expired" not in rows["x", "user"].causes and why(later, [side, made("1", 1, HISTORY)]).basis == "1"


def test_reader_takes_rotated_compressed_and_torn_files_in_order(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    lines = [json.dumps({"id": str(i)}).encode() + b"\n" for i in range(6)]
    frames = zstandard.compress(lines[0]) + zstandard.compress(lines[1])
    (tmp_path / "r.jsonl.000001.zst").write_bytes(frames)
    (tmp_path / "r.jsonl.000002").write_bytes(lines[2] + b'{"id": "torn\n' + lines[3])
    path.write_bytes(lines[4] + b"[]\n\n" + lines[5] + b'{"id": "half')
    reader = Reader(path)
    assert [r["id"] for r in reader.records()] == list("012345") and reader.skipped == 3
    assert [r["id"] for r in reader.records(b'"3"')] == ["3"]


@pytest.mark.parametrize("arguments", [["why", "req_x"], ["why", "last"], ["report"]])
def test_missing_files_and_requests_are_one_line(tmp_path: Path, arguments: list[str]) -> None:
    place = [str(tmp_path / "none.jsonl")] if arguments == ["report"] else ["-r", str(tmp_path / "none.jsonl")]
    run = CliRunner().invoke(logs, [*arguments, *place])
    assert run.exit_code == 1 and len(run.output.strip().splitlines()) == 1 and "Traceback" not in run.output
    (tmp_path / "some.jsonl").write_text('{"id": "a"}\n')
    run = CliRunner().invoke(logs, ["why", "req_x", "-r", str(tmp_path / "some.jsonl")])
    assert run.exit_code == 1 and "no request req_x" in run.output


def test_remedies_name_settings_that_exist() -> None:
    known = {f.name for f in msgspec.structs.fields(NormaliseRule)}
    named = {name for text in REMEDIES.values() for name in re.findall(r"normalise\.(\w+)", text)}
    assert named and named <= known


def test_remedies_name_options_that_the_engine_has() -> None:
    named = {name for text in (UPSTREAM_CAUSES | REMEDIES).values() for name in re.findall(r"--[a-z][a-z-]+", text)}
    serve = typer.main.get_command(engine_cli.cli).commands["serve"]
    assert named and named <= {option for parameter in serve.params for option in parameter.opts}


def test_every_reason_of_our_engine_has_a_cause_here() -> None:
    source = "".join(p.read_text() for p in Path(prefix.__file__).parent.glob("*.py"))
    given = set(re.findall(r"""(?<!def )(?:_evict|drop|drop_with_children|flush)\([^()\n]*"([a-z-]+)\"""", source))
    given |= {"no-checkpoint", "not-computed"}
    assert {"ram-full", "disk-cache-full", "state-budget", "ttl"} <= given <= ENGINE_REASONS.keys()
    assert set(ENGINE_REASONS.values()) <= UPSTREAM_CAUSES.keys()


@pytest.mark.parametrize(
    "told",
    [{"reasoning_effort": "high"}, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}],
)
def test_thinking_switched_between_two_turns_is_a_cause(told: dict[str, Any]) -> None:
    first = made("1", 1, HISTORY, prompt=2000, common=0, new=2000)
    later = made("2", 9, LONGER, prompt=2100, common=0, new=2100)
    later["sent"]["body"] = json.dumps({"messages": LONGER} | told)
    found = why(later, [first])
    assert found.cause == "thinking_changed" and "pin_thinking" in found.remedy
