"""GLM-4.5 and 4.6: grouped-query attention over half rotated heads; behind a few dense layers, sigmoid routing with a bias that
balances the experts, and shared experts every token passes.
"""

from __future__ import annotations

from engine.models.config import Config
from engine.models.families.common import (
    ATTENTION,
    CORRECTED_ROUTER,
    MLP,
    MOE,
    SHARED_EXPERTS,
    SKELETON,
    activation,
    attention,
    dense_mlp,
    layer_count,
)
from engine.models.spec import LayerSpec, ModelSpec, MoeSpec

MODEL_TYPES = ("glm4_moe",)
NAMES = SKELETON | ATTENTION | MLP | MOE | CORRECTED_ROUTER | SHARED_EXPERTS
SKIP: dict[str, str] = {}


def spec(config: Config) -> ModelSpec:
    mixer = attention(config, partial=0.5, qk_norm=config.flag("use_qk_norm", False), bias=config.flag("attention_bias", False))
    inter = config.int("moe_intermediate_size")
    sparse = MoeSpec(
        experts=config.int("n_routed_experts"),
        top_k=config.int("num_experts_per_tok"),
        inter=inter,
        score="sigmoid",
        renorm=config.flag("norm_topk_prob", True),
        scale=config.float("routed_scaling_factor", 1.0),
        bias=True,
        groups=config.int("n_group", 1),
        top_groups=config.int("topk_group", 1),
        shared_inter=inter * config.int("n_shared_experts", 1),
        act=activation(config),
    )
    dense = config.ids("first_k_dense_replace") or (1,)
    ffns = [dense_mlp(config) if i < dense[0] else sparse for i in range(layer_count(config))]
    return ModelSpec(
        family="glm4_moe",
        hidden=config.int("hidden_size"),
        vocab=config.int("vocab_size"),
        layers=tuple(LayerSpec(mixer, ffn) for ffn in ffns),
        norm_eps=config.float("rms_norm_eps", 1e-5),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=config.int("max_position_embeddings"),
    )
