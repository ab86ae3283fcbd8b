#!/usr/bin/env python3
"""Experts over an emulated fast memory: decode steps against the model's prediction, and where copying whole layers pays.

    ops/bench/experts.py [--kind BF16] [--link 2] [--out docs/results/NAME.json]

Decode: in turns, rates are calibrated (kernel time by number of experts alone and beside the link, the link itself, the control
code) and random routing with measured locality runs through the real control code; every layer's time is predicted from its hits,
misses and fetches by the rates of the same turn. Prefill: the same chunk with whole layers ahead, on demand, and as the executor
chooses.
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

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import machine  # noqa: E402

from engine.build import choose_kernels  # noqa: E402
from engine.experts.calibrate import HIDDEN, INTER, random_weight  # noqa: E402
from engine.experts.executor import Tier, TieredExperts  # noqa: E402
from engine.experts.link import Link  # noqa: E402
from engine.experts.pool import HostPool, Room, copy_expert  # noqa: E402
from engine.experts.prefill import Prefill  # noqa: E402
from engine.experts.slots import Fetch  # noqa: E402
from engine.experts.split import Rates  # noqa: E402
from engine.experts.trace import measure_locality, synthesize  # noqa: E402
from engine.nn.experts import Bank  # noqa: E402

TURNS = 10  # of calibrating and running: a machine changes what it gives from one second to the next
LINKED = 16  # experts copied to measure the link by itself
BETWEEN_S = 2e-4  # at least, between two layers' kernels: the pool's threads are asleep by then and have to be woken
COLD = 10  # steps thrown away: first touch of the arena's pages, an empty cache
LOCALITY = {"zipf": 0.6, "stick": 0.3}  # near what the demo model's own routing measures


@dataclass(frozen=True)
class Cost:
    """Seconds of an expert kernel by number of experts: measured for some, on a line between those."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, experts: int) -> float:
        return float(np.interp(experts, (0, *self.counts), (0.0, *self.seconds)))

    @property
    def expert(self) -> float:
        """Of one of many."""
        return self.seconds[-1] / self.counts[-1]


def measure(time_of: Callable[[int], float], counts: tuple[int, ...]) -> Cost:
    return Cost(counts, tuple(time_of(n) for n in counts))


def held_as_loaded(bank: Bank) -> Bank:
    """In huge pages, as the loader and slots hold experts: without them a kernel is half as fast."""
    room = Room(bank, bank.experts).bank
    for expert in range(bank.experts):
        copy_expert(bank, expert, room, expert)
    return room


