#!/usr/bin/env python3
"""Experts over an emulated fast memory: decode steps against the model's prediction, and where copying whole layers pays.

    ops/bench/experts.py [--kind BF16] [--link 2] [--out docs/results/NAME.json]

Decode: rates are calibrated first (kernel time by number of experts alone and beside the link, the link itself); then random
routing with measured locality runs through the real control code, and every layer's time is predicted from its hits, misses and
fetches. Prefill: the same chunk with whole layers ahead, on demand, and as the executor chooses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import machine  # noqa: E402

from engine.build import choose_kernels  # noqa: E402
from engine.experts.calibrate import HIDDEN, INTER, random_weight  # noqa: E402
from engine.experts.executor import Tier, TieredExperts  # noqa: E402
from engine.experts.pool import HostPool, Room, copy_expert  # noqa: E402
from engine.experts.prefill import Prefill  # noqa: E402
from engine.experts.slots import Fetch  # noqa: E402
from engine.experts.split import Rates  # noqa: E402
from engine.experts.trace import measure_locality, synthesize  # noqa: E402
from engine.nn.experts import Bank  # noqa: E402

COLD = 10  # steps thrown away: first touch of the arena's pages, an empty cache
LOCALITY = {"zipf": 0.6, "stick": 0.3}  # near what the demo model's own routing measures


@dataclass(frozen=True)
class Cost:
    """Seconds of an expert kernel: `call` + experts * `expert`."""

    call: float
    expert: float

    def __call__(self, experts: int) -> float:
        return self.call + experts * self.expert if experts else 0.0


def fit(time_of: Callable[[int], float], counts: tuple[int, ...]) -> Cost:
    """Least squares of a line through median times."""
    times = [time_of(n) for n in counts]
    mean_n, mean_t = statistics.mean(counts), statistics.mean(times)
    slope = sum((n - mean_n) * (t - mean_t) for n, t in zip(counts, times, strict=True)) / sum((n - mean_n) ** 2 for n in counts)
    return Cost(max(0.0, mean_t - slope * mean_n), slope)


def held_as_loaded(bank: Bank) -> Bank:
    """In huge pages, as the loader and slots hold experts: without them a kernel is half as fast."""
    room = Room(bank, bank.experts).bank
    for expert in range(bank.experts):
        copy_expert(bank, expert, room, expert)
    return room


class Bench:
    def __init__(self, kind: str, layers: int, experts: int, top_k: int, slots: int, link: float, small: bool) -> None:
        self.ops = choose_kernels("auto", 0)
        hidden, inter = (256, 256) if small else (HIDDEN, INTER)
        self.banks = [
            held_as_loaded(
                Bank(random_weight(kind, experts, 2 * inter, hidden), random_weight(kind, experts, hidden, inter), "silu")
            )
            for _ in range(layers)
        ]
        self.layers, self.experts, self.top_k, self.slots, self.hidden = layers, experts, top_k, slots, hidden
        self.link, self.repeat = link, 5 if small else 25

    def executor(self, mode: str, rates: Rates | None, slots: int | None = None) -> TieredExperts:
        tier = Tier(self.slots if slots is None else slots, mode, rates, "lru", self.link)
        return TieredExperts(HostPool(self.banks), self.ops, tier)

    # --- calibration

    def kernel(self, count: int, parts: bool, banks: list[Bank] | None = None) -> float:
        """Median seconds of `count` experts of `banks` (None: the pool), other ones each time; `parts`: unweighted, apart."""
        banks, x, weights = banks or self.banks, torch.randn(1, self.hidden), torch.full((1, count), 1 / count)
        held, times = len(banks[0].gate_up if isinstance(banks[0].gate_up, torch.Tensor) else banks[0].gate_up.data), []
        for i in range(3 * self.repeat):
            ids = (torch.arange(i * count, (i + 1) * count) % held).int()
            bank = banks[i % len(banks)]
            began = time.perf_counter()
            if parts:
                self.ops.expert_rows(x.expand(count, -1).contiguous(), ids, bank.gate_up, bank.down, "silu")
            else:
                self.ops.moe(x, ids[None], weights, bank.gate_up, bank.down, "silu")
            times.append(time.perf_counter() - began)
        return statistics.median(times[self.repeat :])

    def calibrate(self) -> dict[str, object]:
        """Kernels on the pool and on the slots, on the pool beside the link, the link, the control code."""
        counts, keys = (1, 2, 4, self.top_k), self.layers * self.experts
        busy = self.executor("offload", None)
        slots = [busy._arena.bank]

        def beside(n: int) -> float:
            busy._link.submit([Fetch(i % keys, i % self.slots) for i in range(10_000)])
            took = self.kernel(n, True)
            busy._link.cancel(range(keys))
            return took

        warm_until = time.perf_counter() + (0.2 if self.repeat < 10 else 5.0)
        while time.perf_counter() < warm_until:  # an idle machine is slow for its first seconds
            self.kernel(self.top_k, False)
        known: dict[str, object] = {"size": busy._bytes}
        known["whole"] = fit(lambda n: self.kernel(n, False), counts)
        known["alone"] = fit(lambda n: self.kernel(n, True), counts)
        known["shared"] = fit(beside, counts)
        known["fast_whole"] = fit(lambda n: self.kernel(n, False, slots), counts)
        known["fast"] = fit(lambda n: self.kernel(n, True, slots), counts)
        known["link"] = busy._link.bytes / busy._link.busy_s
        busy.close()
        known["control"] = self.control_seconds("offload", self.top_k)
        known["control_apart"] = self.control_seconds("host", self.top_k // 2)
        return known

    def control_seconds(self, mode: str, hits: int) -> float:
        """What the control code adds to a layer call whose first `hits` experts are in slots, the others computed in the pool."""
        experts = self.executor(mode, None, self.top_k)
        for key in experts.fetch(range(hits)):
            experts.receive(key)
        x, ids = torch.randn(1, self.hidden), torch.arange(self.top_k).int()[None]
        weights, rows = torch.full((1, self.top_k), 1 / self.top_k), x.expand(self.top_k, -1).contiguous()
        times = []
        for _ in range(4 * self.repeat):
            began = time.perf_counter()
            experts.run(0, x, ids, weights)
            whole = time.perf_counter()
            if hits == self.top_k:
                self.ops.moe(x, ids, weights, *self.of(experts._arena.bank))
            else:
                self.ops.expert_rows(rows[hits:], ids[0, hits:], *self.of(self.banks[0]))
                self.ops.expert_rows(rows[:hits], ids[0, :hits], *self.of(experts._arena.bank))
            times.append(2 * whole - began - time.perf_counter())
        experts.close()
        return max(0.0, statistics.median(times[self.repeat :]))

    @staticmethod
    def of(bank: Bank) -> tuple:
        return bank.gate_up, bank.down, bank.act

    # --- decode

    def predict(self, known: dict, hits: int, misses: int, fetched: int) -> float:
        """Seconds of a layer call. The fast side's computing is not free here: the same cores do it."""
        rest, fill = misses - fetched, fetched * known["size"] / known["link"]
        if not rest:
            return known["control"] + fill + known["fast_whole"](hits + fetched)
        if not hits + fetched:
            return known["control"] + known["whole"](rest)
        if not fetched:
            return known["control_apart"] + known["alone"](rest) + known["fast"](hits)
        slower = known["shared"].expert / known["alone"].expert  # while the link runs
        own = known["shared"](rest) + slower * known["fast"](hits)
        beside = own if own <= fill else fill + (own - fill) / slower
        return known["control_apart"] + max(beside, fill) + known["fast"](fetched)

    def decode(self, mode: str, known: dict, steps: int) -> dict[str, object]:
        rates = Rates(known["link"], known["size"] / known["alone"].expert, known["size"] / known["shared"].expert)
        trace = synthesize(self.layers, self.experts, self.top_k, steps + COLD, seed=1, **LOCALITY)
        experts = self.executor(mode, rates)
        weights, times, expected = torch.full((1, self.top_k), 1 / self.top_k), [], []
        for i, ids in enumerate(torch.from_numpy(trace.ids.astype("int32")).split(1)):
            before, x = experts.slots.counts, torch.randn(1, self.hidden)
            hits, misses, fetched = before.hits, before.misses, before.fetched
            began = time.perf_counter()
            experts.run(i % self.layers, x, ids, weights)
            times.append(time.perf_counter() - began)
            now = experts.slots.counts
            expected.append(self.predict(known, now.hits - hits, now.misses - misses, now.fetched - fetched))
        experts.close()
        cold = COLD * self.layers
        # medians: a step during which the host ran somebody else says nothing about the model
        measured, predicted = (statistics.median(self.by_step(t[cold:])) for t in (times, expected))
        c = experts.slots.counts
        return {
            "mode": mode,
            "step_ms": 1e3 * measured,
            "predicted_ms": 1e3 * predicted,
            "error": measured / predicted - 1,
            "miss_rate": c.misses / (c.hits + c.misses),
            "fetched_of_misses": c.fetched / max(1, c.misses),
            "locality": vars(measure_locality(trace)) if mode == "offload" else None,
        }

    def by_step(self, layers: list[float]) -> list[float]:
        return [sum(layers[i : i + self.layers]) for i in range(0, len(layers), self.layers)]

    def neighbours(self, seconds: float = 2.0) -> dict[str, float]:
        """Steps of all layers in place per second, alone and with a busy process on every core; in turns."""
        x, weights = torch.randn(1, self.hidden), torch.full((1, self.top_k), 1 / self.top_k)

        def rate() -> float:
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                ids = (torch.arange(steps, steps + self.top_k) % self.experts).int()[None]
                for bank in self.banks:
                    self.ops.moe(x, ids, weights, *self.of(bank))
                steps += 1
            return steps / (time.perf_counter() - began)

        alone, beside = [], []
        for _ in range(3):
            alone.append(rate())
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
            time.sleep(0.3)
            beside.append(rate())
            for other in others:
                other.kill()
                other.wait()
        found = {"alone": statistics.median(alone), "beside": statistics.median(beside)}
        return {**found, "share": found["beside"] / found["alone"]}

    # --- prefill

    def prefill(self, rows: int, known: dict, how: str, passes: int = 4) -> float:
        """Median seconds of a pass over all layers: "ahead" always, "demand" never, "chosen" by what was measured."""
        rates = Rates(known["link"], known["size"] / known["alone"].expert, known["size"] / known["shared"].expert)
        experts = self.executor("offload", None if how == "demand" else rates, max(self.slots, 2 * self.experts))
        if how == "ahead":
            experts._prefill = _Always()
        generator, times = torch.Generator().manual_seed(rows), []
        for _ in range(passes + 1):
            began = time.perf_counter()
            for layer in range(self.layers):
                x = torch.randn(rows, self.hidden, generator=generator)
                weights, ids = torch.rand(rows, self.experts, generator=generator).topk(self.top_k)
                experts.run(layer, x, ids.int(), weights.contiguous())
            times.append(time.perf_counter() - began)
            experts.settle()
            experts.evict(range(self.layers * self.experts))
        experts.close()
        return statistics.median(times[1:])


