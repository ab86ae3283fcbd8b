"""GLM-4.7-Flash: DeepSeek-V3's decoder with the kinds of its layers written out."""

from __future__ import annotations

from engine.models.config import Config
from engine.models.families import deepseek_v3
from engine.models.families.common import layer_kinds
from engine.models.spec import ModelSpec

MODEL_TYPES = ("glm4_moe_lite",)
NAMES, SPLITS = deepseek_v3.NAMES, deepseek_v3.SPLITS
SKIP: dict[str, str] = {}


def spec(config: Config) -> ModelSpec:
    kinds = layer_kinds(config, deepseek_v3.first_dense(config, 1), ("dense", "sparse"), "mlp_layer_types")
    return deepseek_v3.decoder(config, "glm4_moe_lite", deepseek_v3.sparse(config), list(kinds))
