"""Every way a model can fail to load ends in one line that says what is wrong and what to do."""

from __future__ import annotations

import errno
import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.kernels.reference import ReferenceOps
from engine.models import load
from engine.models.errors import ModelError
from engine.models.load import load_model, required_bytes
from tests.support.tiny import make_tiny
from tests.support.tiny_gguf import write_gguf


@pytest.fixture
def model(tmp_path) -> Path:
    make_tiny("qwen3_moe", tmp_path)
    return tmp_path


def refused(path: Path, *words: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path, ReferenceOps())
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message or str(path.parent) in message
    for word in words:
        assert word in message, message
    return message


def edit_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(model: Path, change) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def test_no_such_path(tmp_path) -> None:
    refused(tmp_path / "nowhere", "no such model")


def test_not_a_model(tmp_path) -> None:
    refused(tmp_path, "not a model", "config.json")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "not a model", ".gguf")


def test_config_without_weights(model) -> None:
    (model / "model.safetensors").unlink()
    refused(model, "no safetensors files", "download")


def test_pickled_weights_are_not_touched(model) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused(model, "pickled", "safetensors")


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_truncated_safetensors(model, keep) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    refused(model, "model.safetensors", "truncated or corrupt", "download")


def test_garbage_instead_of_safetensors(model) -> None:
    (model / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)
    refused(model, "truncated or corrupt")


def test_missing_shard(model) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00002-of-00002.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(model, "model-00002-of-00002.safetensors", "missing", "download")


def test_shards_without_index(model) -> None:
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "b.safetensors").write_bytes((model / "a.safetensors").read_bytes())
    refused(model, "model.safetensors.index.json")


def test_index_that_is_no_map(model) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    refused(model, "weight_map")


def test_unknown_architecture_lists_the_known(model) -> None:
    edit_config(model, model_type="gpt9")
    refused(model, "'gpt9'", "qwen3_moe", "llama")


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "num_experts_per_tok", "max_position_embeddings", "vocab_size"])
def test_missing_config_key(model, key) -> None:
    edit_config(model, **{key: None})
    refused(model, f"'{key}'", "config.json")


@pytest.mark.parametrize("value", ["48", 4.5, True, [1]])
def test_config_value_of_the_wrong_kind(model, value) -> None:
    edit_config(model, hidden_size=value)
    refused(model, "'hidden_size'")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_broken_config(model, text) -> None:
    (model / "config.json").write_text(text, encoding="latin-1")
    refused(model, "config.json")


def test_config_that_does_not_match_names_tensor_and_both_shapes(model) -> None:
    edit_config(model, hidden_size=64)
    refused(model, "model.embed_tokens.weight", "[160, 48]", "[160, 64]")


def test_more_layers_than_the_config_knows(model) -> None:
    edit_config(model, num_hidden_layers=2, mlp_only_layers=[])
    refused(model, "model.layers.2.", "different checkpoints")


def test_fewer_experts_than_the_config_promises(model) -> None:
    edit_config(model, num_experts=9, num_local_experts=9)
    refused(model, "config")


