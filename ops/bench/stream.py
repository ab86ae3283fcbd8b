#!/usr/bin/env python3
"""A pool twice as large as its memory, read from a packed file: answers compared, speed beside what the disk gives.

    ops/bench/stream.py --scratch DIRECTORY [--gib 2.4] [--out docs/results/NAME.json]

Random experts of a 30B-A3B model in bfloat16 are packed; slots get half of their bytes. The disk's own rate is measured before
and after every part, with the same number of readers and the same record size, without the engine. Filling slots for everything
takes turns with reading the file from its beginning. Then single tokens with the routing locality of the demo
model, and prompt chunks, run through the executor; some results are compared bit for bit with the pool in memory. A token can be
no faster than the disk brings what it misses (`bound_ms`), nor than it is computed with everything in memory (`in_memory_ms`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
import machine  # noqa: E402
from timeline import WHY, Timeline  # noqa: E402

from engine.build import choose_kernels  # noqa: E402
from engine.experts.calibrate import HIDDEN, INTER, random_weight  # noqa: E402
from engine.experts.executor import TieredExperts  # noqa: E402
from engine.experts.filepool import PIECE, READERS, Pack  # noqa: E402
from engine.experts.pack import write_pack  # noqa: E402
from engine.experts.split import Rates  # noqa: E402
from engine.experts.trace import synthesize  # noqa: E402
from engine.hostmem import huge  # noqa: E402
from engine.nn.experts import Bank  # noqa: E402
from engine.packing import stream_tier  # noqa: E402

LAYERS, TOP_K = 4, 8
DEPTHS = (1, 2, 4, 8)  # readers at once
LOCALITY = {"zipf": 0.6, "stick": 0.3}  # near what the demo model's own routing measures


def bank(experts: int, layer: int, shape: tuple[int, int]) -> Bank:
    hidden, inter = shape
    torch.manual_seed(layer)
    up = random_weight("BF16", experts, 2 * inter, hidden)
    down = random_weight("BF16", experts, hidden, inter)
    up += torch.arange(experts)[:, None, None].to(up.dtype) / 256  # every expert its own bytes
    return Bank(up, down, "silu")


class Disk:
    """Reads of `size` bytes at random places of a file of `record`s, nothing but reading, into huge pages that are there."""

    def __init__(self, path: Path, record: int) -> None:
        self.handle, self.record, self.count = os.open(path, os.O_RDONLY | os.O_DIRECT), record, path.stat().st_size // record
        self.buffers = [memoryview(huge(record)) for _ in range(max(DEPTHS))]
        self.chance = random.Random(0)

    def rate(self, seconds: float, readers: int, size: int = 0) -> float:
        """Bytes per second, `readers` at once; `size` 0 is a whole record."""
        size = size or self.record
        moved, stop = [0] * readers, time.perf_counter() + seconds

        def read(number: int) -> None:
            into = [self.buffers[number][:size]]
            while time.perf_counter() < stop:
                at = self.chance.randrange(self.count) * self.record + self.chance.randrange(self.record // size) * size
                moved[number] += os.preadv(self.handle, into, at)

        began = time.perf_counter()
        at_once([lambda i=i: read(i) for i in range(readers)])
        return sum(moved) / (time.perf_counter() - began)

    def rates(self, seconds: float) -> tuple[float, ...]:
        """Of whole records, and of the pieces that packs are read in."""
        return tuple(self.rate(seconds / 2, READERS, size) for size in (self.record, min(self.record, PIECE)))


def sequential_rate(path: Path) -> float:
    """Bytes per second of the whole file from its beginning, READERS direct reads at once, of the better of two sizes."""
    return max(read_whole(path, 4 << 20), read_whole(path, 16 << 20))


def read_whole(path: Path, piece: int) -> float:
    handle, size, lock = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size, threading.Lock()
    places = iter(range(0, size, piece))

    def read() -> None:
        buffer = memoryview(huge(piece))[:piece]
        while True:
            with lock:
                at = next(places, None)
            if at is None:
                return
            os.preadv(handle, [buffer], at)

    began = time.perf_counter()
    at_once([read] * READERS)
    os.close(handle)
    return size / (time.perf_counter() - began)


def at_once(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Oracle:
    """Knows what comes and is right about `share` of it, as a real predictor is; else it names what other tokens used there."""

    def __init__(self, share: float, calls: list) -> None:
        self.share, self.chance, self.next = share, random.Random(0), []
        self.used = [torch.cat([call[2] for call in calls if call[0] == layer]).view(-1).tolist() for layer in range(LAYERS)]

    def predict(self, layer: int, x: torch.Tensor, top_k: int) -> list[int]:
        if layer + 1 == LAYERS or len(x) > 1:
            return []
        named = [e if self.chance.random() < self.share else self.chance.choice(self.used[layer + 1]) for e in self.next]
        return list(dict.fromkeys(named))


def drive(
    experts: TieredExperts, calls: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]], oracle: Oracle | None = None
) -> dict[str, float]:
    before, moved, busy = experts.slots.counts.fetched, experts.link.bytes, experts.link.busy_s
    hits, misses = experts.slots.counts.hits, experts.slots.counts.misses
    began = time.perf_counter()
    for i, call in enumerate(calls):
        if oracle:
            oracle.next = calls[i + 1][2][0].tolist() if i + 1 < len(calls) else []
        experts.run(*call)
    seconds, c = time.perf_counter() - began, experts.slots.counts
    return {
        "seconds": seconds,
        "tokens": sum(len(x) for layer, x, *_ in calls if layer == 0),
        "bytes_per_s": (experts.link.bytes - moved) / seconds,
        "ms_per_token": 1e3 * seconds / max(1, sum(len(x) for layer, x, *_ in calls if layer == 0)),
        "reading": (experts.link.busy_s - busy) / seconds,
        "fetched": c.fetched - before,
        "misses": c.misses - misses,
        "miss_rate": (c.misses - misses) / max(1, c.misses - misses + c.hits - hits),
    }


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.ops, self.shape = choose_kernels("auto", 0), (256, 256) if args.small else (HIDDEN, INTER)
        self.experts = max(16, int(args.gib * 2**30 / LAYERS / (3 * self.shape[0] * self.shape[1] * 2)))
        self.args, self.seconds, self.disk = args, 0.1 if args.small else 0.5, []
        self.directory = args.scratch / "stream-bench.pack"
        shutil.rmtree(self.directory, ignore_errors=True)
        began = time.perf_counter()
        self.truth = lambda layer: bank(self.experts, layer, self.shape)
        index = write_pack(self.directory, "bench", LAYERS, self.truth, lambda done, total: None)
        self.pool_bytes, self.pack_s = index.size, time.perf_counter() - began
        (self.pool,) = Pack(self.directory).pools
        self.reader = Disk(self.directory / "experts.bin", self.pool.expert_bytes)

    def executor(self, share: float, oracle: Oracle | None = None) -> TieredExperts:
        rate = self.disk_rate(self.disk[-1])
        slots = int(LAYERS * self.experts * share)
        return TieredExperts(self.pool, self.ops, stream_tier(self.pool, slots, Rates(rate, rate, 0.0), self.args.policy), oracle)

    def look(self) -> tuple[float, ...]:
        """The disk's own rates now: they change with what the host does, so they are measured beside everything."""
        self.disk.append(self.reader.rates(self.seconds))
        return self.disk[-1]

    def disk_rate(self, *looks: tuple[float, ...]) -> float:
        """Bytes per second in these, by the way that is the better one over all looks: in one alone it may be luck."""
        way = max(range(len(self.disk[0])), key=lambda i: statistics.median(look[i] for look in self.disk))
        return statistics.mean(look[way] for look in looks)

    def ceiling(self, rounds: int = 5) -> dict[str, dict[str, float]]:
        """Bytes per second by what is read at once and by how many, in turns: what a deeper queue would give."""
        sizes = {"record": self.reader.record, "piece": min(self.reader.record, PIECE)}
        seen: dict[str, dict[str, list[float]]] = {name: {str(n): [] for n in DEPTHS} for name in sizes}
        for _ in range(rounds):
            for name, size in sizes.items():
                for readers in DEPTHS:
                    seen[name][str(readers)].append(self.reader.rate(self.seconds / 4, readers, size))
        return {name: {n: statistics.median(rates) for n, rates in found.items()} for name, found in seen.items()}

    def load(self, rounds: int = 3) -> dict[str, float]:
        """Filling slots for everything, against reading the file from its beginning; in turns, the first round left out."""
        filled, read = [], []
        for _ in range(rounds + 1):
            read.append(sequential_rate(self.directory / "experts.bin"))
            experts = self.executor(1.0)
            began = time.perf_counter()
            experts.preload(lambda size: None)
            filled.append(self.pool_bytes / (time.perf_counter() - began))
            experts.close()
        found = {"load_bytes_per_s": statistics.median(filled[1:]), "sequential_bytes_per_s": statistics.median(read[1:])}
        return {**found, "share": found["load_bytes_per_s"] / found["sequential_bytes_per_s"]}

    def decode(self, calls: list, blocks: int = 8) -> dict[str, dict]:
        """Without and with predictions in turns, after a first half that only fills the slots.

        The host keeps some of what was read: who goes first changes from turn to turn.
        """
        oracle = Oracle(self.args.predicted, calls)
        ways = {"decode": (self.executor(0.5), None), "decode, predicted": (self.executor(0.5, oracle), oracle)}
        size, half = len(calls) // 2 // blocks // LAYERS * LAYERS, len(calls) // 2
        found: dict[str, list] = {name: [] for name in ways}
        noted = {name: Timeline(experts) for name, (experts, _) in ways.items()}
        idle: dict[str, list] = {name: [] for name in ways}
        for experts, own in ways.values():
            drive(experts, calls[:half], own)
        for block in range(blocks):
            for name, (experts, own) in sorted(ways.items(), reverse=block % 2 == 1):
                before = self.look()
                with noted[name] as timeline:
                    timeline.reads.clear(), timeline.calls.clear()
                    part = drive(experts, calls[half + block * size : half + (block + 1) * size], own)
                idle[name].append(timeline.idle())
                found[name].append((part, before, self.look()))
        for experts, _ in ways.values():
            experts.close()
        found = {name: [self._beside_disk(*part) for part in parts] for name, parts in found.items()}
        middle = {name: {key: statistics.median(p[key] for p in parts) for key in parts[0]} for name, parts in found.items()}
        # what was read ahead is no miss there: both need the same experts
        middle["decode, predicted"]["bound_ms"] = middle["decode"]["bound_ms"]
        for part in middle.values():
            part["of_bound"] = part["bound_ms"] / part["ms_per_token"]
        for name, rows in idle.items():
            middle[name]["ms_of_a_token"] = {why: statistics.median(row[why] for row in rows) for why in WHY}
            middle[name]["last_tokens"] = noted[name].lines(2)
        middle["decode, predicted"]["predictions"] = ways["decode, predicted"][0].status()["predictions"]
        return middle

    def _beside_disk(self, part: dict[str, float], *looks: tuple[float, ...]) -> dict[str, float]:
        rate = self.disk_rate(*looks)
        bound = 1e3 * part["misses"] * self.pool.expert_bytes / rate / part["tokens"]
        return {**part, "of_disk": part["bytes_per_s"] / rate, "bound_ms": bound}

    def in_memory(self, calls: list) -> dict[str, float]:
        """Milliseconds of a token whose experts all lie in slots; the disk's rate while such tokens are computed."""
        experts = self.executor(1.0)
        experts.preload(lambda size: None)
        drive(experts, calls[: len(calls) // 2])
        found = {"in_memory_ms": drive(experts, calls[len(calls) // 2 :])["ms_per_token"]}
        reading = threading.Thread(target=lambda: found.update(disk_beside=max(self.reader.rates(2 * self.seconds))))
        reading.start()
        while reading.is_alive():
            drive(experts, calls[:LAYERS])
        experts.close()
        return found

    def prefill(self, chunks: list) -> tuple[dict, TieredExperts]:
        experts = self.executor(0.5)
        before = self.look()
        found = drive(experts, chunks)
        return {**found, "of_disk": found["bytes_per_s"] / self.disk_rate(before, self.look())}, experts

    def equal(self, experts: TieredExperts, *runs: list) -> str:
        same = 0
        for layer in range(LAYERS):
            truth = self.truth(layer)
            for calls in runs:
                want = self.ops.moe(*calls[layer][1:], truth.gate_up, truth.down, "silu")
                same += torch.equal(experts.run(*calls[layer]), want)
        return f"{same} of {len(runs) * LAYERS}"

    def decode_calls(self) -> list:
        trace = synthesize(LAYERS, self.experts, TOP_K, 2 * self.args.tokens, seed=1, **LOCALITY)
        weights, rows = torch.full((1, TOP_K), 1 / TOP_K), torch.from_numpy(trace.ids.astype("int32")).split(1)
        return [(i % LAYERS, torch.randn(1, self.shape[0]), ids, weights) for i, ids in enumerate(rows)]

    def chunk_calls(self) -> list:
        calls = []
        for n in range(3 * LAYERS):
            weight, ids = torch.rand(256, self.experts).topk(TOP_K)
            calls.append((n % LAYERS, torch.randn(256, self.shape[0]), ids.int(), weight.contiguous()))
        return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="directory for the pack, on the disk to measure")
    parser.add_argument("--gib", type=float, default=2.4)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--policy", default="lru")
    parser.add_argument(
        "--predicted",
        type=float,
        default=0.75,
        help="share of predictions that are right; so many that 65 %% of what is read ahead is used, as measured",
    )
    parser.add_argument("--small", action="store_true", help="small experts, to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    out = {"machine": machine.describe(ROOT), "pool_bytes": bench.pool_bytes, "pack_s": bench.pack_s}
    print(f"{bench.pool_bytes / 2**30:.2f} GiB packed in {bench.pack_s:.1f} s")
    try:
        for _ in range(3):  # the first passes verify checksums and warm what the host keeps of the disk
            sequential_rate(bench.directory / "experts.bin")
            bench.look()
        out["by_readers"] = bench.ceiling()
        for size, found in out["by_readers"].items():
            print(f"disk, a {size} by readers, GB/s:", ", ".join(f"{n}: {rate / 1e9:.2f}" for n, rate in found.items()))
        out["load"] = bench.load()
        o = out["load"]
        load, whole = o["load_bytes_per_s"] / 1e9, o["sequential_bytes_per_s"] / 1e9
        print(f"load: {load:.2f} GB/s, the file read from its beginning {whole:.2f} GB/s: {o['share']:.0%}")
        calls, chunks = bench.decode_calls(), bench.chunk_calls()
        share, own = machine.Share.start(), time.process_time()
        out |= bench.decode(calls)
        out |= bench.in_memory(calls)
        out["prefill"], experts = bench.prefill(chunks)
        out["others"] = share.foreign(time.process_time() - own)
        alone = statistics.median(map(bench.disk_rate, bench.disk)) / 1e9
        print(f"the disk gives {alone:.2f} GB/s, {out['disk_beside'] / 1e9:.2f} while the processor computes in memory")
        print(f"others used {out['others']:.0%} of the machine meanwhile")
        for name in ("decode", "decode, predicted", "prefill"):
            o = out[name]
            print(
                f"{name}: {o['tokens'] / o['seconds']:.1f} tok/s through {LAYERS} layers, {o['miss_rate']:.0%} misses, "
                f"{o['bytes_per_s'] / 1e9:.2f} GB/s = {o['of_disk']:.0%} of the disk, reading {o['reading']:.0%} of the time"
            )
            if "of_bound" in o:
                print(
                    f"  {o['ms_per_token']:.1f} ms a token, {o['bound_ms']:.1f} of them to read its misses at the disk's rate: "
                    f"{o['of_bound']:.0%} of the bound; {out['in_memory_ms']:.1f} ms with all in memory"
                )
                print("  ms of a token:", ", ".join(f"{why} {ms:.1f}" for why, ms in o["ms_of_a_token"].items()))
                print("  ", o.get("predictions", ""))
        out["disk_bytes_per_s"] = bench.disk
        out["equal"] = bench.equal(experts, calls, chunks)
        print(f"bit for bit equal: {out['equal']}")
        experts.close()
    finally:
        shutil.rmtree(bench.directory, ignore_errors=True)
    if args.out:
        args.out.write_text(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
