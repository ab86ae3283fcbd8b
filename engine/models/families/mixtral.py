"""Mixtral: Mistral's attention with a few large experts in every layer."""

from __future__ import annotations

from engine.models.config import Config
from engine.models.families.common import ATTENTION, MOE, SKELETON, activation, attention, experts, layer_count
from engine.models.spec import LayerSpec, ModelSpec, MoeSpec

MODEL_TYPES = ("mixtral",)
NAMES = (
    SKELETON
    | ATTENTION
    | MOE
    | {
        "layers.{L}.block_sparse_moe.gate.weight": "moe.router",
        "layers.{L}.block_sparse_moe.experts.{E}.w1.weight": "gate#moe.gate_up",
        "layers.{L}.block_sparse_moe.experts.{E}.w3.weight": "up#moe.gate_up",
        "layers.{L}.block_sparse_moe.experts.{E}.w2.weight": "moe.down",
    }
)
SKIP: dict[str, str] = {}


def spec(config: Config) -> ModelSpec:
    mixer = attention(config, window=config.int("sliding_window", None))
    ffn = MoeSpec(
        experts=experts(config),
        top_k=config.int("num_experts_per_tok"),
        inter=config.int("moe_intermediate_size", None) or config.int("intermediate_size"),
        act=activation(config),
    )
    return ModelSpec(
        family="mixtral",
        hidden=config.int("hidden_size"),
        vocab=config.int("vocab_size"),
        layers=(LayerSpec(mixer, ffn),) * layer_count(config),
        norm_eps=config.float("rms_norm_eps", 1e-5),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=config.int("max_position_embeddings"),
    )
