"""What a machine allows, as the bench beside other engines tells it: bytes and products of a token, and who is how far below."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest


@pytest.fixture
def model(tmp_path):
    """Eight experts of which two are chosen, one layer of attention; 4 bytes a weight."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    shapes = {
        "token_embd.weight": (100, 64),
        "output.weight": (100, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_up_exps.weight": (8, 32, 64),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_a_token_needs(load, model) -> None:
    needs = load("roof").Needs.of(model)
    assert needs.dense == 4 * (100 * 64 + 32 * 64 + 64), "a table of which a token is one row is not read"
    assert needs.expert == 4 * 32 * 64
    assert needs.weights == 32 * 64 + 2 * 32 * 64, "two of eight experts; the head only meets a prompt's last token"
    assert needs.step(1, 0) == needs.dense + 2 * needs.expert
    assert needs.step(1, 10) - needs.step(1, 0) == 10 * 2 * (16 + 16) * 2
    assert needs.step(4, 0) == pytest.approx(needs.dense + 8 * (1 - 0.75**4) * needs.expert)


class Made:
    """Rates that are told, and how often they were measured."""

    name = "roof"

    def __init__(self) -> None:
        self.told: list[str] = []

    def knows(self, kind: str) -> bool:
        return kind == "decode"

    def forget(self) -> None:
        self.told.append("forget")

    def measure(self) -> None:
        self.told.append("measure")

    def rate(self, kind: str, size: int, rows: int) -> float:
        return 40.0


class Server:
    def __init__(self, http, name: str, rate: float) -> None:
        self.http, self.name, self.rate = http, name, rate

    def cpu_seconds(self) -> float:
        return 0.0

    def stream(self, prompt, count, place=-1):
        return self.http.Reply(1.0, 1.0 + (count - 1) / self.rate, count, 20)


def test_who_is_how_far_below_what_the_machine_allows(load, monkeypatch) -> None:
    resident = load("engine_resident")
    monkeypatch.setattr(resident.machine.Share, "foreign", lambda share, own: 0.0)
    http, roof = sys.modules["engine_http"], Made()
    bench = resident.Bench([Server(http, "moorage", 20.0), Server(http, "llama.cpp", 10.0)], [0, 64, 128], 11, roof)
    for kind, size in [("extend", 128), ("decode", 64)]:
        bench.measure(resident.Cell(kind, size), 0)
    assert roof.told == ["forget", "measure", "measure", "measure"], "before, between and behind, and only where it knows"
    extend, decode = resident.summarise(bench.samples)
    assert (decode["ratio to roof"], decode["ratio to llama.cpp"], decode["roof to llama.cpp"]) == (0.5, 2.0, 4.0)
    assert "roof to llama.cpp" not in extend
    assert resident.table([extend, decode]).splitlines()[-1].endswith(" 4.0 |")