class _Always(Prefill):
    def copy_ahead(self, *_: object) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="BF16")
    parser.add_argument("--link", type=float, nargs="+", default=[2.0], help="GB/s of the emulated link")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, nargs="*", default=[4, 16, 64, 256])
    parser.add_argument("--small", action="store_true", help="tiny experts, to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = {"machine": machine.describe(ROOT), "kind": args.kind, "runs": []}
    for link in args.link:
        bench = Bench(args.kind, layers=3, experts=32, top_k=8, slots=40, link=link * 1e9, small=args.small)
        share, own = machine.Share.start(), time.process_time()
        known = bench.calibrate()
        rate, size = known["link"] / 1e9, known["size"]
        print(f"link {link} GB/s ({rate:.2f} measured), expert {size / 1e6:.2f} MB, control {1e6 * known['control']:.0f} us")
        for name in ("whole", "alone", "shared", "fast_whole", "fast"):
            c = known[name]
            gbs = size / c.expert / 1e9
            print(f"  {name:10} {1e6 * c.call:6.0f} us + {1e3 * c.expert:.3f} ms an expert = {gbs:.1f} GB/s", flush=True)
        run = {
            "link": link,
            "known": {k: vars(v) if isinstance(v, Cost) else v for k, v in known.items()},
            "decode": [],
            "prefill": [],
        }
        for mode in ("host", "offload", "hybrid"):
            found = bench.decode(mode, known, args.steps)
            run["decode"].append(found)
            print(
                f"  {mode:8} step {found['step_ms']:7.2f} ms, predicted {found['predicted_ms']:7.2f} ({found['error']:+.1%}), "
                f"misses {found['miss_rate']:.0%}, fetched {found['fetched_of_misses']:.0%} of them"
            )
        run["others"] = share.foreign(time.process_time() - own)
        print(f"  others used {run['others']:.0%} of the machine meanwhile")
        run["neighbours"] = bench.neighbours()
        print(f"  with a busy process on every core: {run['neighbours']['share']:.0%} of the steps a second")
        for rows in args.rows:
            times = {how: bench.prefill(rows, known, how) for how in ("demand", "ahead", "chosen")}
            run["prefill"].append({"rows": rows, **times})
            print(f"  {rows:4} rows: " + ", ".join(f"{how} {1e3 * t:.1f} ms" for how, t in times.items()))
        out["runs"].append(run)
    if args.out:
        args.out.write_text(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
