"""The same model however it is stored: dtype, shards, name prefixes, experts fused or one by one, text inside a larger model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.errors import ModelError
from engine.models.load import load_model
from tests.support.oracle import assert_close, driver, tokens, truth
from tests.support.tiny import make_tiny


def logits(directory: Path, kernels, prompt: list[int]) -> torch.Tensor:
    return driver(directory, kernels).chunks(0, prompt, [40, 1])


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision_weights_are_used_exactly(kind, dtype, tmp_path, kernels) -> None:
    model, prompt = make_tiny(kind, tmp_path, dtype), tokens(50)
    loaded = load_model(tmp_path, kernels.ops)
    assert set(loaded.info.types) == {str(dtype).removeprefix("torch.")}
    assert_close(logits(tmp_path, kernels, prompt), truth(model, tmp_path, kernels, prompt), kernels.tolerance)


def test_shards(tmp_path, kernels) -> None:
    model, prompt = make_tiny("qwen3_moe", tmp_path), tokens(50)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_close(logits(tmp_path / "sharded", kernels, prompt), truth(model, tmp_path, kernels, prompt), kernels.tolerance)


def rewrite(directory: Path, tensors: dict[str, torch.Tensor], **config: object) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_experts_stored_one_by_one_or_fused(tmp_path, kernels) -> None:
    model, prompt = make_tiny("qwen3_moe", tmp_path), tokens(50)
    held = load_file(tmp_path / "model.safetensors")
    single = [name for name in held if ".experts." in name]
    assert len(single) == 3 * 8 * 3  # transformers writes three tensors an expert
    fused = {name: t for name, t in held.items() if name not in single}
    for layer in range(3):
        base = f"model.layers.{layer}.mlp.experts"
        gate, up, down = ([held[f"{base}.{e}.{part}_proj.weight"] for e in range(8)] for part in ("gate", "up", "down"))
        fused[f"{base}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        fused[f"{base}.down_proj"] = torch.stack(down)
    before = logits(tmp_path, kernels, prompt)
    rewrite(tmp_path, fused)
    assert torch.equal(logits(tmp_path, kernels, prompt), before)
    assert_close(before, truth(model, tmp_path, kernels, prompt), kernels.tolerance)


def test_text_part_of_a_vision_model(tmp_path, kernels, caplog) -> None:
    model, prompt = make_tiny("qwen3_5_moe_text", tmp_path), tokens(50)
    held = load_file(tmp_path / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): t for name, t in held.items()}
    nested["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(4, 4)
    nested["mtp.layers.0.input_layernorm.weight"] = torch.zeros(48)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    rewrite(tmp_path, nested)
    assert_close(logits(tmp_path, kernels, prompt), truth(model, tmp_path, kernels, prompt), kernels.tolerance)
    assert load_model(tmp_path, kernels.ops).info.skipped == (
        "model.visual.blocks.0.attn.qkv.weight",
        "mtp.layers.0.input_layernorm.weight",
    )
    assert "left out 2 tensors" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_rotary_frequencies_of_every_layer_are_left_out(kind, tmp_path, kernels) -> None:
    """As Llama 2, Moonlight and Kimi-K2 carry them; what is like them and has no place is refused."""
    make_tiny(kind, tmp_path)
    held, before = load_file(tmp_path / "model.safetensors"), load_model(tmp_path, kernels.ops)
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(3)]
    rewrite(tmp_path, held | {name: torch.ones(4) for name in names})
    loaded = load_model(tmp_path, kernels.ops)
    assert loaded.info.skipped == tuple(names) and loaded.info.identity == before.info.identity
    rewrite(tmp_path, held | {"model.layers.1.self_attn.rotary_emb.scale": torch.ones(4)})
    with pytest.raises(ModelError, match="rotary_emb.scale' is not part of"):
        load_model(tmp_path, kernels.ops)


def test_eos_ids_come_from_both_configs(tmp_path, kernels) -> None:
    make_tiny("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load_model(tmp_path, kernels.ops).spec.eos_ids == (2, 7)


def test_older_rope_keys(tmp_path, kernels) -> None:
    """`rope_theta` and `rope_scaling` at the top, as checkpoints were written until 2025."""
    model, prompt = make_tiny("llama3_rope", tmp_path), tokens(70)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_close(logits(tmp_path, kernels, prompt), truth(model, tmp_path, kernels, prompt), kernels.tolerance)
