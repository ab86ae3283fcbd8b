#!/usr/bin/env python3
"""Where the time of a decode step goes: kernels, the rest of each layer, and everything around the layers.

    ops/bench/engine_profile.py --model FILE [--depth 0,2048] [--rows 1] [--tokens 64] [--out docs/results/NAME.json]

Runs the engine's own loop in this process, the API process replaced by a channel that hands out the requests and encodes the
answers. A step that is one native call keeps the times of its half layers itself. Where it is several, every one is timed from
Python, so what the module spends on checking arguments counts as kernel; it is measured
apart, on calls that have next to nothing to compute (`doors`), and added to what a layer spends outside of its kernels.
Medians over steps that only decode, in microseconds. The clock costs 0.2 us a span, which is left in.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import machine  # noqa: E402
import torch  # noqa: E402

from engine import build as building  # noqa: E402
from engine import runner, worker  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.ipc import Generate, Sampling, frame, token_array  # noqa: E402
from engine.nn import decoder  # noqa: E402

PLAIN = range(256, 4096)  # token ids that are text in every vocabulary measured here
WARM_UP = 8  # decode steps that do not count: first touch of pages, rope tables, scratch


class Spans:
    """Microseconds a step spent in each named span, and how often it was there; spans may lie inside each other."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.time: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.last: dict[str, tuple[Callable, tuple]] = {}  # call of each kernel
        self.layer = False

    def timed(self, name: str, call: Callable) -> Callable:
        now = time.perf_counter_ns

        def wrapper(*args, **kwargs):
            start = now()
            try:
                return call(*args, **kwargs)
            finally:
                self.time[name] += (now() - start) / 1e3

        return wrapper

    def layer_part(self, call: Callable) -> Callable:
        timed = self.timed("layers", call)

        def wrapper(*args, **kwargs):
            self.layer = True
            try:
                return timed(*args, **kwargs)
            finally:
                self.layer = False

        return wrapper

    def kernel(self, name: str, call: Callable) -> Callable:
        now = time.perf_counter_ns

        def wrapper(*args):
            start = now()
            call(*args)
            spent = (now() - start) / 1e3
            self.time[f"kernel {name}"] += spent
            self.calls[name] += 1
            if self.layer:
                self.time["layers' kernels"] += spent
                self.calls["layers"] += 1
            self.last[name] = call, args

        return wrapper

    def half(self, name: str, make: Callable) -> Callable:
        return lambda *args: TimedHalf(name, make(*args), self)

    def chain(self, name: str, make: Callable) -> Callable:
        return lambda table, scale, halves, *more: TimedChain(
            [half.name for half, *_ in halves], make(table, scale, [(half.inner, *rest) for half, *rest in halves], *more), self
        )


class TimedHalf:
    """A half layer under the clock."""

    def __init__(self, name: str, half: Callable, spans: Spans) -> None:
        self.name, self.inner = name, half
        self._call = spans.kernel(name, half)
        if hasattr(half, "choose"):
            self.bank, self.choose = half.bank, spans.kernel(f"{name} choose", half.choose)

    def __call__(self, *args) -> None:
        self._call(*args)


class TimedChain:
    """A whole step in one call, which keeps the time of its halves itself; what it takes besides counts as outside of kernels."""

    def __init__(self, halves: list[str], chain: Callable, spans: Spans) -> None:
        self._names, self._chain, self._spans = [*halves, "norm and head"], chain, spans
        self.angles = chain.angles

    def __call__(self, *args) -> None:
        start = time.perf_counter_ns()
        self._chain(*args)
        spent, times = (time.perf_counter_ns() - start) / 1e3, self._chain.times
        spans = self._spans
        for name, value in zip(self._names, times, strict=True):
            spans.time[f"kernel {name}"] += value
            spans.calls[name] += 1
        spans.time["layers"] += spent - times[-1]
        spans.time["layers' kernels"] += sum(times[:-1])


class TimedNative:
    """The native module's operations under the clock."""

    def __init__(self, native: object, spans: Spans) -> None:
        for name in dir(native):
            if not name.startswith("_"):
                found = getattr(native, name)
                wrap = spans.chain if name == "chain" else spans.half if name.endswith("_half") else spans.kernel
                setattr(self, name, wrap(name, found) if callable(found) else found)


def doors(last: dict[str, tuple[Callable, tuple]], rows: int) -> dict[str, float]:
    """Microseconds of each operation that ran, called with no row to compute: what reading its arguments costs."""
    found = {}
    for name, (call, args) in last.items():
        empty = [_without_rows(value, rows) for value in args]
        times = []
        for _ in range(200):
            start = time.perf_counter_ns()
            call(*empty)
            times.append((time.perf_counter_ns() - start) / 1e3)
        found[name] = statistics.median(times)
    return found


def _without_rows(value: object, rows: int) -> object:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.dtype is torch.int32 and value.shape == (rows + 1,):  # the borders of the sequences
        return value[:1]
    return value[:0] if value.shape[0] == rows else value


class Channel:
    """In place of the socket to the API process: gives the worker what `inbox` holds, counts what it sends."""

    def __init__(self) -> None:
        self.inbox: list = []
        self.sent = 0

    def receive(self, timeout: float | None) -> list:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages: Iterable) -> None:
        self.sent += len(b"".join(map(frame, messages)))


