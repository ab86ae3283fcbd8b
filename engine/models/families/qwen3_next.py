"""Qwen3-Next: the hybrid of Qwen3.5 with its DeltaNet projections stored as two matrices, grouped by key head."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import Config
from engine.models.families import qwen3_5_moe
from engine.models.families.common import MLP
from engine.models.names import ba_rows, qkvz_rows
from engine.models.spec import ModelSpec

MODEL_TYPES = ("qwen3_next",)
NAMES = {theirs: ours for theirs, ours in qwen3_5_moe.NAMES.items() if "in_proj" not in theirs} | MLP
SKIP = {"mtp.": "multi-token prediction head"}


SPLITS = {"layers.{L}.linear_attn.in_proj_qkvz.weight": qkvz_rows, "layers.{L}.linear_attn.in_proj_ba.weight": ba_rows}


def spec(config: Config) -> ModelSpec:
    return replace(qwen3_5_moe.spec(config), family="qwen3_next")
