"""Restarts and disk faults over HTTP: a turn comes from disk, or is prefilled with a log line; the answer never changes."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.prefix import store
from engine.protocol import parse_log_line
from tests.engine.prefix.fakes import failing
from tests.engine.prefix.server import Server, serving
from tests.engine.prefix.talk import CLIENTS, ROUND, SLACK, Client, Message, ask, conversation, opening, rounds, switch

pytestmark = pytest.mark.slow


async def stored(server: Server) -> None:
    while server.prefix.tick():
        server.prefix.disk.collect(wait_s=10)


async def answer(server: Server, messages: list[Message]) -> tuple[str, dict]:
    """What the model itself says next (16 greedy tokens), and `usage.moorage`."""
    reply = await server.chat(messages, max_tokens=16, **switch(False))
    message = reply["choices"][0]["message"]
    return json.dumps([message["content"], message.get("tool_calls")]), reply["usage"]["moorage"]


# How a client spells the turn is a matter of its prompt, how the engine ended one of the disk: two spellings for each ending.
@pytest.mark.parametrize(
    ("clean", "client"),
    [pytest.param(n % 2 == 0, client, id=f"{client.__name__}-{('sigterm', 'kill')[n % 2]}") for n, client in enumerate(CLIENTS)],
)
async def test_each_turn_after_a_restart_comes_from_disk(model: Path, tmp_path: Path, clean: bool, client: Client) -> None:
    disk = {"kv_disk": str(tmp_path / "kv")}
    async with serving(model, clean=clean, **disk) as server:
        messages = await conversation(server, 4, client=client, thinking=True)
    for turn in range(4, 6):
        async with serving(model, clean=clean, **disk) as server:
            (usage,) = await rounds(server, messages, 1, client, thinking=True, first=turn)
            assert usage["source"] == "disk" and usage["lost"] <= SLACK and usage["new"] <= ROUND + SLACK, usage
            assert usage["restore_ms"] > 0


async def test_the_same_prompt_again_comes_from_disk(model: Path, tmp_path: Path) -> None:
    """Sent again (a second try, the same agent started anew) once memory has forgotten it, and after a restart."""
    disk = {"kv_disk": str(tmp_path / "kv"), "clean": False}
    messages = opening("Sum these up: " + " ".join(f"number{n}" for n in range(150)))
    prompt = [(7 * i * i + 3 * i) % 690 for i in range(500)]

    async def send(server: Server) -> list[dict]:
        found = [await ask(server, messages), (await server.complete(prompt, "t", max_tokens=4))["usage"]["moorage"]]
        await stored(server)
        return found

    async with serving(model, **disk) as server:
        assert [u["source"] for u in await send(server)] == ["none", "none"]
        await server.engine.control("cache.rebuild", options={"flush": "ram"})
        flushed = await send(server)
    async with serving(model, **disk) as server:
        restarted = await send(server)
    for usage in (*flushed, *restarted):
        assert usage["source"] == "disk" and usage["lost"] <= SLACK and usage["new"] <= SLACK, (flushed, restarted)


# --- faults


def files(root: Path) -> list[Path]:
    return sorted(p for pattern in ("*.kv", "*.state") for p in root.rglob(pattern))


def torn(root: Path) -> None:
    for path in files(root):
        os.truncate(path, path.stat().st_size // 2)


def flipped(root: Path) -> None:
    for path in files(root):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 4
        path.write_bytes(raw)


def journal_torn(root: Path) -> None:
    (journal,) = root.rglob("journal")
    os.truncate(journal, journal.stat().st_size // 3)


def journal_flipped(root: Path) -> None:
    (journal,) = root.rglob("journal")
    raw = bytearray(journal.read_bytes())
    raw[len(raw) // 2] ^= 4
    journal.write_bytes(raw)


DAMAGES = {
    "torn files": (torn, "disk damaged"),
    "flipped bits": (flipped, "disk damaged"),
    "torn journal": (journal_torn, ""),  # its last entry may be half written after a crash: nothing to report
    "flipped journal": (journal_flipped, "journal damaged"),
    "files gone": (lambda root: [p.unlink() for p in files(root)], "disk damaged"),
}


INDEX_DAMAGES = {
    "none": lambda index: None,
    "torn": lambda index: os.truncate(index, index.stat().st_size // 2),
    "flipped": lambda index: index.write_bytes(bytes(b ^ 4 if n == 40 else b for n, b in enumerate(index.read_bytes()))),
    "gone": lambda index: index.unlink(),
}


@pytest.mark.parametrize("name", sorted(INDEX_DAMAGES))
async def test_a_damaged_index_costs_nothing(
    model: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is in the journal too."""
    monkeypatch.setattr(store, "INDEX_EVERY", 1)
    disk = {"kv_disk": str(tmp_path / "kv")}
    async with serving(model, **disk) as server:
        messages = await conversation(server, 2)
    (index,) = (tmp_path / "kv").rglob("index")
    INDEX_DAMAGES[name](index)
    caplog.set_level(logging.INFO)
    async with serving(model, **disk) as server:
        (usage,) = await rounds(server, messages, 1, first=2)
        assert usage["source"] == "disk" and usage["lost"] <= SLACK and usage["new"] <= ROUND + SLACK, usage
    assert "journal damaged" not in caplog.text and "disk damaged" not in caplog.text


