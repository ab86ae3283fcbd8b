"""Tiny GGUF files made from tiny checkpoints, with the reorderings llama.cpp's converter applies.

Tensor names come from the `gguf` package's own map, not from ours.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}


def write_gguf(
    model: torch.nn.Module,
    path: Path,
    kind: Type = Type.F32,
    arrays: dict[str, list] | None = None,
    others: dict[str, Type] | None = None,
    whole_kv: bool = False,
) -> None:
    """Save a transformers model as GGUF, matrices as `kind`; the model's weights then become what the file holds.

    `others`: tensors of another kind, by their name in the file without `.weight`. `whole_kv`: latent attention as
    converters wrote it before they split `attn_kv_b`.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _metadata(writer, config, whole_kv)
    for name, values in (arrays or {}).items():
        writer.add_array(f"tokenizer.ggml.{name}", values)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            for ours, part, view in _convert(name, tensor, config, whole_kv):
                target = names.get_name(ours, try_suffixes=(".weight", ".bias"))
                assert target, f"gguf knows no name for {ours}"
                array = np.ascontiguousarray(part.float().numpy())
                stored = kind if array.ndim > 1 and "conv1d" not in target and "gate_inp" not in target else Type.F32
                stored = (others or {}).get(target.removesuffix(".weight"), stored)
                data = encode(array, stored)
                writer.add_tensor(target, data, raw_dtype=stored)
                held = gguf.quants.dequantize(data, stored).reshape(array.shape)
                view(torch.from_numpy(held.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(array: np.ndarray, kind: Type) -> np.ndarray:
    """Quantize, or for block types the package can only read: random blocks with scales of a usable size."""
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        return random_blocks(array.shape, kind)


def random_blocks(shape: tuple[int, ...], kind: Type, seed: int = 0) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
    scales = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    at = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}.get(kind, (0,))
    for start in at:
        blocks[:, start : start + 2] = scales
    return blocks.reshape(*shape[:-1], -1)


def _metadata(writer: gguf.GGUFWriter, config, whole_kv: bool) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    latent = getattr(config, "kv_lora_rank", None)
    if latent and whole_kv:
        writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_key_length(latent + head if latent else head)
        writer.add_value_length(latent or head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 1)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if config.model_type != "mixtral":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if getattr(config, "kv_lora_rank", None):
        _latent_metadata(writer, config, rope, whole_kv)
    if getattr(config, "linear_num_key_heads", None):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)


def _latent_metadata(writer: gguf.GGUFWriter, config, rope: dict, whole_kv: bool) -> None:
    if not whole_kv:
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.n_group:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _convert(name: str, tensor: torch.Tensor, config, whole_kv: bool):
    """(name for the map, values to store, how to write what was stored back into the model) of one state-dict entry."""
    if "experts.gate_up_proj" in name:
        half = tensor.shape[1] // 2
        base = name.removesuffix("gate_up_proj")
        return [
            (f"{base}gate_proj.weight", tensor[:, :half], tensor[:, :half].copy_),
            (f"{base}up_proj.weight", tensor[:, half:], tensor[:, half:].copy_),
        ]
    if name.endswith("kv_b_proj.weight") and not whole_kv:
        heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)  # [Hq, Dn + Dv, R]
        k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        base = name.removesuffix("kv_b_proj.weight")
        return [(f"{base}k_b_proj.weight", k.transpose(1, 2), k.transpose(1, 2).copy_), (f"{base}v_b_proj.weight", v, v.copy_)]
    if name.endswith(".A_log"):
        order = _tiled(name, tensor, config)
        return [(name, -tensor[order].exp(), lambda held: tensor.__setitem__(order, held.neg().log()))]
    if config.model_type in ("llama", "mixtral") and name.endswith(
        ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
    ):
        heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
        dim = len(tensor) // heads
        order = torch.arange(len(tensor)).view(heads, 2, dim // 2).transpose(1, 2).reshape(-1)
        return [(name, tensor[order], lambda held: tensor.__setitem__(order, held))]
    if ".linear_attn." in name:
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if name.endswith("out_proj.weight"):
            order = _tiled(name, tensor.T, config)
            return [(name, tensor[:, order], lambda held: tensor.__setitem__((slice(None), order), held))]
        if not name.endswith("norm.weight"):
            order, flat = _tiled(name, tensor, config), tensor.squeeze()
            return [(name, flat[order], lambda held: flat.__setitem__(order, held))]
    elif config.model_type.startswith(("qwen3_5", "qwen3_next")) and name.endswith("norm.weight"):
        return [(name, tensor + 1, lambda held: tensor.copy_(held - 1))]
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if name.endswith("experts.down_proj"):
        name += ".weight"
    return [(name, tensor, tensor.copy_)]


def _tiled(name: str, tensor: torch.Tensor, config) -> torch.Tensor:
    """Row order of value heads as (repeat, key head) instead of (key head, repeat)."""
    if config.model_type == "qwen3_next":
        return torch.arange(len(tensor))
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    skip = 2 * keys * config.linear_key_head_dim if "in_proj_qkv" in name or "conv1d" in name else 0
    dim = (len(tensor) - skip) // values
    order = torch.arange(len(tensor) - skip).view(keys, values // keys, dim).transpose(0, 1).reshape(-1)
    return torch.cat([torch.arange(skip), order + skip])