def instrument(spans: Spans) -> None:
    """Put spans around the layers, the parts of a step and every native call of what is built from here on."""
    choose = building.choose_kernels

    def timed_kernels(name: str, threads: int):
        ops = choose(name, threads)
        ops._ops = TimedNative(ops._ops, spans)
        return ops

    building.choose_kernels = timed_kernels
    for part in ("mix", "feed"):
        setattr(decoder._Layer, part, spans.layer_part(getattr(decoder._Layer, part)))
    for owner, name, label in (
        (decoder.Decoder, "forward", "forward"),
        (runner, "make_batch", "make_batch"),
        (runner, "read_logits", "sampling"),
        (worker.Scheduler, "plan", "plan"),
        (worker.Scheduler, "commit", "commit"),
        (worker.Worker, "_flush", "send"),
    ):
        setattr(owner, name, spans.timed(label, getattr(owner, name)))


# microseconds of every span, calls of every kernel, its last call
Step = tuple[dict[str, float], dict[str, int], dict[str, tuple[Callable, tuple]]]


def decode_steps(loop: worker.Worker, channel: Channel, spans: Spans, depth: int, rows: int, tokens: int) -> list[Step]:
    """`tokens` steps in which `rows` sequences decode at `depth` and nothing else runs."""
    source = random.Random(depth)
    for i in range(rows):
        prompt = token_array(source.choice(PLAIN) for _ in range(max(depth, 16)))
        count = tokens + WARM_UP + 8 * rows  # the first ones answer while the last one's prompt is computed
        channel.inbox.append(
            Generate(id=f"{depth}-{i}", tokens=prompt, max_new=count, sampling=Sampling(temperature=0.0), session=str(i))
        )
    steps: list[Step] = []
    while loop._scheduler.busy or channel.inbox:
        decoding = [s.decoding for s in loop._scheduler.running]
        spans.clear()
        start = time.perf_counter_ns()
        loop._turn()
        if len(decoding) == rows and all(decoding):
            spans.time["step"] = (time.perf_counter_ns() - start) / 1e3
            steps.append((spans.time, spans.calls, spans.last))
    return steps[WARM_UP : WARM_UP + tokens]


def summary(steps: list[Step], doors: dict[str, float]) -> dict[str, object]:
    """Medians over steps."""
    middle = {name: statistics.median(times[name] for times, _, _ in steps) for name in steps[0][0]}
    calls = steps[0][1]
    ranked = sorted(middle.items(), key=lambda item: -item[1])
    kernels = {name[7:]: round(value, 1) for name, value in ranked if name.startswith("kernel ")}
    layers, inside = middle["layers"], middle["layers' kernels"]
    door = sum(doors.get(name, 0.0) * calls[name] for name in kernels) * calls["layers"] / sum(calls[name] for name in kernels)
    return {
        "step_us": round(middle["step"], 1),
        "layers_us": round(layers, 1),
        "kernels_us": kernels,
        "kernel_calls": {name: calls[name] for name in kernels},
        "layers_outside_kernels": round(1 - inside / layers, 4),
        "layers_outside_kernels_and_doors": round(1 - (inside - door) / layers, 4),
        "doors_us": {name: round(value, 2) for name, value in doors.items()},
        "around_us": {name: round(middle[name], 1) for name in ("plan", "make_batch", "sampling", "commit", "send")},
        "step_outside_forward": round(1 - middle["forward"] / middle["step"], 4),
        "step_outside_kernels": round(1 - sum(kernels.values()) / middle["step"], 4),
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def options(description: str) -> argparse.ArgumentParser:
    """What every profile of decode steps is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory or GGUF file")
    parser.add_argument("--depth", type=numbers, default=[0, 2048], help="context lengths (default 0,2048)")
    parser.add_argument("--rows", type=numbers, default=[1], help="sequences that decode together (default 1)")
    parser.add_argument("--threads", type=int, default=0, help="threads (default: all cores)")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=64, help="steps measured (default 64)")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    spans, channel = Spans(), Channel()
    instrument(spans)
    config = EngineConfig(model=str(args.model), threads=args.threads, kernels="cpu")
    loop = worker.Worker(channel, building.build(config, lambda fraction, stage: None))
    cells = []
    for depth in args.depth:
        for rows in args.rows:
            share, own = machine.Share.start(), machine.process_seconds([os.getpid()])
            steps = decode_steps(loop, channel, spans, depth, rows, args.tokens)
            foreign = round(share.foreign(machine.process_seconds([os.getpid()]) - own), 3)
            with torch.inference_mode():
                empty = doors(steps[-1][2], rows)
            cells.append({"depth": depth, "rows": rows, "steps": len(steps), "foreign": foreign, **summary(steps, empty)})
            print(json.dumps(cells[-1], indent=1), flush=True)
    if args.out:
        command = shlex.join([Path(sys.argv[0]).name, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])
        result = {"machine": machine.describe(ROOT), "command": command, "unit": "microseconds", "cells": cells}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    worker.leave(main())