def pause() -> float:
    """Busy with something else for as long as the control code is; returns the time."""
    until = time.perf_counter() + BETWEEN_S
    while (now := time.perf_counter()) < until:
        pass
    return now


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
        self.link, self.repeat, self.warm_s = link, 5 if small else 8, 0.2 if small else 5.0

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
            began = pause()
            if parts:
                self.ops.expert_rows(x.expand(count, -1).contiguous(), ids, bank.gate_up, bank.down, "silu")
            else:
                self.ops.moe(x, ids[None], weights, bank.gate_up, bank.down, "silu")
            times.append(time.perf_counter() - began)
        return statistics.median(times[self.repeat :])

    def calibrate(self) -> dict[str, object]:
        """Kernels on the pool and on the slots, on the pool beside the link, the link, the control code."""
        counts, keys = (1, 2, 4, self.top_k), self.layers * self.experts
        busy, moved = self.executor("offload", None), []
        slots = [busy.arena.bank]

        def beside(n: int) -> float:
            endless = Link(lambda i, slot, part: busy.arena.put(i % keys, slot, part), busy.tier.link_rate)
            endless.submit([Fetch(i, i % self.slots) for i in range(10_000)])
            took = self.kernel(n, True)
            endless.close()
            moved.append((endless.bytes, endless.busy_s))
            return took

        warm_until, self.warm_s = time.perf_counter() + self.warm_s, 0.0
        while time.perf_counter() < warm_until:  # an idle machine is slow for its first seconds
            self.kernel(self.top_k, False)
        known: dict[str, object] = {"size": busy.slot_bytes}
        known["whole"] = measure(lambda n: self.kernel(n, False), counts)
        known["alone"] = measure(lambda n: self.kernel(n, True), counts)
        known["shared"] = measure(beside, counts)
        known["fast_whole"] = measure(lambda n: self.kernel(n, False, slots), counts)
        known["fast"] = measure(lambda n: self.kernel(n, True, slots), counts)
        known["link_beside"] = sum(size for size, _ in moved) / sum(seconds for _, seconds in moved)
        busy.close()
        lone = self.executor("offload", None, LINKED)
        for key in lone.fetch(range(LINKED)):
            lone.receive(key)
        known["link"] = lone.link.bytes / lone.link.busy_s
        began = time.perf_counter()
        known["copy"] = sum(lone.arena.put(i, i % LINKED, 0) for i in range(LINKED)) / (time.perf_counter() - began)
        lone.close()
        known["control"] = self.control_seconds("offload", self.top_k)
        known["control_pool"] = self.control_seconds("host", 0)
        known["control_apart"] = self.control_seconds("host", self.top_k // 2)
        return known

    def control_seconds(self, mode: str, hits: int) -> float:
        """What the control code adds to a layer call whose first `hits` experts are in slots, the others computed in the pool."""
        experts = self.executor(mode, None, self.top_k)
        for key in experts.fetch(range(hits)):
            experts.receive(key)
        x, ids = torch.randn(1, self.hidden), torch.arange(self.top_k).int()[None]
        weights, rows = torch.full((1, self.top_k), 1 / self.top_k), x.expand(self.top_k, -1).contiguous()
        slots, pool, times = self.of(experts.arena.bank), self.of(self.banks[0]), []
        for _ in range(4 * self.repeat):
            began = pause()
            experts.run(0, x, ids, weights)
            whole, began_kernels = time.perf_counter() - began, pause()
            if hits in (0, self.top_k):
                self.ops.moe(x, ids, weights, *(slots if hits else pool))
            else:
                self.ops.expert_rows(rows[hits:], ids[0, hits:], *pool)
                self.ops.expert_rows(rows[:hits], ids[0, :hits], *slots)
            times.append(whole - (time.perf_counter() - began_kernels))
        experts.close()
        return max(0.0, statistics.median(times[self.repeat :]))

    @staticmethod
    def of(bank: Bank) -> tuple:
        return bank.gate_up, bank.down, bank.act

    # --- decode

    def predict(self, known: dict, hits: int, misses: int, fetched: int) -> float:
        """Seconds of a layer call. The fast side's computing is not free here: the same cores do it."""
        rest = misses - fetched
        if not hits + fetched:
            return known["control_pool"] + known["whole"](rest)
        if not misses:
            return known["control"] + known["fast_whole"](hits)
        here = known["alone"](rest) + known["fast"](hits)
        return known["control_apart"] + (self.beside_link(known, here, fetched) if fetched else here)

    def beside_link(self, known: dict, here: float, fetched: int) -> float:
        """Seconds of `here` seconds' computing, had the link not run, and of each fetched expert when it has come.

        The emulated wire copies, then waits until the wire's time is over: beside computing the copy is slow, but only what it
        takes beyond that time shows. Computing is slow beside a copy, not beside a wait.
        """
        slower, wire = known["shared"].expert / known["alone"].expert, known["size"] / known["link"]
        now, work, came, computed = 0.0, here, 0, 0
        began, left = 0.0, known["size"]  # when the copy under way began, its bytes to come
        while work > 0 or computed < fetched:
            copying = came < fetched and left > 0
            events = [work * slower if copying else work] if work > 0 else []
            if copying:
                events.append(left / known["link_beside" if work > 0 else "copy"])
            elif came < fetched:
                events.append(max(0.0, began + wire - now))
            passed = min(events)
            now += passed
            if copying:
                left -= passed * known["link_beside" if work > 0 else "copy"]
                left = 0.0 if left < 1 else left
            elif came < fetched and now >= began + wire - 1e-9:
                came, began, left = came + 1, now, known["size"]
            work -= passed / (slower if copying else 1.0) if work > 0 else 0.0
            work = 0.0 if work < 1e-9 else work
            if work == 0 and came > computed:
                work, computed = known["fast"](came - computed), came
        return now

    def decode(self, steps: int) -> tuple[list[dict], list[dict[str, object]]]:
        """What was known in each turn, and each mode's steps beside what they should have been."""
        turns = [self.calibrate()]
        known = turns[0]
        rates = Rates(known["link"], known["size"] / known["alone"].expert, known["size"] / known["shared"].expert)
        runs = [Run(self, mode, rates, steps) for mode in ("host", "offload", "hybrid")]
        for run in runs:
            run.go(COLD, known)
        for turn in range(TURNS):
            if turn:
                turns.append(self.calibrate())
            for run in runs:
                run.go(steps // TURNS, turns[-1])
        return turns, [run.close() for run in runs]

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

    def batch(self, rows: int = 8, seconds: float = 1.0) -> dict[str, float]:
        """Milliseconds of a layer in place: one row; `rows` through the same experts; as many through other ones, in turns."""
        own = (torch.arange(rows * self.top_k) % self.experts).int().view(rows, -1)
        picks = {"one": own[:1], "same": own[:1].expand(rows, -1).contiguous(), "apart": own}
        times: dict[str, list[float]] = {name: [] for name in picks}
        until, turn = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            bank, turn = self.banks[turn % self.layers], turn + 1
            for name, ids in picks.items():
                x, weights = torch.randn(len(ids), self.hidden), torch.full(ids.shape, 1 / self.top_k)
                began = time.perf_counter()
                self.ops.moe(x, ids, weights, *self.of(bank))
                times[name].append(1e3 * (time.perf_counter() - began))
        return {name: statistics.median(each) for name, each in times.items()}

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


class Run:
    """Decode steps in one mode: what they took and what was predicted."""

    def __init__(self, bench: Bench, mode: str, rates: Rates, steps: int) -> None:
        self._bench, self._mode, self._experts = bench, mode, bench.executor(mode, rates)
        self._trace = synthesize(bench.layers, bench.experts, bench.top_k, steps + COLD, seed=1, **LOCALITY)
        self._ids = iter(torch.from_numpy(self._trace.ids.astype("int32")).split(1))
        self._times: list[float] = []
        self._expected: list[float] = []

    def go(self, steps: int, known: dict) -> None:
        bench, counts = self._bench, self._experts.slots.counts
        weights = torch.full((1, bench.top_k), 1 / bench.top_k)
        for _ in range(steps):
            time_s = expected = 0.0
            for layer in range(bench.layers):
                hits, misses, fetched = counts.hits, counts.misses, counts.fetched
                x, ids = torch.randn(1, bench.hidden), next(self._ids)
                began = time.perf_counter()
                self._experts.run(layer, x, ids, weights)
                time_s += time.perf_counter() - began
                expected += bench.predict(known, counts.hits - hits, counts.misses - misses, counts.fetched - fetched)
            self._times.append(time_s)
            self._expected.append(expected)

    def close(self) -> dict[str, object]:
        self._experts.close()
        # medians: a step during which the host ran somebody else says nothing about the model
        measured, predicted = (statistics.median(t[COLD:]) for t in (self._times, self._expected))
        c = self._experts.slots.counts
        return {
            "mode": self._mode,
            "step_ms": 1e3 * measured,
            "predicted_ms": 1e3 * predicted,
            "error": measured / predicted - 1,
            "errors": self._by_turn(),
            "miss_rate": c.misses / (c.hits + c.misses),
            "fetched_of_misses": c.fetched / max(1, c.misses),
            "locality": vars(measure_locality(self._trace)) if self._mode == "offload" else None,
        }

    def _by_turn(self) -> list[float]:
        each = (len(self._times) - COLD) // TURNS
        starts = range(COLD, COLD + TURNS * each, each)
        return [
            statistics.median(self._times[i : i + each]) / statistics.median(self._expected[i : i + each]) - 1 for i in starts
        ]


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
    torch.set_num_threads(1)  # as in the engine: a copy that waits for a second thread waits for the kernels' cores
    out = {"machine": machine.describe(ROOT), "kind": args.kind, "runs": []}
    for link in args.link:
        bench = Bench(args.kind, layers=3, experts=32, top_k=8, slots=40, link=link * 1e9, small=args.small)
        share, own = machine.Share.start(), time.process_time()
        turns, decoded = bench.decode(args.steps)
        known = turns[-1]
        rate, size = known["link"] / 1e9, known["size"]
        print(
            f"link {link} GB/s ({rate:.2f} measured), expert {size / 1e6:.2f} MB, control "
            f"{', '.join(f'{1e6 * known[name]:.0f}' for name in ('control', 'control_pool', 'control_apart'))} us"
        )
        for name in ("whole", "alone", "shared", "fast_whole", "fast"):
            c = known[name]
            each = ", ".join(f"{n}: {1e3 * t:.2f}" for n, t in zip(c.counts, c.seconds, strict=True))
            print(f"  {name:10} ms of {each}; {size / c.expert / 1e9:.1f} GB/s", flush=True)
        run = {
            "link": link,
            "known": [{k: vars(v) if isinstance(v, Cost) else v for k, v in turn.items()} for turn in turns],
            "decode": decoded,
            "prefill": [],
        }
        for o in decoded:
            print(
                f"  {o['mode']:8} step {o['step_ms']:7.2f} ms, predicted {o['predicted_ms']:7.2f} ({o['error']:+.1%}; by turn "
                f"{', '.join(f'{e:+.0%}' for e in o['errors'])}), misses {o['miss_rate']:.0%}, "
                f"fetched {o['fetched_of_misses']:.0%} of them"
            )
        run["others"] = share.foreign(time.process_time() - own)
        print(f"  others used {run['others']:.0%} of the machine meanwhile")
        run["batch"] = bench.batch()
        print(f"  a layer in place, ms: {', '.join(f'{name} {ms:.2f}' for name, ms in run['batch'].items())}")
        run["neighbours"] = bench.neighbours()
        print(f"  with a busy process on every core: {run['neighbours']['share']:.0%} of the steps a second")
        for rows in args.rows:
            times = {how: bench.prefill(rows, known, how) for how in ("demand", "ahead", "chosen")}
            run["prefill"].append({"rows": rows, **times})
            save(args.out, {**out, "runs": [*out["runs"], run]})  # after each size: the largest take minutes
            print(f"  {rows:4} rows: " + ", ".join(f"{how} {1e3 * t:.1f} ms" for how, t in times.items()))
        out["runs"].append(run)
    save(args.out, out)


def save(path: Path | None, figures: dict) -> None:
    if path:
        path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
