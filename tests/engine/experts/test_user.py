"""Mistakes of users at the commands about experts: one line with cause and remedy, and before anything takes long."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine import experts_cli, progress
from engine.cli import cli
from engine.config import EngineConfig, without_effect
from engine.experts.devices import Device
from engine.kernels.reference import ReferenceOps
from engine.memory import gib
from engine.models.errors import ModelError, unreadable
from engine.models.load import open_checkpoint
from engine.plan import FastMemory, make_plan
from engine.user import UserError
from tests.engine.experts.test_serve_device import Apart
from tests.support.tiny import make_tiny

REFERENCE = ("--kernels", "reference")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny("qwen3_moe", path, num_experts=64, max_position_embeddings=1024)
    return path


@pytest.fixture(scope="module")
def pack(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pack") / "experts"
    assert CliRunner().invoke(cli, ["pack", str(model), str(path), *REFERENCE]).exit_code == 0
    return path


def refused(*arguments: str) -> str:
    """What the user is told; nothing else may come out of the command."""
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert isinstance(done.exception, UserError), (done.output, done.exception)
    text = str(done.exception)
    assert text and "\n" not in text
    return text


@pytest.fixture
def closed(monkeypatch):
    """Closes a file to this user. Root may read all files: for root what the system says is made up."""

    def close(path: Path) -> None:
        def denying(real):
            def opened(name, *more, **options):
                if not isinstance(name, int) and Path(os.fspath(name)) == path:
                    raise PermissionError(13, "Permission denied", str(name))
                return real(name, *more, **options)

            return opened

        for module, name in ((io, "open"), (os, "open")):
            monkeypatch.setattr(module, name, denying(getattr(module, name)))
        access = os.access
        monkeypatch.setattr(os, "access", lambda name, mode: Path(name) != path and access(name, mode))

    return close


def test_a_model_that_may_not_be_read_is_not_said_to_be_damaged(model, closed) -> None:
    for name in ("config.json", "model.safetensors"):
        closed(model / name)
        # the reader of safetensors calls such a file one that is not there
        assert f"{name} may not be read by this user (permission denied): give it the right to" in str(
            unreadable(model / name, FileNotFoundError(2, "No such file or directory", name))
        )
    with pytest.raises(ModelError, match="config.json may not be read by this user"):
        open_checkpoint(model)


@pytest.mark.parametrize("name", ["index.json", "experts.bin"])
def test_a_pack_that_may_not_be_read_is_not_said_to_be_damaged(model, pack, closed, name: str) -> None:
    closed(pack / name)
    told = refused("plan", model, *REFERENCE, "--experts-pack", pack)
    assert name in told and "cannot be opened (Permission denied): is it there, and may this user read it?" in told


def test_a_pack_without_its_file_is_one_line(model, pack, tmp_path) -> None:
    (tmp_path / "index.json").write_bytes((pack / "index.json").read_bytes())
    assert "experts.bin cannot be opened (No such file" in refused("plan", model, *REFERENCE, "--experts-pack", tmp_path)
    assert "experts.bin cannot be opened (No such file" in refused("pack", model, tmp_path, *REFERENCE)


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_more_threads_than_can_be_is_one_line(model, command: str) -> None:
    pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    what = ("plan", model) if command == "plan" else ("bench", "bw")
    assert "--threads 100000: threads: must be in 1..1024; 0 takes one for each core" in refused(*what, "--threads", 100_000)


def test_a_wrong_choice_names_what_there_is(model) -> None:
    told = refused("serve", model, "--placement", "everywhere")
    assert told.endswith("there are resident, in_place, offload, hybrid, host, stream")
    assert refused("serve", model, "--expert-policy", "fifo").endswith("there are lru, rate, s3fifo")


def test_options_that_change_nothing_are_said_to() -> None:
    def said(**options: object) -> list[str]:
        return [line.split()[0] for line in without_effect(EngineConfig(model="m", **options))]

    assert said() == said(experts_pack="p", expert_bytes=1) == said(fast_bytes=1, fast_link=1, pin_bytes=1) == []
    assert said(expert_bytes=1) == ["--expert-memory"] and said(kernels="cuda", pin_bytes=1) == []
    assert said(fast_link=1, pin_bytes=1) == ["--fast-link", "--pin-memory"]
    assert said(kernels="cuda", fast_bytes=1, fast_link=1) == ["--fast-link"]


# --- will it fit?


@pytest.mark.parametrize("memory", [0, 1 << 20, 1500 << 10, 2500 << 10, 2900 << 10])
def test_what_is_said_to_be_missing_is_enough(model, tmp_path, memory: int) -> None:
    """However little there is: with that much more it fits."""
    checkpoint, none = open_checkpoint(model), tmp_path / "none.json"
    short = make_plan(checkpoint, ReferenceOps(), profile_path=none, available=memory)
    assert short.placement is None
    missing = max(short.load.cache, short.load.least_room) + short.weights - memory
    arguments = ["plan", str(model), *REFERENCE, "--memory", str(memory)]
    told = CliRunner().invoke(cli, arguments).output
    assert f"would fit with            {gib(missing)} more memory" in told
    assert make_plan(checkpoint, ReferenceOps(), profile_path=none, available=memory + missing).placement.mode == "in_place"


def test_the_plan_refuses_a_fast_memory_that_the_engine_would_refuse(model, tmp_path) -> None:
    checkpoint = open_checkpoint(model)
    for size, packed in ((1 << 30, None), (1 << 40, None)):
        plan = make_plan(checkpoint, ReferenceOps(), available=1 << 30, fast=FastMemory(size, 1e9), pack=packed)
        assert plan.placement is None and re.fullmatch(r"--fast-memory asks for .*, .* are available: lower it", plan.refusal)
    assert make_plan(checkpoint, ReferenceOps(), available=1 << 30, fast=FastMemory(1 << 20, 1e9)).placement


def test_slots_on_a_device_are_planned_without_a_link_to_emulate(model, monkeypatch) -> None:
    """`plan --kernels cuda --fast-memory` is what `serve` with the same options does; on one memory there are no slots."""
    monkeypatch.setattr("engine.plan.device_of", lambda ops: Apart(64 << 20))
    checkpoint, ops = open_checkpoint(model), ReferenceOps()
    plan = make_plan(checkpoint, ops, available=1 << 30, fast=FastMemory(1 << 20, 0.0))
    assert plan.placement.mode == "offload" and plan.placement.slots == (1 << 20) // plan.load.expert_bytes
    too_much = make_plan(checkpoint, ops, available=1 << 30, fast=FastMemory(64 << 20, 0.0))
    assert too_much.placement is None and "--fast-memory asks for" in too_much.refusal
    monkeypatch.setattr("engine.plan.find_devices", lambda: (Device("NVIDIA GB10", 0, True, 0.0),))
    assert make_plan(checkpoint, ops, available=1 << 30, fast=FastMemory(1 << 20, 0.0)).placement.mode == "in_place"


# --- what takes long is not lost for a file that cannot be written


def test_a_profile_that_cannot_be_kept_is_found_before_anything_is_measured(monkeypatch) -> None:
    monkeypatch.setattr("engine.experts.calibrate.measure_read", lambda ops: pytest.fail("measured"))
    assert "cannot be written" in refused("bench", "bw", *REFERENCE, "--profile", "/proc/x/bandwidth.json")


@pytest.mark.parametrize("out", ["/proc/routing.npz", "{here}"])
def test_a_trace_that_cannot_be_kept_is_found_before_anything_is_recorded(monkeypatch, tmp_path, out: str) -> None:
    monkeypatch.setattr(experts_cli, "call", lambda *_: pytest.fail("the engine was asked"))
    assert "cannot be written" in refused("experts", "trace", out.format(here=tmp_path))


def test_a_trace_says_how_far_it_is_and_leaves_nothing_when_it_fails(monkeypatch, tmp_path) -> None:
    asked = []

    def engine(method: str, url: str, body: dict) -> dict:
        asked.append(body["action"])
        if body["action"] == "progress":
            return {"recording": True, "full": False, "tokens": 7 * asked.count("progress")}
        return {"trace": "AAAA", "tokens": 21, "full": False} if body["action"] == "stop" else {"recording": True}

    monkeypatch.setattr(experts_cli, "call", engine)
    monkeypatch.setattr(experts_cli, "POLL_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    done = CliRunner().invoke(cli, ["experts", "trace", str(tmp_path / "r.npz"), "--tokens", "20"])
    assert done.exit_code == 0 and asked == ["start", *["progress"] * 3, "stop"]
    assert "14 of 20" in done.stderr and "20 of 20" in done.stderr and (tmp_path / "r.npz").read_bytes() == b"\0\0\0"
    monkeypatch.setattr(experts_cli, "call", lambda *_: (_ for _ in ()).throw(UserError("no engine answers")))
    assert "no engine answers" in refused("experts", "trace", tmp_path / "none.npz")
    assert not (tmp_path / "none.npz").exists()


@pytest.mark.parametrize("name", ["text", "saved by torch", "nothing", "folder"])
def test_what_is_no_trace_is_one_line_that_suggests_nothing_unsafe(tmp_path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif name == "text":
        path.write_text("12:00 I engine ready\n")
    elif name == "saved by torch":
        torch.save({"a": 1}, path)
    told = refused("experts", "sim", path)
    assert "record one with `moorage engine experts trace`" in told and "pickle" not in told and "unsafe" not in told


def test_an_engine_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match="no engine answers at .*start one with `serve`"):
        experts_cli.call("GET", "http://127.0.0.1:9/v1/memory/status")


@pytest.mark.parametrize("command", [("plan",), ("pack",), ("bench", "bw"), ("experts", "sim"), ("memory", "set")])
def test_help_shows_an_example(command: tuple[str, ...]) -> None:
    told = CliRunner().invoke(cli, [*command, "--help"]).output
    assert "Example: moorage" in told
