"""DeepSeek-V3/R1 and the text core of Kimi-K2: latent attention; behind a few dense layers, sigmoid routing within groups with a
bias that balances the experts, and shared experts every token passes.
"""

from __future__ import annotations

from engine.models.config import Config
from engine.models.families.common import (
    CORRECTED_ROUTER,
    LATENT,
    LATENT_SPLITS,
    MLP,
    MOE,
    ROTARY,
    SHARED_EXPERTS,
    SKELETON,
    activation,
    dense_mlp,
    latent_attention,
    layer_count,
)
from engine.models.spec import LayerSpec, ModelSpec, MoeSpec

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
NAMES = SKELETON | LATENT | MLP | MOE | CORRECTED_ROUTER | SHARED_EXPERTS
SPLITS = LATENT_SPLITS
SKIP = ROTARY  # Kimi-K2 and Moonlight have them


def spec(config: Config) -> ModelSpec:
    return decoder(config, config.model_type, sparse(config), first_dense(config, 3))


def first_dense(config: Config, default: int) -> list[str]:
    """The kind of every layer: "dense" for the first few, "sparse" for the others."""
    dense = config.natural("first_k_dense_replace", default)
    return ["dense" if i < dense else "sparse" for i in range(layer_count(config))]


def sparse(config: Config) -> MoeSpec:
    inter = config.int("moe_intermediate_size")
    return MoeSpec(
        experts=config.int("n_routed_experts"),
        top_k=config.int("num_experts_per_tok"),
        inter=inter,
        score="sigmoid",
        renorm=config.flag("norm_topk_prob", True),
        scale=config.float("routed_scaling_factor", 1.0),
        bias=True,
        groups=config.int("n_group", 1),
        top_groups=config.int("topk_group", 1),
        shared_inter=inter * config.natural("n_shared_experts", 1),
        act=activation(config),
    )


def decoder(config: Config, family: str, sparse: MoeSpec, kinds: list[str]) -> ModelSpec:
    """`kinds` of the layers: "dense" or "sparse"."""
    mixer = latent_attention(config)
    return ModelSpec(
        family=family,
        hidden=config.int("hidden_size"),
        vocab=config.int("vocab_size"),
        layers=tuple(LayerSpec(mixer, sparse if kind == "sparse" else dense_mlp(config)) for kind in kinds),
        norm_eps=config.float("rms_norm_eps", 1e-6),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=config.int("max_position_embeddings"),
    )
