"""DeepSeek-V2 and V2-Lite: latent attention and softmax routing, by the best experts or within the best groups."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import Config
from engine.models.errors import ModelError
from engine.models.families import deepseek_v3
from engine.models.families.common import CORRECTED_ROUTER
from engine.models.spec import ModelSpec

MODEL_TYPES = ("deepseek_v2",)
NAMES = {theirs: ours for theirs, ours in deepseek_v3.NAMES.items() if theirs not in CORRECTED_ROUTER}
SPLITS = deepseek_v3.SPLITS
SKIP: dict[str, str] = {}


def spec(config: Config) -> ModelSpec:
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"{config.source}: topk_method '{method}' is not supported; supported: greedy, group_limited_greedy")
    if config.flag("norm_topk_prob", False):
        raise ModelError(f"{config.source}: norm_topk_prob is not supported for deepseek_v2; no published checkpoint sets it")
    grouped = method == "group_limited_greedy"
    sparse = replace(
        deepseek_v3.sparse(config),
        score="softmax",
        renorm=False,
        bias=False,
        groups=config.int("n_group") if grouped else 1,
        top_groups=config.int("topk_group") if grouped else 1,
        group_best=1,
    )
    return deepseek_v3.decoder(config, "deepseek_v2", sparse, deepseek_v3.first_dense(config, 0))
