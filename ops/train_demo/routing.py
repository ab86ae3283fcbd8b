"""How evenly the experts are used on held-out dialogues: what cache policies will see.

python -m ops.train_demo.routing --model ops/demo_model     # adds `routing` to eval.json
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

from .dialogues import make_dialogue
from .evaluate import PLAYED, SEED, load
from .model import Model, Pack
from .packing import GAP, packed
from .text import Encoder

DIALOGUES = 120


def expert_shares(model: Model, rows: list[list[int]]) -> torch.Tensor:
    """Share of all choices that fell on each expert, [layers, experts]; every token of `rows` counts."""
    counts = torch.zeros(model.shape.layers, model.shape.experts, dtype=torch.long)
    real: list[torch.Tensor] = []

    def count(index: int):
        def hook(gate, given, out):
            counts[index] += torch.bincount(out[1][real[-1]].flatten(), minlength=model.shape.experts)

        return hook

    handles = [layer.mlp.gate.register_forward_hook(count(i)) for i, layer in enumerate(model.model.layers)]
    try:
        for ids in rows:
            batch = packed([[(ids, [0] * len(ids))]], len(ids) + GAP)
            real.append((batch.doc >= 0).flatten())
            with torch.no_grad():
                model(batch.ids, Pack.of(batch.doc))
    finally:
        for handle in handles:
            handle.remove()
    return counts / counts.sum(1, keepdim=True)


def summary(shares: torch.Tensor) -> list[dict]:
    """Per layer: busiest and idlest expert against the mean, and exp(entropy), the number of experts in even use."""
    experts = shares.shape[1]
    effective = (-(shares * shares.clamp(min=1e-12).log()).sum(1)).exp()
    return [
        {
            "busiest": round(row.max().item() * experts, 2),
            "idlest": round(row.min().item() * experts, 2),
            "effective": round(even.item(), 1),
            "shares": [round(x, 4) for x in row.tolist()],
        }
        for row, even in zip(shares, effective, strict=True)
    ]


def held_out_rows(enc: Encoder, seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [enc.example(make_dialogue(rng, PLAYED, held_out=True))[0] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    a = parser.parse_args()
    torch.set_num_threads(1)
    model, enc = load(a.model)
    rows = held_out_rows(enc, SEED, DIALOGUES)
    report = json.loads((a.model / "eval.json").read_text())
    report["routing"] = {"tokens": sum(map(len, rows)), "layers": summary(expert_shares(model, rows))}
    (a.model / "eval.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for i, row in enumerate(report["routing"]["layers"]):
        print(i, {k: v for k, v in row.items() if k != "shares"})


if __name__ == "__main__":
    main()
