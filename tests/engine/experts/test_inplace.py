"""A pack that fits in memory is computed on where it is mapped: the answers of the checkpoint, every expert verified first."""

import pytest
import torch

from engine.build import Parts, build
from engine.config import EngineConfig
from engine.experts.filepool import Pack
from engine.experts.inplace import MappedExperts
from engine.experts.recording import Recording
from engine.models.load import load_model
from engine.nn.decoder import Decoder
from engine.packing import pack_model
from tests.engine.serve.harness import Engine, generate
from tests.support.steps import Driver
from tests.support.tiny import make_tiny

cpu = pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
Chained = pytest.importorskip("tests.native.test_chain").Chained
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


@pytest.fixture
def damaged(packed, tmp_path) -> Pack:
    """Expert 1 of layer 0 is not what was packed."""
    pack = tmp_path / "pack"
    pack.mkdir()
    for name in ("index.json", "experts.bin"):
        (pack / name).write_bytes((packed[1] / name).read_bytes())
    with (pack / "experts.bin").open("r+b") as file:
        file.seek(Pack(pack).index.kinds[0].record + 100)
        file.write(b"\xff\x7f")
    return Pack(pack)


def verified(pack: Pack) -> set[tuple[int, int]]:
    return {(layer, expert) for layer in range(pack.layers) for expert in range(pack.experts) if pack.verified(layer, expert)}


def test_a_damaged_expert_is_refused_and_a_sound_one_verified_once(damaged, monkeypatch) -> None:
    experts = MappedExperts(damaged, cpu.CpuOps(1))
    x, share = torch.ones(1, 64), torch.ones(1, 1)
    experts.run(0, x, torch.tensor([[2]], dtype=torch.int32), share)
    assert verified(damaged) == {(0, 2)}
    with pytest.raises(OSError, match="expert 1 of layer 0 is damaged"):
        experts.run(0, x, torch.tensor([[1]], dtype=torch.int32), share)
    monkeypatch.setattr(damaged, "check", None)
    experts.run(0, x, torch.tensor([[2]], dtype=torch.int32), share)


class OneByOne(cpu.CpuOps):
    joined = None


class Noting(MappedExperts):
    """Notes every expert it is asked for."""

    def __init__(self, pack: Pack, ops: cpu.CpuOps) -> None:
        super().__init__(pack, ops)
        self.asked: set[tuple[int, int]] = set()

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.asked |= {(layer, int(expert)) for expert in ids.unique()}
        return super().run(layer, x, ids, weights)


@pytest.mark.parametrize("whole", [False, True], ids=["half by half", "a step at once"])
def test_joined_layers_verify_who_is_chosen_and_have_the_bits_of_their_operations(packed, whole) -> None:
    model, directory = packed
    found = []
    for kind in (cpu.CpuOps, OneByOne):
        ops, pack = kind(2), Pack(directory)
        loaded, experts = load_model(model, ops, experts=False), Noting(pack, ops)
        decoder, seen = Decoder(loaded.spec, loaded.weights, ops, experts), []
        driver = Driver(Chained(decoder) if whole else decoder, torch.bfloat16)
        with torch.inference_mode():
            for token in PROMPTS[0]:  # a few at a time: not all experts are needed from the first step on
                logits = driver.step({0: [token]})[0]
                seen.append((logits, verified(pack)))
        found.append((seen, experts.asked))
        assert not whole or driver.decoder.arrays == (len(PROMPTS[0]) if kind is cpu.CpuOps else 0)
    (joined, unasked), (plain, asked) = found
    assert not unasked and plain[-1][1] == asked and len(joined[0][1]) < len(joined[-1][1])
    assert all(torch.equal(a, b) and ours == theirs for (a, ours), (b, theirs) in zip(joined, plain, strict=True))


@pytest.mark.parametrize("how", [lambda decoder: decoder, Chained], ids=["half by half", "a step at once"])
def test_nothing_is_computed_with_a_damaged_expert_in_a_joined_layer(packed, damaged, how) -> None:
    ops = cpu.CpuOps(1)
    loaded = load_model(packed[0], ops, experts=False)
    driver = Driver(how(Decoder(loaded.spec, loaded.weights, ops, MappedExperts(damaged, ops))), torch.bfloat16)
    with torch.inference_mode(), pytest.raises(OSError, match="expert 1 of layer 0 is damaged"):
        driver.step({0: PROMPTS[1]})
    assert (0, 1) not in verified(damaged) and not any(layer for layer, _ in verified(damaged))


def test_a_recording_is_told_what_is_chosen(packed) -> None:
    ops = cpu.CpuOps(1)
    loaded, experts = load_model(packed[0], ops, experts=False), MappedExperts(Pack(packed[1]), ops)
    recording = Recording(experts, experts._pack.layers, experts._pack.experts)
    driver = Driver(Decoder(loaded.spec, loaded.weights, ops, recording), torch.bfloat16)
    recording.start()
    with torch.inference_mode():
        driver.step({0: PROMPTS[0]})
    assert recording.progress()["tokens"] == len(PROMPTS[0])
