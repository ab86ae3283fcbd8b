#!/usr/bin/env python3
"""Where the time of a decode step goes inside of the native module, part by part: what is read, how fast, and what threads wait.

    ops/bench/step_profile.py --model FILE [--depth 0,2048] [--rows 1,4] [--rounds 24] [--out docs/results/NAME.json]
    ops/bench/step_profile.py --model FILE --prompt 512 [--rounds 24] [--out ...]       of a prompt instead, without what is alone

The module keeps when every run of tasks was asked for and done and when each thread was at it. Between steps the same process and
threads read the same weights plainly and compute the same experts alone, so that all are of the same seconds of a machine whose
memory changes its rate. Medians over rounds of one step, one read and one call of each layer's experts, in microseconds.
`wake` is from asking until a thread begins, `tail` from its last task until all are done: both the mean of the threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import machine  # noqa: E402
import torch  # noqa: E402
from engine_profile import PLAIN, WARM_UP, Channel, options  # noqa: E402

from engine import build as building  # noqa: E402
from engine import worker  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.ipc import Cancel, Generate, Sampling, token_array  # noqa: E402
from engine.kernels.ops import Quant, Weight  # noqa: E402
from engine.nn.decoder import Decoder  # noqa: E402

READ = 64 << 20  # bytes of one plain read: twice the last-level cache, so that nothing of the step before is left of it
TOUCH = 1024  # tokens of a prompt that passes every expert
MORE = 128  # tokens that the first sequences answer, at most, while the prompts of others are computed
BORDERS = ("attention", "states", "route", "down")  # what tells apart which product a product is


@dataclass(frozen=True)
class Run:
    """One run of tasks as the module tells of it; nanoseconds."""

    name: str
    bytes: int
    tasks: int
    asked: int
    done: int
    threads: list[tuple[int, int]]  # none: the caller did it alone

    @property
    def came(self) -> list[tuple[int, int]]:
        return [(start or self.done, end or self.done) for start, end in self.threads]

    @property
    def wake(self) -> float:
        return sum(start - self.asked for start, _ in self.came) / max(1, len(self.threads))

    @property
    def tail(self) -> float:
        return sum(self.done - end for _, end in self.came) / max(1, len(self.threads))


def named(runs: list[Run]) -> Iterator[tuple[str, Run]]:
    """Runs with the part of the model they are."""
    last = ""
    for i, run in enumerate(runs):
        name = run.name
        if name in BORDERS:
            last = name
        elif name == "product":
            following = next((r.name for r in runs[i + 1 :] if r.name in BORDERS), "")
            if following in ("attention", "states"):
                name = "q, k, v"
            elif last in ("attention", "states"):
                name, last = "output", "output"
            else:
                name = {"route": "router", "down": "shared expert"}.get(following, "head")
        yield name, run


def parts_of(runs: list[Run]) -> dict[str, dict[str, float]]:
    """Of one step: microseconds, bytes and waits of every part; `between` is what the caller does between two runs."""
    found: dict[str, dict[str, float]] = {}
    for name, run in named(runs):
        part = found.setdefault(name, dict.fromkeys(("us", "bytes", "runs", "shared", "tasks", "wake_us", "tail_us"), 0))
        part["us"] += (run.done - run.asked) / 1e3
        part["bytes"] += run.bytes
        part["tasks"] += run.tasks
        part["runs"] += 1
        part["shared"] += bool(run.threads)
        part["wake_us"] += run.wake / 1e3
        part["tail_us"] += run.tail / 1e3
    gaps = sum(b.asked - a.done for a, b in itertools.pairwise(runs)) / 1e3
    return found | {"between": {"us": gaps, "runs": len(runs) - 1}}


def lost(runs: list[Run]) -> dict[str, float]:
    """Of one step: microseconds in which one thread works alone, and in which the mean thread is not there yet or no more."""
    shared = [run for run in runs if run.threads]
    whole = runs[-1].done - runs[0].asked
    alone = whole - sum(run.done - run.asked for run in shared)
    wake, tail = sum(run.wake for run in shared), sum(run.tail for run in shared)
    share = (alone + wake + tail) / whole
    return {"alone_us": alone / 1e3, "wake_us": wake / 1e3, "tail_us": tail / 1e3, "share": share}


def data_of(weight: Weight):
    return weight.data if isinstance(weight, Quant) else weight


class Alone:
    """The same weights outside of steps: read plainly, and experts that nothing comes before or after."""

    def __init__(self, ops: object, decoder: Decoder, rows: int) -> None:
        self._ops, self._native = ops, ops._ops
        self._banks = [layer.routed.in_place for layer in decoder._layers if layer.routed is not None]
        self._random = random.Random(1)
        spec = next(layer.ffn for layer in decoder.spec.layers if hasattr(layer.ffn, "experts"))
        self._experts, self._k = spec.experts, spec.top_k
        self._x = torch.randn(rows, decoder.spec.hidden)

    def read(self) -> None:
        data = data_of(self._random.choice(self._banks).down)  # contiguous, also in a mapped file
        one = data[0].numel() * data.element_size()
        count = min(len(data), max(1, READ // one))
        first = self._random.randrange(len(data) - count + 1)
        self._native.stream_read(data[first : first + count])

    def experts(self) -> None:
        for bank in self._banks:
            ids = torch.tensor([self._random.sample(range(self._experts), self._k) for _ in self._x], dtype=torch.int32)
            self._ops.moe(self._x, ids, torch.full(ids.shape, 1 / self._k), bank.gate_up, bank.down, bank.act)

    def traced(self, call) -> list[Run]:
        self._native.trace(True)
        call()
        return [Run(*each) for each in self._native.trace(False)]


def asked(name: str, source: random.Random, length: int, new: int) -> Generate:
    prompt = token_array(source.choice(PLAIN) for _ in range(length))
    return Generate(id=f"{length}-{name}", tokens=prompt, max_new=new, sampling=Sampling(temperature=0.0), session=name)


def rounds(
    loop: worker.Worker, channel: Channel, alone: Alone, depth: int, rows: int, count: int
) -> tuple[list[dict], list[dict]]:
    """`count` times a decode step of `rows` sequences at `depth`, a read, the experts alone: parts, and what the step loses."""
    source = random.Random(depth)
    channel.inbox.append(
        asked("warm", source, TOUCH, 1)
    )  # pages of a mapped file that nobody has touched yet are no part of a step
    while loop._scheduler.busy or channel.inbox:
        loop._turn()
    for i in range(rows):
        channel.inbox.append(asked(str(i), source, max(depth, 16), count + MORE * rows))
    found: list[dict] = []
    waits: list[dict] = []
    while loop._scheduler.busy or channel.inbox:
        decoding = [s.decoding for s in loop._scheduler.running]
        runs = alone.traced(loop._turn)
        if runs and len(decoding) == rows and all(decoding):
            step = {"step": {"us": (runs[-1].done - runs[0].asked) / 1e3, "bytes": sum(run.bytes for run in runs)}}
            found.append(step | parts_of(runs))
            waits.append(lost(runs))
            if len(found) == WARM_UP + count:
                channel.inbox += [Cancel(id=each.id) for each in loop._scheduler.running]
            for what in ("read", "experts"):
                of = parts_of(alone.traced(getattr(alone, what)))
                found[-1] |= {f"{name} alone": part for name, part in of.items() if part.get("bytes")}
    return found[WARM_UP:][:count], waits[WARM_UP:][:count]


def prompts(loop: worker.Worker, channel: Channel, alone: Alone, length: int, count: int) -> tuple[list[dict], list[dict]]:
    """`count` times a prompt nobody has sent before, with its first token: parts, and what it loses."""
    source, found, waits = random.Random(length), [], []
    for i in range(WARM_UP + count):
        channel.inbox.append(asked(f"prompt {i}", source, length, 1))
        runs: list[Run] = []
        while loop._scheduler.busy or channel.inbox:
            runs += alone.traced(loop._turn)
        found.append({"step": {"us": (runs[-1].done - runs[0].asked) / 1e3}} | parts_of(runs))
        waits.append(lost(runs))
    return found[WARM_UP:], waits[WARM_UP:]


def summary(found: list[dict]) -> dict[str, dict[str, float]]:
    """Medians over rounds; GB/s is of each round, then the median."""
    names = sorted(
        {name for each in found for name in each}, key=lambda name: -statistics.median(r[name]["us"] for r in found if name in r)
    )
    out = {}
    for name in names:
        rows = [each[name] for each in found if name in each]
        out[name] = {key: round(statistics.median(row[key] for row in rows), 1) for key in rows[0]}
        if out[name].get("bytes"):
            rates = sorted(row["bytes"] / row["us"] / 1e3 for row in rows)
            out[name]["GB/s"] = round(statistics.median(rates), 1)
            out[name]["GB/s of rounds"] = [round(rates[len(rates) * q // 4 - (q == 4)], 1) for q in (0, 1, 3, 4)]
    return out


def shown(cell: dict) -> str:
    what = f"prompt of {cell['prompt']}" if "prompt" in cell else f"depth {cell['depth']}, {cell['sequences']} sequences"
    lines = [f"{what}, others used {cell['foreign']:.0%}"]
    for name, part in cell["parts"].items():
        rate = f"{part['bytes'] / 1e6:8.1f} MB {part['GB/s']:6.1f} GB/s" if part.get("bytes") else " " * 23
        waits = f"wake {part['wake_us']:6.1f} tail {part['tail_us']:6.1f} runs {part['runs']:.0f}" if "wake_us" in part else ""
        lines.append(f"  {name:22s} {part['us']:9.1f} us {rate} {waits}")
    return "\n".join([*lines, f"  lost: {cell['lost']}"])


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=24, help="steps measured (default 24)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt that is measured instead of steps")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    kept: list = []
    choose, make = building.choose_kernels, building.Decoder
    building.choose_kernels = lambda *a: kept.append(choose(*a)) or kept[-1]
    building.Decoder = lambda *a: kept.append(make(*a)) or kept[-1]
    channel = Channel()
    config = EngineConfig(model=str(args.model), threads=args.threads, kernels="cpu")
    loop = worker.Worker(channel, building.build(config, lambda fraction, stage: None))
    cells = []
    for depth, rows in [(0, 1)] if args.prompt else itertools.product(args.depth, args.rows):
        share, own = machine.Share.start(), machine.process_seconds([os.getpid()])
        alone = Alone(*kept, rows)
        if args.prompt:
            found, waits = prompts(loop, channel, alone, args.prompt, args.rounds)
            cell = {"prompt": args.prompt}
        else:
            found, waits = rounds(loop, channel, alone, depth, rows, args.rounds)
            cell = {"depth": depth, "sequences": rows}
        foreign = round(share.foreign(machine.process_seconds([os.getpid()]) - own), 3)
        cell |= {"rounds": len(found), "foreign": foreign, "parts": summary(found)}
        cells.append(cell | {"lost": {key: round(statistics.median(each[key] for each in waits), 4) for key in waits[0]}})
        print(shown(cells[-1]), flush=True)
    if args.out:
        command = shlex.join([Path(sys.argv[0]).name, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])
        args.out.write_text(json.dumps({"machine": machine.describe(ROOT), "command": command, "cells": cells}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    worker.leave(main())