@pytest.mark.parametrize("name", sorted(DAMAGES))
async def test_damage_costs_a_prefill_a_log_line_and_no_wrong_token(
    model: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    damage, event = DAMAGES[name]
    disk = {"kv_disk": str(tmp_path / "kv")}
    async with serving(model, **disk) as server:
        messages = await conversation(server, 2)
        await stored(server)
        await server.engine.control("cache.rebuild", options={"flush": "ram"})
        true, _ = await answer(server, messages)
    damage(tmp_path / "kv")
    async with serving(model, **disk) as server:
        said, usage = await answer(server, messages)
        assert said == true and usage["common"] < usage["prompt"] - SLACK, usage
        (again,) = await rounds(server, messages, 1, first=2)  # what was prefilled is known again
        assert again["new"] <= ROUND + SLACK, again
    events = {parsed[0] for r in caplog.records if (parsed := parse_log_line(r.getMessage()))}
    assert not event or f"kv cache {event}" in events, events


@pytest.mark.parametrize("code,call", [(errno.ENOSPC, "write"), (errno.EROFS, "open")], ids=["full", "read-only"])
async def test_a_full_or_read_only_disk_serves_on(
    model: Path, tmp_path: Path, code: int, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk = {"kv_disk": str(tmp_path / "kv")}
    async with serving(model, **disk) as server:
        messages = await conversation(server, 2)
        await stored(server)
        with monkeypatch.context() as patch:
            failing(patch, code, call)
            seen = await rounds(server, messages, 3, first=2)
            await stored(server)
        assert all(u["lost"] <= SLACK and u["new"] <= ROUND + SLACK for u in seen), seen  # from memory
        await server.engine.control("cache.rebuild", options={"flush": "ram"})
        usage = await ask(server, messages)
        assert usage["source"] == "disk" and usage["lost"] > 0, usage  # up to where the disk took it
    errors = [f for e, f in filter(None, (parse_log_line(r.getMessage()) for r in caplog.records)) if e == "kv cache disk error"]
    assert errors and errors[0]["error"] == os.strerror(code) and "hint" in errors[0]


async def test_a_directory_that_cannot_be_made_serves_without(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    async with serving(model, kv_disk=str(tmp_path / "file" / "kv")) as server:
        messages = await conversation(server, 2)
        assert (await ask(server, messages))["lost"] <= SLACK
        assert (await server.http.get("/v1/cache/status")).json()["disk"] is None


async def test_the_directory_deleted_under_the_server(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = {"kv_disk": str(tmp_path / "kv")}
    async with serving(model, **disk) as server:
        messages = await conversation(server, 2)
        await stored(server)
        true, _ = await answer(server, messages)
        await stored(server)
        shutil.rmtree(tmp_path / "kv")
        await server.engine.control("cache.rebuild", options={"flush": "ram"})
        said, usage = await answer(server, messages)
        assert said == true and usage["common"] == 0 and "file is gone" in caplog.text
        await rounds(server, messages, 1, first=2)
    async with serving(model, **disk) as server:  # and what came later is there
        (usage,) = await rounds(server, messages, 1, first=3)
        assert usage["source"] == "disk" and usage["new"] <= ROUND + SLACK, usage


async def test_the_clock_set_back(model: Path, tmp_path: Path) -> None:
    disk = {"kv_disk": str(tmp_path / "kv"), "kv_disk_ttl_s": 3600}
    real, days = time.time, 86400
    messages: list[Message] = []
    for turn, shift in enumerate((0, -900 * days, -900 * days)):
        async with serving(model, wall=lambda shift=shift: real() + shift, **disk) as server:
            messages = messages or await conversation(server, 2)
            (usage,) = await rounds(server, messages, 1, first=2 + turn)
            assert usage["lost"] <= SLACK and usage["new"] <= ROUND + SLACK, (shift, usage)
            assert usage["source"] == ("disk" if turn else "ram")
            await stored(server)
            assert server.prefix.disk.counters["evicted"] == 0


def other_weights(copy: Path) -> None:
    (path,) = copy.glob("*.safetensors")
    tensors = load_file(path)
    name = next(n for n, t in tensors.items() if t.dim() > 1)
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, path, {"format": "pt"})


def other_template(copy: Path) -> None:
    path = copy / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["chat_template"] += "{# another #}"
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("change", [other_weights, other_template])
async def test_other_weights_and_another_template_find_nothing(
    model: Path, tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk = {"kv_disk": str(tmp_path / "kv")}
    copy = Path(shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copy2))
    async with serving(copy, **disk) as server:
        messages = await conversation(server, 2)
    kept = Path(shutil.copytree(copy, tmp_path / "kept", copy_function=shutil.copy2))
    change(copy)
    async with serving(copy, **disk) as server:
        said, usage = await answer(server, messages)
        assert usage["source"] == "none"
        opened = [
            f for e, f in filter(None, (parse_log_line(r.getMessage()) for r in caplog.records)) if e == "kv cache disk opened"
        ]
        assert [(f["records"], f["others"], "hint" in f) for f in opened] == [("0", "0", False), ("0", "1", True)]
        await server.engine.control("cache.rebuild", options={"flush": "all"})
        assert (await answer(server, messages))[0] == said
    async with serving(kept, **disk) as server:  # the first model's are still its own
        assert (await ask(server, messages))["source"] == "disk"