def test_missing_tensor(model) -> None:
    edit_tensors(model, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    refused(model, "1.attn.k", "incomplete")


def test_missing_expert(model) -> None:
    edit_tensors(model, lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    refused(model, "1.moe.gate_up", "15 tensors", "16")


def test_unknown_tensor(model) -> None:
    edit_tensors(model, lambda t: t.update({"model.layers.0.self_attn.k_proj.weight_scale_inv": torch.ones(1)}))
    refused(model, "weight_scale_inv", "not part of a qwen3_moe model")


def test_unsupported_storage_type(model) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(model, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    refused(model, name, "F8_E4M3", "BF16")


def test_parts_of_different_types(model) -> None:
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    edit_tensors(model, lambda t: t.update({name: t[name].half()}))
    refused(model, "0.moe.gate_up", "float16", "float32")


def test_quantized_checkpoint(model) -> None:
    edit_config(model, quantization_config={"quant_method": "gptq"})
    refused(model, "'gptq'", "supported: fp8", "GGUF")


@pytest.mark.parametrize("change", [{"hidden_act": "relu9"}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}])
def test_unsupported_parts_of_a_known_family(model, change) -> None:
    edit_config(model, **change)
    refused(model, "not supported; supported:")


def test_too_little_memory_says_both_numbers(model, monkeypatch) -> None:
    need = required_bytes(model, ReferenceOps())
    assert need == sum(t.numel() * 4 for t in load_file(model / "model.safetensors").values())
    monkeypatch.setattr(load, "available_bytes", lambda: need + load.WORKSPACE - 1)
    refused(model, "GiB", "available")
    monkeypatch.setattr(load, "available_bytes", lambda: need + load.WORKSPACE)
    load_model(model, ReferenceOps())


# --- GGUF


@pytest.fixture
def file(tmp_path) -> Path:
    write_gguf(make_tiny("qwen3", tmp_path / "hf"), tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def test_directory_with_one_gguf_is_that_file(file, tmp_path) -> None:
    (tmp_path / "only").mkdir()
    file.rename(tmp_path / "only" / "x.gguf")
    assert load_model(tmp_path / "only", ReferenceOps()).info.format == "gguf"
    (tmp_path / "only" / "y.gguf").write_bytes(b"")
    refused(tmp_path / "only", "2 .gguf files", "x.gguf, y.gguf")


@pytest.mark.parametrize("keep", [0, 3, 20, 300, 0.5, -1])
def test_truncated_gguf(file, keep) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    refused(file, "truncated or corrupt", "download")


def test_something_else_called_gguf(file) -> None:
    file.write_bytes(b"GGML" + bytes(1000))
    refused(file, "truncated or corrupt")


def test_gguf_of_an_unknown_architecture(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "rwkv9")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "x.gguf", "'rwkv9'", "qwen3moe")


def test_gguf_block_type_that_cannot_be_read(tmp_path, monkeypatch) -> None:
    model = make_tiny("qwen3", tmp_path / "hf", hidden_size=64, intermediate_size=64)
    write_gguf(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.delitem(gguf.quants._type_traits, gguf.GGMLQuantizationType.Q8_0)
    refused(tmp_path / "model.gguf", "token_embd.weight", "Q8_0", "not supported", "another quantization")


ODD = (None, -1, 0, 3, 10**9, 0.5, float("nan"), "x", True, [], [1, "y"], {"a": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "qwen3_next", "qwen2_moe", "mixtral", "mistral", "yarn_rope", "deepseek_v3", "deepseek_v2"]
)
def test_no_config_value_ends_in_a_traceback(kind, tmp_path) -> None:
    """Whatever a key holds, the model loads (the key does not matter, or the value is possible) or is refused in one line."""
    make_tiny(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    refusals = 0
    places = [(config, key) for key in config] + [(config["rope_parameters"], key) for key in config["rope_parameters"]]
    for holder, key in places:
        before = holder[key]
        for value in ODD:
            holder[key] = value
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                load_model(tmp_path, ReferenceOps())
            except ModelError as error:
                refusals += 1
                assert "\n" not in str(error)
            except Exception as error:
                raise AssertionError(f"{key}={value!r}: {type(error).__name__}: {error}") from error
        holder[key] = before
    assert refusals > 100


def rewritten(reader: gguf.GGUFReader, target: Path, key: str, value: object) -> None:
    """A copy of a GGUF file with one metadata key changed (None: left out). The types are those Python values suggest."""
    kinds = gguf.GGUFValueType
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or (name == key and value is None):
            continue
        if name != key:
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            kind = {bool: kinds.BOOL, int: kinds.INT64, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
            writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text", "deepseek_v3"])
def test_no_gguf_metadata_ends_in_a_traceback(kind, tmp_path) -> None:
    """As for config.json: the model loads, or is refused in one line."""
    write_gguf(make_tiny(kind, tmp_path / "hf"), tmp_path / "good.gguf")
    good = gguf.GGUFReader(tmp_path / "good.gguf")
    keys = [k for k in good.fields if not k.startswith(("GGUF.", "general."))]
    refusals = 0
    for key in [*keys, "general.architecture"]:
        for value in (None, -1, 0, float("nan"), "x", [1], ["y"]):
            if key == "general.architecture" and value is not None:
                continue
            rewritten(good, tmp_path / "odd.gguf", key, value)
            try:
                load._check_complete(load.open_checkpoint(tmp_path / "odd.gguf"), "odd.gguf")
            except ModelError as error:
                refusals += 1
                assert "\n" not in str(error)
            except Exception as error:
                raise AssertionError(f"{key}={value!r}: {type(error).__name__}: {error}") from error
    assert refusals > 30


@pytest.mark.parametrize("reader", ["engine.models.gguf", "engine.models.safetensors"])
def test_a_file_that_cannot_be_mapped_is_not_called_corrupt(reader) -> None:
    said = str(importlib.import_module(reader).unreadable(Path("model"), OSError(errno.ENOMEM, "Cannot allocate memory")))
    assert "ulimit -v" in said and "corrupt" not in said


def test_a_command_without_the_memory_it_needs_says_so_in_one_line(tmp_path) -> None:
    """300 MB of address space hold Python and typer, never torch."""
    (tmp_path / "model.gguf").write_bytes(b"")
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))  # noqa: E731
    command = [sys.executable, "-m", "engine.cli", "plan", str(tmp_path / "model.gguf"), "--kernels", "reference"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("moorage: ") and "ulimit -v" in done.stderr
    assert done.stderr.count("\n") == 1
