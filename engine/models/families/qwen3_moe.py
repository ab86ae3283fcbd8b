"""Qwen3-MoE: grouped-query attention with per-head q/k norm, sparse experts in every or every n-th layer."""

from __future__ import annotations

from engine.models.config import Config
from engine.models.families.common import ATTENTION, MLP, MOE, SKELETON, activation, attention, experts, feed_forwards
from engine.models.spec import LayerSpec, ModelSpec, MoeSpec

MODEL_TYPES = ("qwen3_moe",)
NAMES = SKELETON | ATTENTION | MLP | MOE
SKIP: dict[str, str] = {}


def spec(config: Config) -> ModelSpec:
    biased = config.flag("attention_bias", False)
    window = config.int("sliding_window", None) if config.flag("use_sliding_window", False) else None
    mixer = attention(config, qk_norm=True, bias=biased, o_bias=biased, window=window)
    sparse = MoeSpec(
        experts=experts(config),
        top_k=config.int("num_experts_per_tok"),
        inter=config.int("moe_intermediate_size"),
        renorm=config.flag("norm_topk_prob", False),
        act=activation(config),
    )
    return ModelSpec(
        family="qwen3_moe",
        hidden=config.int("hidden_size"),
        vocab=config.int("vocab_size"),
        layers=tuple(LayerSpec(mixer, ffn) for ffn in feed_forwards(config, sparse)),
        norm_eps=config.float("rms_norm_eps", 1e-6),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=config.int("max_position_embeddings"),
    )
