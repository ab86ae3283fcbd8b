"""One file per family: `MODEL_TYPES` it answers to, `spec(config)`, its `NAMES` table and what it may `SKIP`, with the reason.

A family that stores several of our tensors in one adds `SPLITS`: checkpoint name -> function of the layer's mixer that gives the
rows of each canonical tensor in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from engine.models.config import Config
from engine.models.errors import ModelError
from engine.models.families import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    llama,
    mixtral,
    qwen2_moe,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from engine.models.spec import AttentionSpec, DeltaNetSpec, LatentSpec, LayerSpec, ModelSpec, MoeSpec


class Family(Protocol):
    MODEL_TYPES: tuple[str, ...]
    NAMES: dict[str, str]  # checkpoint name -> canonical name, see `models.names`
    SKIP: dict[str, str]  # name, or prefix of names, `{L}` for numbers -> what it is; such tensors are left out and reported

    def spec(self, config: Config) -> ModelSpec: ...


MOST_CHANNELS = 1 << 20  # models have at most some ten thousand; row orders are built from it before shapes are compared
_MODULES: tuple[Family, ...] = (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    llama,
    mixtral,
    qwen2_moe,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
FAMILIES: dict[str, Family] = {kind: family for family in _MODULES for kind in family.MODEL_TYPES}


def build_spec(config: Config) -> ModelSpec:
    """The spec of a checkpoint, checked for what would fail only later. Raises ModelError."""
    spec = family_of(config.model_type, config.source).spec(config)
    for layer in spec.layers:
        for fault in _faults(layer):
            raise ModelError(f"{config.source}: {fault}; fetch the file again from the model's source")
    return spec


def _faults(layer: LayerSpec) -> Iterator[str]:
    mixer, ffn = layer.mixer, layer.ffn
    head = {AttentionSpec: "head_dim", LatentSpec: "rope_dim"}.get(type(mixer))
    if head and mixer.rope and (mixer.rope.dim % 2 or not 0 < mixer.rope.dim <= getattr(mixer, head)):
        yield f"rotary dimension {mixer.rope.dim} does not fit a head of {getattr(mixer, head)}"
    if _width(mixer) > MOST_CHANNELS:
        yield f"a layer of {_width(mixer)} channels cannot be"
    if isinstance(mixer, DeltaNetSpec) and mixer.value_heads % mixer.key_heads:
        yield f"{mixer.value_heads} value heads cannot share {mixer.key_heads} key heads"
    if isinstance(ffn, MoeSpec) and ffn.top_k > ffn.experts:
        yield f"{ffn.top_k} experts a token is more than there are ({ffn.experts})"
    if isinstance(ffn, MoeSpec) and ffn.groups > 1:
        size = ffn.experts // ffn.groups
        if ffn.experts % ffn.groups or size < 2 or ffn.top_groups > ffn.groups or ffn.top_k > size * ffn.top_groups:
            yield f"{ffn.top_k} experts cannot be chosen from {ffn.top_groups} of {ffn.groups} groups of {ffn.experts} experts"


def _width(mixer: AttentionSpec | LatentSpec | DeltaNetSpec) -> int:
    if isinstance(mixer, LatentSpec):
        return mixer.heads * max(mixer.row, mixer.nope_dim + mixer.value_dim)
    return mixer.heads * mixer.head_dim if isinstance(mixer, AttentionSpec) else mixer.conv_channels


def family_of(model_type: str, source: str) -> Family:
    """Raises ModelError that lists what is supported."""
    if model_type not in FAMILIES:
        raise ModelError(f"{source}: model type '{model_type}' is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
