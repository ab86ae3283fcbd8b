#!/usr/bin/env python3
"""Microseconds to choose one token from a row of logits: native beside numpy, the same tokens.

    ops/bench/sampling.py [--vocab 151936] [--rows 40] [--out docs/results/NAME.json]

Logits are normal with a standard deviation of 3. Medians over rows; each way takes every row in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import machine  # noqa: E402

from engine import runner  # noqa: E402
from engine.ipc import Generate, Sampling, token_array  # noqa: E402
from engine.sequence import Sampler, Sequence  # noqa: E402

CASES: dict[str, tuple[Sampling, dict]] = {
    "greedy": (Sampling(temperature=0.0), {}),
    "greedy, grammar": (Sampling(temperature=0.0), {"grammar": True}),
    "top-k 20, top-p 0.95": (Sampling(temperature=0.6, top_k=20, top_p=0.95), {}),
    "top-k 20, penalties of 8K tokens, bias": (
        Sampling(temperature=0.6, top_k=20, repetition_penalty=1.1, presence_penalty=0.5, logit_bias={7: 1.0}),
        {"prompt": 8192},
    ),
    "top-p 0.95": (Sampling(temperature=0.8, top_p=0.95), {}),
    "min-p 0.05": (Sampling(temperature=1.0, min_p=0.05), {}),
    "whole distribution": (Sampling(temperature=1.0), {}),
    "whole distribution, 5 logprobs": (Sampling(temperature=1.0), {"logprobs": 5}),
}


class Rule:
    """A grammar that allows half of the tokens."""

    may_end = True

    def __init__(self, vocab: int) -> None:
        self._mask = np.random.default_rng(1).integers(0, 256, vocab // 8, np.uint8).tobytes()

    def mask(self) -> bytes:
        return self._mask

    def restrict(self, row: np.ndarray, stop_ids: tuple[int, ...]) -> None:
        forbidden = np.unpackbits(np.frombuffer(self._mask, np.uint8), bitorder="little") == 0
        forbidden[list(stop_ids)] = not self.may_end
        np.putmask(row, forbidden, -np.inf)


def sequence(p: Sampling, vocab: int, grammar: bool = False, prompt: int = 1, logprobs: int | None = None) -> Sequence:
    ids = np.random.default_rng(2).integers(0, vocab, prompt).tolist()
    request = Generate(id="r", tokens=token_array(ids), max_new=9, sampling=p, logprobs=logprobs, stop_ids=(1,))
    sampler = Sampler(request, Rule(vocab) if grammar else None)
    sampler.seed = 5
    return Sequence(
        request=request, prompt=prompt, limit=9, arrived=0.0, arrived_at=0.0, sampler=sampler, tokens=request.tokens[:]
    )


def measure(rows: np.ndarray, seq: Sequence) -> dict[str, float]:
    times: dict[str, list[float]] = {"native": [], "numpy": []}
    for row in rows:
        tokens = []
        for name, sample in (("native", runner.sample), ("numpy", runner.sample_plainly)):
            mine = row[None].copy()
            start = time.perf_counter()
            ((token, _),) = sample(mine, [seq])
            times[name].append((time.perf_counter() - start) * 1e6)
            tokens.append(token)
        assert tokens[0] == tokens[1], tokens
    return {name: round(statistics.median(spent), 1) for name, spent in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--vocab", type=int, default=151936, help="tokens (default Qwen3's 151936)")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    rows = (np.random.default_rng(0).standard_normal((args.rows, args.vocab)) * 3).astype(np.float32)
    cases = []
    for name, (p, more) in CASES.items():
        cases.append({"case": name, **measure(rows, sequence(p, args.vocab, **more))})
        print(json.dumps(cases[-1]), flush=True)
    if args.out:
        command = shlex.join([Path(sys.argv[0]).name, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])
        result = {"machine": machine.describe(ROOT), "command": command, "unit": "microseconds a row", "cases": cases}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
