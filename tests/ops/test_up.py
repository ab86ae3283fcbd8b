"""ops/up.py with stand-ins for engine and gateway: the whole command, its errors, and that nothing stays behind."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import ROOT, fake_command, processes_naming


@dataclass
class Command:
    """Runs ops/up.py's main with fake parts in the given modes."""

    up: object
    folder: Path
    ports: tuple[int, int]
    monkeypatch: object

    def run(self, *options: str, engine: str = "ok", gateway: str = "ok", model: Path = ROOT / "pyproject.toml") -> int:
        up, service = self.up, self.up.service

        def plan(args, python, model, folder):
            parts = [
                service.Part("engine", fake_command(args.engine_port, engine, folder), args.engine_port),
                service.Part("gateway", fake_command(args.port, gateway, folder), args.port),
            ]
            return service.Service(parts=parts, cwd=str(ROOT), model=str(model))

        self.monkeypatch.setattr(up, "plan", plan)
        self.monkeypatch.setattr(up.env, "ensure", lambda purpose, say, log: Path(sys.executable))
        argv = ["up", "--model", str(model), "--engine-port", str(self.ports[0]), "--port", str(self.ports[1]), *options]
        self.monkeypatch.setattr(sys, "argv", argv)
        return up.main()


@pytest.fixture
def command(ops, folder, free_port, monkeypatch) -> Command:
    monkeypatch.setenv("MOORAGE_RUN", str(folder))
    return Command(ops("up"), folder, (free_port(), free_port()), monkeypatch)


def test_once_shows_progress_call_answer_and_reuse_then_stops(command, capfd) -> None:
    assert command.run("--once", engine="slow") == 0
    out = capfd.readouterr().out
    for text in (
        "weights",
        " % ",
        "thinking | I need to read it.",
        'tool call | read_file {"path": "config.toml"}',
        "answer | listen_port is 8471",
        "common=60 prompt=90 source=live",
    ):
        assert text in out, f"{text!r} not in:\n{out}"
    assert command.up.service.read_state(command.folder) is None
    assert not processes_naming(str(command.folder))


def test_stays_running_is_idempotent_and_stops(command, capfd) -> None:
    assert command.run() == 0
    first = command.up.service.read_state(command.folder)
    assert command.run("--once") == 0, "an already running service is used"
    assert command.up.service.read_state(command.folder)["pid"] == first["pid"], "and not stopped: this command did not start it"
    assert command.run("--status") == 0
    out = capfd.readouterr().out
    assert "already running" in out and "ready" in out and "--stop" in out
    assert command.run(model=ROOT / "README.md") == 2
    assert "already running with another model" in capfd.readouterr().err
    assert command.run("--stop") == 0
    assert "stopped" in capfd.readouterr().out
    assert command.run("--status") == 1
    assert command.run("--stop") == 0
    assert "nothing was running" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({"engine": "die"}, "engine ended with exit code 3: moorage: the weights are torn"),
        ({"gateway": "die"}, "gateway ended with exit code 3"),
        ({"gateway": "mute"}, "ended its turn without an answer"),
        ({"gateway": "refuse"}, "answered 400"),
        ({"gateway": "cut"}, "without [DONE]"),
    ],
)
def test_a_failed_start_is_one_line_and_leaves_nothing(command, capfd, modes, message: str) -> None:
    assert command.run(**modes) == 2
    err = capfd.readouterr().err.strip().splitlines()
    assert len(err) == 1 and message in err[0]
    assert not processes_naming(str(command.folder))


def test_port_in_use_is_said_before_anything_starts(command, capfd) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", command.ports[1]))
        other.listen()
        assert command.run() == 2
    assert f"port {command.ports[1]} is in use" in capfd.readouterr().err
    assert not (command.folder / "logs").exists()


def test_one_port_for_both_is_refused(command, capfd) -> None:
    command.ports = (command.ports[0], command.ports[0])
    assert command.run() == 2
    assert f"cannot both listen on port {command.ports[0]}" in capfd.readouterr().err
    assert not (command.folder / "logs").exists()


@pytest.mark.parametrize(("name", "message"), [("none", "does not exist"), ("", "holds no config.json")])
def test_wrong_model_path(command, capfd, tmp_path, name: str, message: str) -> None:
    assert command.run(model=tmp_path / name) == 2
    assert message in capfd.readouterr().err


def test_only_the_lines_of_requests_are_shown(ops, tmp_path) -> None:
    (tmp_path / "logs").mkdir()
    lines = [
        "old kv cache hit prompt=1",
        "I kv cache hit prompt=2 req=a-0",
        "I kv cache stored tokens=2",
        "I kv cache hit prompt=3 req=a-next-0",
    ]
    (tmp_path / "logs/engine.log").write_text("\n".join(lines))
    assert ops("up").engine_lines(tmp_path, offset=len(lines[0])) == ["kv cache hit prompt=2 req=a-0"]


def test_a_reader_that_goes_away_is_no_crash(folder) -> None:
    command = f"{sys.executable} {ROOT / 'ops/up.py'} --status | true; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "MOORAGE_RUN": str(folder)}
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert run.stdout.strip() == "1" and "Traceback" not in run.stderr


def test_gateway_config_is_the_gateways(ops, tmp_path) -> None:
    up = ops("up")
    args = type("Args", (), {"port": 8100, "engine_port": 8008})
    config = json.loads(up.gateway_config(args, "demo", tmp_path).read_text())
    assert config["model_list"][0]["litellm_params"] == {"model": "moorage/demo", "api_base": "http://127.0.0.1:8008"}
