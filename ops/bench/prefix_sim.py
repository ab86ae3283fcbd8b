#!/usr/bin/env python3
"""Replay block traces of real agent sessions through the engine's own cache, without a model: policy quality in minutes.

    python ops/bench/prefix_sim.py TRACES --users 1 --disk-gib 128
    python ops/bench/prefix_sim.py TRACES --users 2 --disk-gib 32 --model hybrid --rivals

TRACES is a directory of sessions as JSON: `requests` with `t` (seconds), `in` (tokens) and `hash_ids` (one a 64-token block), and
sub-agents nested in them. Tree, tiers, policy, planning and accounting are `engine.prefix`; only tensors and files are left out.
The ideal prefills what the session never sent before, and writes each new token (and one state a request) once.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.ipc import Anchor  # noqa: E402
from engine.prefix.base import OutOfPages  # noqa: E402
from engine.prefix.cache import RadixCache  # noqa: E402
from engine.prefix.disk import DiskConfig  # noqa: E402
from engine.prefix.ledger import Ledger  # noqa: E402
from engine.prefix.store import Outcome, WriteJob  # noqa: E402
from ops.bench.prefix_result import Result, table  # noqa: E402
from ops.bench.prefix_rivals import Density, PlainLru, snapshots  # noqa: E402
from ops.bench.prefix_traffic import BLOCK, GIB, SHAPES, Request, Shape, interleave, longest, sessions, working_set  # noqa: E402

# --- an engine without tensors


class NoTensors:
    """`Storage` of nothing."""

    page = BLOCK

    def __init__(self, shape: Shape) -> None:
        self.row_bytes, self.state_bytes = shape.row_bytes, shape.state_bytes
        self.page_bytes = shape.row_bytes * BLOCK

    def copy_page(self, source: int, target: int) -> None: ...

    def save(self, slot: int) -> object:
        return True

    def load(self, blob: object, slot: int) -> None: ...

    def clear(self, slot: int) -> None: ...

    def write_rows(self, *args: object) -> None: ...

    def unpack(self, data: object) -> object:
        return True


class NoDisk:
    """`DiskStore` that finishes every job at once and keeps nothing."""

    directory = "nowhere"
    pending = pending_pages = others = 0

    def __init__(self) -> None:
        self._done: list[Outcome] = []
        self.errors: list[str] = []

    def load(self) -> Ledger:
        return Ledger()

    def condense(self) -> None: ...

    def submit(self, job: WriteJob) -> None:
        self._done.append(Outcome(job))

    def collect(self, wait_s: float = 0.0) -> list[Outcome]:
        done, self._done = self._done, []
        return done

    def read(self, *args: object) -> object:
        return True

    def read_in_turn(self, wanted: list) -> Iterator[object]:
        return (True for _ in wanted)

    def note(self, frame: object) -> None: ...

    def sweep(self, known: set[int], before: float) -> None: ...


# --- the runs


def run(requests: list[Request], users: int, shape: Shape, ram_gib: float, disk_gib: float, policy: str = "moorage") -> Result:
    """All requests through one cache."""
    began = time.perf_counter()
    clock = [0.0]
    storage = NoTensors(shape)
    states = int(ram_gib * GIB / 2) if shape.state_bytes else 0
    pages = int((ram_gib * GIB - states) // storage.page_bytes)
    disk = DiskConfig(budget=int(disk_gib * GIB), daily_bytes=1 << 60, ttl_s=1e12) if disk_gib else None
    cache = RadixCache(
        storage,
        pages=pages,
        slots=2,
        state_budget=states,
        disk=disk,
        store=NoDisk() if disk else None,
        clock=lambda: clock[0],
        wall=lambda: clock[0],
    )
    if policy != "moorage":
        rival = {"plain-lru": PlainLru, "density": Density}[policy]
        cache.ram.page_order, cache.ram.state_order = rival(pages), rival(states)
        if cache.disk is not None:
            cache.disk.index.order = rival(disk.budget)
    spent, reused = Counter(), Counter()
    lost: Counter[str] = Counter()
    for request in requests:
        clock[0] = request.at
        lease = _serve(cache, request)
        match, size = lease.match, len(request.tokens)
        spent.update(prompt=size, prefilled=size - match.common, ideal=size - match.common - match.lost)
        reused[match.source] += match.common
        if match.lost:
            lost[match.reason] += match.lost
    written = cache.disk.counters["stored_bytes"] if cache.disk is not None else 0
    due = spent["ideal"] * shape.row_bytes + len(requests) * shape.state_bytes
    total = max(1, sum(reused.values()))
    return Result(
        policy,
        users,
        ram_gib,
        disk_gib,
        len(requests),
        spent["prompt"] / 1e6,
        spent["ideal"] / 1e6,
        spent["prefilled"] / spent["ideal"],
        written / GIB,
        written / due,
        (reused["ram"] + reused["live"]) / total,
        reused["disk"] / total,
        cache.counters["thrash"],
        dict(lost),
        time.perf_counter() - began,
    )


def _serve(cache: RadixCache, request: Request):
    size = len(request.tokens)
    kinds = zip(("tools", "system"), request.fixed, strict=True)
    anchors = [Anchor(offset=offset, kind=kind, weight=1.0) for kind, offset in kinds if 0 < offset < size]
    anchors.append(Anchor(offset=size - 8, kind="turn"))  # before the generation prompt
    lease = cache.open(request.tokens, session=request.session, anchors=anchors)
    at = lease.match.common
    try:
        while at < size:
            at = lease.next_stop(at, size)
            lease.grow(at)
            lease.checkpoint(request.tokens[:at])
    except OutOfPages as e:
        raise SystemExit(f"a prompt of {size} tokens does not fit: {e}; raise --ram-gib") from None
    lease.grow(size + 1)
    lease.close(request.tokens, "stop")
    return lease


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--users", type=int, nargs="+", default=[1])
    parser.add_argument("--model", choices=sorted(SHAPES), default="attention")
    parser.add_argument("--ram-gib", type=float, default=40.0, help="memory for pages and states together")
    parser.add_argument("--disk-gib", type=float, default=128.0, help="0 = no disk tier")
    parser.add_argument(
        "--storm",
        action="store_true",
        help="budgets of 1/8 of what the running sessions need (memory: at least the longest prompt)",
    )
    parser.add_argument("--rivals", action="store_true", help="plain LRU, density score and whole-prefix snapshots as well")
    parser.add_argument("--sessions", type=int, default=0, help="only the first N")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # a line per event is for servers
    shape = SHAPES[args.model]
    found = sessions(args.traces)[: args.sessions or None]
    results: list[Result] = []
    for users in args.users:
        requests = interleave(found, users)
        ram, disk = args.ram_gib, args.disk_gib
        if args.storm:
            disk = working_set(requests, shape) / GIB / len(found) * users / 8
            ram = max(disk, longest(requests, shape) / GIB * (2 if shape.state_bytes else 1))  # states get half of it
        for policy in ("moorage", "plain-lru", "density") if args.rivals else ("moorage",):
            results.append(run(requests, users, shape, ram, disk, policy))
            print(table(results[-1:]).splitlines()[-1], f"[{results[-1].seconds:.0f} s]", file=sys.stderr)
        if args.rivals:
            results.append(snapshots(requests, users, shape, disk))
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
