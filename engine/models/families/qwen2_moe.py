"""Qwen1.5-MoE and Qwen2-MoE: biased attention, many small experts without renormalised weights, a switched shared expert."""

from __future__ import annotations

from engine.models.config import Config
from engine.models.errors import ModelError
from engine.models.families.common import (
    ATTENTION,
    MLP,
    MOE,
    SHARED_EXPERT,
    SKELETON,
    activation,
    attention,
    experts,
    feed_forwards,
)
from engine.models.spec import LayerSpec, ModelSpec, MoeSpec

MODEL_TYPES = ("qwen2_moe",)
NAMES = SKELETON | ATTENTION | MLP | MOE | SHARED_EXPERT
SKIP: dict[str, str] = {}


def spec(config: Config) -> ModelSpec:
    if config.flag("use_sliding_window", False):
        raise ModelError(f"{config.source}: use_sliding_window is not supported for qwen2_moe; no published checkpoint sets it")
    mixer = attention(config, bias=config.flag("qkv_bias", True))
    sparse = MoeSpec(
        experts=experts(config),
        top_k=config.int("num_experts_per_tok"),
        inter=config.int("moe_intermediate_size"),
        renorm=config.flag("norm_topk_prob", False),
        shared_inter=config.int("shared_expert_intermediate_size"),
        shared_switch=True,
        act=activation(config),
    )
    return ModelSpec(
        family="qwen2_moe",
        hidden=config.int("hidden_size"),
        vocab=config.int("vocab_size"),
        layers=tuple(LayerSpec(mixer, ffn) for ffn in feed_forwards(config, sparse)),
        norm_eps=config.float("rms_norm_eps", 1e-6),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=config.int("max_position_embeddings"),
    )
