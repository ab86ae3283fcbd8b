"""A pack that fits in memory is computed on where it is mapped: the answers of the checkpoint, every expert verified first."""

import pytest
import torch

from engine.build import Parts, build
from engine.config import EngineConfig
from engine.experts.filepool import Pack
from engine.experts.inplace import MappedExperts
from engine.packing import pack_model
from tests.engine.serve.harness import Engine, generate
from tests.support.tiny import make_tiny

cpu = pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 60)), [11, 12]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    model, pack = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("pack") / "experts"
    make_tiny("qwen3_moe", model, torch.bfloat16, hidden_size=64)
    pack_model(model, pack, cpu.CpuOps(1), lambda done, total: None)
    return model, pack


def engine_of(model, **more: object) -> Parts:
    config = EngineConfig(model=str(model), kernels="cpu", threads=1, kv_bytes=1 << 23, max_context=256, max_running=4, **more)
    return build(config, lambda fraction, stage: None)


def answers(parts: Parts) -> list[list[int]]:
    engine = Engine(parts)
    engine.run(*(generate(f"r{i}", prompt, 12) for i, prompt in enumerate(PROMPTS)))
    return [engine.tokens(f"r{i}") for i in range(len(PROMPTS))]


def test_a_pack_that_fits_is_computed_on_where_it_lies(packed) -> None:
    model, pack = packed
    parts = engine_of(model, experts_pack=str(pack))
    assert parts.experts.placement["mode"] == "in_place" and parts.experts.slots is None
    assert parts.mapped >= (pack / "experts.bin").stat().st_size * 0.9  # but for the padding
    assert answers(parts) == answers(engine_of(model))


def test_slots_are_what_a_budget_for_experts_asks_for(packed) -> None:
    model, pack = packed
    parts = engine_of(model, experts_pack=str(pack), expert_bytes=64 << 20)
    assert parts.experts.placement["mode"] == "stream" and parts.experts.slots is not None
    parts.experts.slots.close()


def test_a_damaged_expert_is_refused_and_a_sound_one_verified_once(packed, tmp_path) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    for name in ("index.json", "experts.bin"):
        (pack / name).write_bytes((packed[1] / name).read_bytes())
    ops = cpu.CpuOps(1)
    with (pack / "experts.bin").open("r+b") as file:
        file.seek(Pack(pack).index.kinds[0].record + 100)  # expert 1 of layer 0
        file.write(b"\xff\x7f")
    experts = MappedExperts(Pack(pack), ops)
    x, share = torch.ones(1, 64), torch.ones(1, 1)
    experts.run(0, x, torch.tensor([[2]], dtype=torch.int32), share)
    left = experts._left[0]
    experts.run(0, x, torch.tensor([[2]], dtype=torch.int32), share)
    assert experts._left[0] == left
    with pytest.raises(OSError, match="expert 1 of layer 0 is damaged"):
        experts.run(0, x, torch.tensor([[1]], dtype=torch.int32), share)
