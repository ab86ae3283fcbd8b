"""GLM-4.5 and 4.6: grouped-query attention over half rotated heads; behind a few dense layers, sigmoid routing with a bias that
balances the experts, and shared experts every token passes.
"""

from __future__ import annotations

from engine.models.config import Config
from engine.models.families import deepseek_v3
from engine.models.families.common import (
    ATTENTION,
    CORRECTED_ROUTER,
    MLP,
    MOE,
    SHARED_EXPERTS,
    SKELETON,
    attention,
    dense_mlp,
)
from engine.models.spec import LayerSpec, ModelSpec

MODEL_TYPES = ("glm4_moe",)
NAMES = SKELETON | ATTENTION | MLP | MOE | CORRECTED_ROUTER | SHARED_EXPERTS
SKIP: dict[str, str] = {}


def spec(config: Config) -> ModelSpec:
    mixer = attention(config, partial=0.5, qk_norm=config.flag("use_qk_norm", False), bias=config.flag("attention_bias", False))
    sparse, kinds = deepseek_v3.sparse(config), deepseek_v3.first_dense(config, 1)
    return ModelSpec(
        family="glm4_moe",
        hidden=config.int("hidden_size"),
        vocab=config.int("vocab_size"),
        layers=tuple(LayerSpec(mixer, sparse if kind == "sparse" else dense_mlp(config)) for kind in kinds),
        norm_eps=config.float("rms_norm_eps", 1e-5),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=config.int("max_position_embeddings"),
    )
