"""Write the model card from the evaluation.

python -m ops.train_demo.card --model ops/demo_model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COLUMNS = (
    "json_valid",
    "schema_valid",
    "right_tool",
    "right_arguments",
    "right_answer",
    "thinking_obeyed",
    "turns_ended",
    "no_needless_call",
    "exact_answer",
)
HEAD = """# Moorage demo model

A Mixture-of-Experts model of 12 M parameters that plays a small agent game in English and Chinese: choose a tool,
copy its arguments, read the result, answer. Qwen3.5-MoE text architecture (8 layers, Gated DeltaNet and full
attention 3:1, 32 experts top-4, a shared expert), bf16, its own 4,608-token BPE and a chat template with tools and
thinking. It was trained from scratch on generated dialogues by `ops/train_demo/` (see its README); it knows nothing
else and is meant for tests, demonstrations and cache studies.

## Held-out dialogues

Greedy, no constraints, words and names never seen in training, the last round of each dialogue played to its end with
the model's own calls. Measured on the shipped bf16 weights, computed in fp32. A turn that has not ended after 140 tokens
is cut and counts as not ended.

"""


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def table(rows: dict[str, dict]) -> str:
    lines = ["| | dialogues | " + " | ".join(c.replace("_", " ") for c in COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name.replace('_', ' ')} | {row['dialogues']} | " + " | ".join(percent(row[c]) for c in COLUMNS) + " |")
    return "\n".join(lines)


LONG = """

## Long prompts

Held-out dialogues in an agent's dress: a manual, many long tool schemas, notes around the question and long files in
results, so that the first prompt has 90-100 % of the stated length. The filler is generated too and is no agent's own
text; a real agent's wording is stranger.

"""
ROUTING = """

## Routing

Choices per expert on {tokens} tokens of held-out dialogues, as a multiple of the mean (top-4 of 32); the last column is
exp(entropy) of the shares. The shares themselves are in `eval.json`.

| layer | busiest expert | idlest expert | experts in even use |
|---|---|---|---|
"""


def routing(part: dict) -> str:
    lines = (f"| {i} | {r['busiest']} | {r['idlest']} | {r['effective']} |" for i, r in enumerate(part["layers"]))
    return ROUTING.format(tokens=part["tokens"]) + "\n".join(lines)


def card(report: dict) -> str:
    bars = ", ".join(f"{k.replace('_', ' ')} {100 * v:.0f}" for k, v in report["bars"].items())
    missed = [k.replace("_", " ") for k, v in report["bars"].items() if (report["overall"][k] or 0) < v]
    verdict = f"Aims: {bars}. " + (f"Not reached: {', '.join(missed)}." if missed else "All reached.")
    return (
        HEAD
        + table({"overall": report["overall"]} | report["groups"])
        + f"\n\n{verdict}\n\n### By skill\n\n"
        + table(report["skills"])
        + LONG
        + table({f"{n} tokens": row for n, row in report["long_prompts"]["lengths"].items()})
        + routing(report["routing"])
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    a = parser.parse_args()
    (a.model / "README.md").write_text(card(json.loads((a.model / "eval.json").read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
