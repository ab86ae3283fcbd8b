"""Play held-out dialogues inside prompts of a real agent's length.

python -m ops.train_demo.long_prompts --model ops/demo_model     # adds `long_prompts` to eval.json
"""

from __future__ import annotations

import argparse
import json
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from .agents import agent_dialogue
from .decode import Decoder
from .evaluate import SEED, Play, figures, load, play_all, total
from .packing import CHARS_PER_TOKEN
from .text import Encoder

LENGTHS = (2048, 4096, 8192, 10240, 15360)  # tokens of the first prompt; the last is codex's with its own instructions
NEAR = 0.1  # how much shorter a prompt may be than its length
EACH = 16


def play_of_length(rng: random.Random, enc: Encoder, length: int) -> Play:
    """A dialogue whose first prompt has 90-100 % of `length` tokens."""
    size = length * CHARS_PER_TOKEN
    while True:
        play = Play(agent_dialogue(rng, int(size), held_out=True, rounds=(1, 2, 3), noise=0.0))
        count = len(enc.prompt(play.messages, play.dialogue.tool_schemas, play.dialogue.thinking))
        if length * (1 - NEAR) <= count <= length:
            return play
        size *= min(1.5, max(0.6, length * (1 - NEAR / 2) / count)) ** 0.5


def play_length(path: Path, length: int, each: int, seed: int) -> dict:
    torch.set_num_threads(1)
    model, enc = load(path)
    rng = random.Random(seed + length)
    plays = [play_of_length(rng, enc, length) for _ in range(each)]
    decoder = Decoder(model, {enc.id["<|im_end|>"], enc.id["<|endoftext|>"]})
    return figures(total(play_all(plays, decoder, enc)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--each", type=int, default=EACH)
    parser.add_argument("--seed", type=int, default=SEED)
    a = parser.parse_args()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = {n: pool.submit(play_length, a.model, n, a.each, a.seed) for n in sorted(LENGTHS, reverse=True)}
        found = {str(n): jobs[n].result() for n in LENGTHS}
    report = json.loads((a.model / "eval.json").read_text())
    report["long_prompts"] = {"seed": a.seed, "lengths": found}
    (a.model / "eval.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for n, row in found.items():
        print(n, row)


if __name__ == "__main__":
    main()
