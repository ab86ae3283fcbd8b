"""From a checkpoint to a pack, and an engine that reads its experts from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine.build import BuildError, Parts, build
from engine.cli import cli
from engine.config import EngineConfig
from engine.elastic import Elastic
from engine.experts.executor import TieredExperts
from engine.experts.pack import read_index
from engine.experts_control import status
from engine.stores import stores_of
from engine.user import UserError
from tests.engine.serve.harness import Engine, generate
from tests.support.tiny import make_tiny
from tests.support.tiny_gguf import write_gguf

KERNELS = ["reference", "cpu"]
PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 60)), [11, 12], [90]]


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request) -> str:
    if request.param == "cpu":
        pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    return request.param


@pytest.fixture(scope="module", params=["qwen3_moe_mixed", "qwen3_5_moe_text"])
def packed(request, kernels, tmp_path_factory):
    """(checkpoint, its pack, kernels)"""
    model, pack = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("pack") / "experts"
    make_tiny(request.param, model, torch.bfloat16, hidden_size=64)
    done = CliRunner().invoke(cli, ["pack", str(model), str(pack), "--kernels", kernels])
    assert done.exit_code == 0, done.output
    assert "serve it with" in done.output and read_index(pack).complete
    return model, pack, kernels


def engine_of(model, kernels: str, **more: object) -> Parts:
    config = EngineConfig(model=str(model), kernels=kernels, threads=1, kv_bytes=1 << 23, max_context=256, max_running=4, **more)
    return build(config, lambda fraction, stage: None)


def answers(parts: Parts) -> list[list[int]]:
    engine = Engine(parts)
    engine.run(*(generate(f"r{i}", prompt, 12) for i, prompt in enumerate(PROMPTS)))
    return [engine.tokens(f"r{i}") for i in range(len(PROMPTS))]


@pytest.mark.parametrize("policy", ["lru", "rate"])
def test_answers_are_those_of_the_engine_that_holds_everything(packed, policy: str) -> None:
    model, pack, kernels = packed
    index = read_index(pack)
    one_layer = index.experts * index.kinds[0].bytes
    parts = engine_of(model, kernels, experts_pack=str(pack), expert_bytes=one_layer, expert_policy=policy)
    executor = parts.experts.recording.inner
    assert isinstance(executor, TieredExperts) and executor.slots.capacity == index.experts < index.layers * index.experts
    assert answers(parts) == answers(engine_of(model, kernels))
    seen = status(parts.experts)
    assert seen["mode"] == "stream" and seen["slots"]["policy"] == policy and seen["slots"]["fetched"] > index.experts
    assert json.dumps(seen)
    executor.close()


def test_a_pack_that_is_computed_on_where_it_lies_needs_no_torch(packed) -> None:
    model, pack, kernels = packed
    if kernels == "reference":
        pytest.skip("reference kernels are torch's")
    code = "import sys; from engine.build import build; from engine.config import EngineConfig; "
    code += (
        "build(EngineConfig(model=sys.argv[1], experts_pack=sys.argv[2], kernels='cpu', kv_bytes=64 << 20), lambda *_: None); "
    )
    code += "sys.exit('torch' in sys.modules)"
    built = subprocess.run([sys.executable, "-c", code, str(model), str(pack)], cwd=Path(__file__).parents[3])
    assert built.returncode == 0


def test_a_second_pack_finds_nothing_to_do(packed) -> None:
    model, pack, kernels = packed
    before = (pack / "experts.bin").stat().st_mtime_ns
    assert CliRunner().invoke(cli, ["pack", str(model), str(pack), "--kernels", kernels]).exit_code == 0
    assert (pack / "experts.bin").stat().st_mtime_ns == before


def test_too_little_memory_for_experts_is_refused_with_the_arithmetic(packed) -> None:
    model, pack, kernels = packed
    with pytest.raises(BuildError, match=r"one layer of 8 experts needs .* of memory, .* are for experts: raise --expert-memory"):
        engine_of(model, kernels, experts_pack=str(pack), expert_bytes=1000)
    with pytest.raises(BuildError, match="lower it"):
        engine_of(model, kernels, experts_pack=str(pack), expert_bytes=1 << 50)


def test_a_pack_of_another_model_is_refused(packed, tmp_path) -> None:
    _, pack, kernels = packed
    make_tiny("qwen3_moe", tmp_path, torch.bfloat16)
    with pytest.raises(BuildError, match="packed from another checkpoint"):
        engine_of(tmp_path, kernels, experts_pack=str(pack))
    with pytest.raises(BuildError, match="is no pack"):
        engine_of(tmp_path, kernels, experts_pack=str(tmp_path))


def test_a_pack_for_other_kernels_is_refused(packed) -> None:
    model, pack, kernels = packed
    if kernels == "cpu":
        with pytest.raises(BuildError, match="holds bf16 experts, which the reference kernels do not compute on"):
            engine_of(model, "reference", experts_pack=str(pack))


def test_a_model_without_experts_is_refused(tmp_path) -> None:
    make_tiny("llama", tmp_path)
    done = CliRunner().invoke(cli, ["pack", str(tmp_path), str(tmp_path / "p"), "--kernels", "reference"])
    assert isinstance(done.exception, UserError) and "no experts: there is nothing to pack" in str(done.exception)


def test_slots_change_while_answers_are_being_written(packed) -> None:
    """Shrunk and grown between steps of running requests: nobody is refused, no answer changes."""
    model, pack, kernels = packed
    index = read_index(pack)
    each = index.kinds[0].bytes
    parts = engine_of(model, kernels, experts_pack=str(pack), expert_bytes=2 * index.experts * each)
    executor, engine = parts.experts.slots, Engine(parts)
    elastic = Elastic(stores_of(parts, engine.scheduler))
    engine.submit(*(generate(f"r{i}", prompt, 12) for i, prompt in enumerate(PROMPTS)))
    sizes = [1, 3, 2, 1, 2]
    for turn in range(60):
        engine.step()
        elastic.set({"expert_bytes": sizes[turn % len(sizes)] * index.experts * each})
    engine.drain()
    assert [engine.tokens(f"r{i}") for i in range(len(PROMPTS))] == answers(engine_of(model, kernels))
    assert executor.counts["resized"] >= 40
    executor.close()


def test_a_file_of_mixed_types_is_packed_and_answers_as_ever(tmp_path) -> None:
    """As Q4_K_M files are: some layers' down matrices have more bits than the others."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 64}
    made = make_tiny("qwen3_moe", tmp_path / "made", torch.float32, **sizes)
    kinds = gguf.GGMLQuantizationType
    better = {f"blk.{layer}.ffn_down_exps": kinds.Q6_K for layer in (0, 3)}
    model, pack = tmp_path / "model.gguf", tmp_path / "pack"
    write_gguf(made, model, kinds.Q4_K, others=better)
    assert CliRunner().invoke(cli, ["pack", str(model), str(pack), "--kernels", "cpu"]).exit_code == 0
    index = read_index(pack)
    assert index.layout == (0, 1, 1, 0) and [kind.down.kind for kind in index.kinds] == ["Q6_K", "Q4_K"]
    least = sum(kind.bytes for kind in index.kinds) * index.experts
    parts = engine_of(model, "cpu", experts_pack=str(pack), expert_bytes=least)
    engine = Engine(parts)
    elastic = Elastic(stores_of(parts, engine.scheduler))
    engine.submit(*(generate(f"r{i}", prompt, 12) for i, prompt in enumerate(PROMPTS)))
    for turn in range(12):
        engine.step()
        elastic.set({"expert_bytes": least + turn % 3 * least // 2})
    engine.drain()
    assert [engine.tokens(f"r{i}") for i in range(len(PROMPTS))] == answers(engine_of(model, "cpu"))
    seen = status(parts.experts)
    assert seen["stored_as"] == "Q4_K, Q6_K" or seen["stored_as"] == "Q6_K, Q4_K"
    assert len(seen["slots"]["groups"]) == 2 and seen["slots"]["fetched"] > index.experts and json.dumps(seen)
    parts.experts.slots.close()
