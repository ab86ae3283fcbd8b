"""Qwen3.5-MoE and Qwen3.6-MoE text decoders: three Gated DeltaNet layers to one gated full-attention layer, all sparse."""

from __future__ import annotations

from engine.models.config import Config
from engine.models.families.common import (
    ATTENTION,
    MOE,
    SHARED_EXPERT,
    SKELETON,
    activation,
    attention,
    experts,
    feed_forwards,
    layer_count,
    layer_kinds,
)
from engine.models.spec import DeltaNetSpec, LayerSpec, ModelSpec, MoeSpec

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
DELTA = {
    "layers.{L}.linear_attn.in_proj_qkv.weight": "delta.qkv",
    "layers.{L}.linear_attn.in_proj_z.weight": "delta.z",
    "layers.{L}.linear_attn.in_proj_b.weight": "delta.b",
    "layers.{L}.linear_attn.in_proj_a.weight": "delta.a",
    "layers.{L}.linear_attn.conv1d.weight": "delta.conv",
    "layers.{L}.linear_attn.dt_bias": "delta.dt_bias",
    "layers.{L}.linear_attn.A_log": "delta.a_log",
    "layers.{L}.linear_attn.norm.weight": "delta.norm",
    "layers.{L}.linear_attn.out_proj.weight": "delta.o",
}
NAMES = SKELETON | ATTENTION | DELTA | MOE | SHARED_EXPERT
SKIP = {"mtp.": "multi-token prediction head", "visual.": "vision tower"}


def spec(config: Config) -> ModelSpec:
    biased = config.flag("attention_bias", False)
    full = attention(config, partial=0.25, qk_norm=True, output_gate=True, bias=biased, o_bias=biased)
    delta = DeltaNetSpec(
        key_heads=config.int("linear_num_key_heads"),
        value_heads=config.int("linear_num_value_heads"),
        key_dim=config.int("linear_key_head_dim"),
        value_dim=config.int("linear_value_head_dim"),
        conv_kernel=config.int("linear_conv_kernel_dim"),
    )
    sparse = MoeSpec(
        experts=experts(config),
        top_k=config.int("num_experts_per_tok"),
        inter=config.int("moe_intermediate_size"),
        shared_inter=config.int("shared_expert_intermediate_size"),
        shared_switch=True,
        renorm=config.flag("norm_topk_prob", True),
        act=activation(config),
    )
    every = config.int("full_attention_interval", 4)
    default = ("linear_attention" if (i + 1) % every else "full_attention" for i in range(layer_count(config)))
    kinds = layer_kinds(config, default, ("linear_attention", "full_attention"))
    return ModelSpec(
        family="qwen3_5_moe",
        hidden=config.int("hidden_size"),
        vocab=config.int("vocab_size"),
        layers=tuple(
            LayerSpec(delta if kind == "linear_attention" else full, ffn)
            for kind, ffn in zip(kinds, feed_forwards(config, sparse), strict=True)
        ),
        norm_eps=config.float("rms_norm_eps", 1e-6),
        norm_plus_one=True,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=config.int("max_position_embeddings"),
    )
