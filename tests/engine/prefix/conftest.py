"""A checkpoint of each kind the prefix cache treats differently, and the demo model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.text import write_tokenizer
from tests.support.tiny import make_tiny

DEMO = Path(__file__).resolve().parents[3] / "ops" / "demo_model"
KINDS = {"attention": "qwen3_moe", "window": "mistral", "hybrid": "qwen3_5_moe_text"}
LONGEST = 40_000  # tokens the tiny checkpoints allow


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    kind: str  # of KINDS, or demo


def tiny(kind: str, path: Path, seed: int = 0, **changes: object) -> Path:
    make_tiny(KINDS[kind], path, seed=seed, vocab_size=700, max_position_embeddings=LONGEST, **changes)
    return write_tokenizer(path, "json_calls")


@pytest.fixture(scope="module", params=[*sorted(KINDS), "demo"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    kind = request.param
    return Checkpoint(DEMO if kind == "demo" else tiny(kind, tmp_path_factory.mktemp(kind)), kind)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint.path
