"""Dense Llama-like decoders: Llama 2/3, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from engine.models.config import Config
from engine.models.families.common import ATTENTION, MLP, ROTARY, SKELETON, attention, dense_mlp, layer_count, layer_kinds
from engine.models.spec import LayerSpec, ModelSpec

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
NAMES = SKELETON | ATTENTION | MLP
SKIP = ROTARY  # Llama 1 and 2 as first published


def spec(config: Config) -> ModelSpec:
    kind, layers = config.model_type, layer_count(config)
    biased = config.flag("attention_bias", False)
    traits = {"bias": biased or kind == "qwen2", "o_bias": biased, "qk_norm": kind == "qwen3"}
    ffn = dense_mlp(config)
    return ModelSpec(
        family=kind,
        hidden=config.int("hidden_size"),
        vocab=config.int("vocab_size"),
        layers=tuple(LayerSpec(attention(config, window=window, **traits), ffn) for window in _windows(config, kind, layers)),
        norm_eps=config.float("rms_norm_eps", 1e-6),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=config.int("max_position_embeddings"),
    )


def _windows(config: Config, kind: str, layers: int) -> list[int | None]:
    """Sliding window of each layer: all of Mistral's; of Qwen's those from `max_window_layers` on, when switched on."""
    window = config.int("sliding_window", None)
    if kind.startswith("qwen") and not config.flag("use_sliding_window", False):
        window = None
    if kind == "llama" or window is None:
        return [None] * layers
    first = config.int("max_window_layers", 28) if kind.startswith("qwen") else 0
    default = ("sliding_attention" if i >= first else "full_attention" for i in range(layers))
    kinds = layer_kinds(config, default, ("sliding_attention", "full_attention"))
    return [window if k == "sliding_attention" else None for k in kinds]
