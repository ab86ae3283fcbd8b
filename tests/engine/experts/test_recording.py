"""Recording the routing of a running decoder, and the command line's view of it."""

import base64
import io

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from engine.cache_control import BadCommand
from engine.experts.policies import POLICIES
from engine.experts.recording import Recording
from engine.experts.trace import synthesize
from engine.experts_cli import experts
from engine.experts_control import ExpertParts, record, status
from engine.kernels.reference import ReferenceOps
from engine.models.load import load_model
from engine.models.spec import MoeSpec
from engine.nn.decoder import Decoder
from engine.nn.experts import InPlace, expert_banks
from engine.user import UserError
from tests.support.steps import Driver
from tests.support.tiny import make_tiny


class Watching(ReferenceOps):
    """Reference kernels that remember what they routed."""

    def __init__(self) -> None:
        self.routed: list[torch.Tensor] = []

    def route(self, logits: torch.Tensor, spec: MoeSpec, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = super().route(logits, spec, bias)
        self.routed.append(ids)
        return ids, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    make_tiny("qwen3_moe_mixed", path)  # the middle layer has no experts
    return load_model(path, ReferenceOps())


def test_a_recording_is_what_the_router_chose_and_changes_nothing(model) -> None:
    ops = Watching()
    plain = Driver(Decoder(model.spec, model.weights, ReferenceOps()), torch.float32).chunks(0, [5, 6, 7, 8], [2, 1])
    recording = Recording(InPlace(expert_banks(model.spec, model.weights), ops), 2, 8)
    driver = Driver(Decoder(model.spec, model.weights, ops, recording), torch.float32)
    recording.start()
    assert torch.equal(driver.chunks(0, [5, 6, 7, 8], [2, 1]), plain)
    body = recording.stop()
    with np.load(io.BytesIO(base64.b64decode(body["trace"]))) as file:
        assert file["layer"].tolist() == [0, 1] * 3 and file["rows"].tolist() == [2, 2, 1, 1, 1, 1]
        assert np.array_equal(file["ids"], torch.cat(ops.routed).numpy())
    assert body["tokens"] == 4 and recording.progress() == {"recording": False}


def test_commands() -> None:
    parts = ExpertParts(Recording(InPlace([], ReferenceOps()), 1, 4), {"mode": "in_place"})
    assert status(parts) == {"mode": "in_place", "slots": None, "trace": {"recording": False}}
    assert record(parts, {"action": "stop"}) == {"recording": False}
    assert record(parts, {"action": "start"})["tokens"] == 0
    assert record(parts, {"action": "progress"})["recording"] is True
    for options in ({}, {"action": "pause"}, {"action": "start", "path": "/etc/passwd"}):
        with pytest.raises(BadCommand, match="action must be start"):
            record(parts, options)
    for call in (lambda: record(None, {"action": "start"}), lambda: status(None)):
        with pytest.raises(BadCommand, match="no experts"):
            call()


def test_sim_prints_every_policy_beside_the_bound_and_draws(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    file, png = tmp_path / "t.npz", tmp_path / "a.picture"  # a PNG whatever it is called
    file.write_bytes(synthesize(3, 16, 2, 60, zipf=1.0, stick=0.3).to_bytes())
    done = CliRunner().invoke(experts, ["sim", str(file), "--slots", "12", "--slots", "24", "--png", str(png)])
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in [*POLICIES, "belady", "12", "24"])
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sim", "nothing.npz"], "nothing.npz cannot be read"),
        (["sim", "FILE", "--policy", "magic"], "no eviction policy 'magic'"),
        (["sim", "FILE", "--png", "/nowhere/x.png"], "/nowhere/x.png"),
        (["trace", "/nowhere/x.npz"], "/nowhere is no directory"),
        (["trace", "FILE", "--url", "http://127.0.0.1:9"], "no engine answers at http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments: list[str], says: str) -> None:
    file = tmp_path / "t.npz"
    file.write_bytes(synthesize(1, 8, 2, 9, zipf=1.0, stick=0.3).to_bytes())
    done = CliRunner().invoke(experts, [str(file) if a == "FILE" else a for a in arguments])
    assert isinstance(done.exception, UserError) and says in str(done.exception) and "\n" not in str(done.exception)
