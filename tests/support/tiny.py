"""Tiny random checkpoints of real families, made by transformers: the same code paths as the big ones, in kilobytes."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

VOCAB = 160
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,  # large enough to show where it is added, and to keep a nearly zero DeltaNet output well conditioned
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DENSE = {**COMMON, "intermediate_size": 80, "num_hidden_layers": 3}
SPARSE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 16,
}
QWEN3_5 = {
    **SPARSE,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

LATENT = {
    **COMMON,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 40,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
GROUPS = {"n_group": 4, "topk_group": 2}

# kind -> (config class, arguments)
KINDS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", DENSE),
    "llama_tied_bias": ("LlamaConfig", {**DENSE, "tie_word_embeddings": True, "attention_bias": True}),
    "llama3_rope": ("LlamaConfig", {**DENSE, "rope_parameters": LLAMA3_ROPE}),
    "linear_rope": ("LlamaConfig", {**DENSE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn_rope": ("LlamaConfig", {**DENSE, "rope_parameters": YARN_ROPE}),
    "mistral": ("MistralConfig", {**DENSE, "sliding_window": 9}),
    "qwen2": ("Qwen2Config", {**DENSE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {**DENSE, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {**SPARSE, "norm_topk_prob": True, "intermediate_size": 80}),
    "qwen3_moe_mixed": ("Qwen3MoeConfig", {**SPARSE, "intermediate_size": 80, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**SPARSE, "intermediate_size": 80, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "mixtral": ("MixtralConfig", {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **SPARSE,
            "intermediate_size": 80,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None, "rope_parameters": {**YARN_ROPE, "mscale": 0.7}}),
    "deepseek_v2_groups": ("DeepseekV2Config", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**LATENT, **GROUPS, "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "qwen3_next": ("Qwen3NextConfig", {**QWEN3_5, "intermediate_size": 80, "mlp_only_layers": [2]}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", QWEN3_5),
}


def make_tiny(
    kind: str, directory: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object
) -> torch.nn.Module:
    """Save a random checkpoint of `kind` (with config `changes`); returns the transformers model that saved it, in float32.

    Norm weights and biases are drawn at random too: at their initial ones and zeros half of the mistakes would not show.
    """
    import transformers

    config_class, arguments = KINDS[kind]
    config = getattr(transformers, config_class)(**{**arguments, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
            parameter.copy_(parameter.to(dtype))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    copy.deepcopy(model).to(dtype).save_pretrained(directory)
    return model
