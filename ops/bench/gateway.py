#!/usr/bin/env python3
"""What the gateway costs: time to first token, time per chunk, requests a second, other streams' delay, memory.

    ops/bench/gateway.py --out docs/results/gateway.json [--litellm VENV/bin/python] [--rounds 5] [--soak 100000]

One gateway process with its normal configuration (keys, records, every policy) stands before a fake upstream (`sse_upstream.py`);
a load client (`load.py`) asks the upstream directly, the gateway, two pass-throughs that look at nothing, and LiteLLM's proxy
with hooks that do the same, in turns inside every round. Client and upstream are processes of their own on the same machine; the
direct figures show what they can do. `asgi` (`gateway_asgi.py`: uvicorn and aiohttp) is the yardstick: the stack of ours
with nothing in it, so that figures of different machines can be held against each other; `bare` (`gateway_bare.py`) has none.
The tables give medians over rounds; the JSON keeps every sample with the share of the machine that others used.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gateway_bodies as bodies
import gateway_peers as peers
import machine

ROOT = Path(__file__).resolve().parents[2]

SIZES = (0.3, 40, 200)  # KB of messages: a question, a session after some turns, a long one
LONG = 1.0  # KB from which a request is one of a conversation
CONCURRENCY = (8, 64)
CHUNK_EVENTS = 256  # as in sse_upstream
MAX_FOREIGN = 0.1  # above this share of the machine in others' hands a measurement is made once more
TRIES = 2
BIG_PAUSE_S = 0.1  # between two 200 KB requests while other streams are watched


@dataclass(frozen=True)
class Sample:
    """One measurement: `values` are microseconds, or counts, by name."""

    cell: str
    target: str
    round: int
    values: dict[str, float]
    foreign: float


@dataclass
class Bench:
    client: peers.Client
    targets: list[peers.Target]
    seconds: float
    samples: list[Sample] = field(default_factory=list)

    def ask(
        self, target: peers.Target, groups: list[dict[str, Any]], seconds: float
    ) -> tuple[list[dict[str, Any]], float, float]:
        """(what each group got, CPU seconds the target used, share of the machine that others used), others out of the way."""
        for _ in range(TRIES):
            share, ours, cpu = machine.Share.start(), peers.own_seconds(), target.cpu_seconds()
            got = self.client.run({"seconds": seconds, "groups": groups})
            used, foreign = target.cpu_seconds() - cpu, share.foreign(peers.own_seconds() - ours)
            if foreign <= MAX_FOREIGN:
                break
        return got, used, foreign

    def measure(self, cell: str, number: int, target: peers.Target, kind: str, size: float, **more: Any) -> None:
        """`size` from LONG on: an agent's conversations, of which each request repeats the one before."""
        one = (
            target.session(bodies.session(size), bodies.SESSION) if size >= LONG else target.group(kind, bodies.body(kind, size))
        )
        group = one | more
        (got,), cpu, foreign = self.ask(target, [group], self.seconds)
        if got["bad"] or not got["count"]:
            raise SystemExit(f"{target.name}, {cell}: {got['bad']} bad answers of {got['count']}: {got['sample'][:600]}")
        bodies.check(kind, got["sample"])
        values = {"count": got["count"], "per_second": got["count"] / got["seconds"], "cpu_us": cpu / got["count"] * 1e6}
        for name in ("first", "opening", "total", "stamps"):
            if got[name]:
                values |= {f"{name}_{q}": quantile(got[name], q) for q in (50, 95, 99)}
        self.samples.append(Sample(cell, target.name, number, values, round(foreign, 3)))

    def round(self, number: int) -> None:
        """Every cell once with every target; the order turns round from one round to the next."""
        order = self.targets if number % 2 else self.targets[::-1]
        for size in SIZES:
            for target in order:
                self.measure(f"ttft {size:g} KB", number, target, "plain", size)
        for target in order:
            self.measure("chunks", number, target, "chunks", 0.3)
            self.measure("paced", number, target, "paced", 0.3, stamps=True)
        for kind in ("plain", "calls"):
            for concurrency in CONCURRENCY:
                for target in order:
                    self.measure(f"{kind} x{concurrency}", number, target, kind, 0.3, concurrency=concurrency)

    def beside(self, number: int, target: peers.Target, seconds: float) -> None:
        """How late events of other streams are while 200 KB requests come in, against the same without them."""
        streams = target.group("paced", bodies.body("paced", 0.3)) | {"stamps": True, "concurrency": 4}
        big = target.group("plain", bodies.body("plain", 200)) | {"pause": BIG_PAUSE_S}
        for cell, groups in (("beside nothing", [streams]), ("beside 200 KB", [streams, big])):
            got, _, foreign = self.ask(target, groups, seconds)
            late = got[0]["stamps"]
            values = {f"late_{q}": quantile(late, q) for q in (50, 99, 99.9)} | {"late_max": max(late), "count": len(late)}
            self.samples.append(Sample(cell, target.name, number, values, round(foreign, 3)))

    def health(self, number: int, target: peers.Target, seconds: float) -> None:
        """GET /health while four clients send 1 MB bodies."""
        big = target.group("plain", bodies.body("plain", 1000)) | {"concurrency": 4}
        look = target.health() | {"pause": 0.005}
        got, _, foreign = self.ask(target, [look, big], seconds)
        values = {f"health_{q}": quantile(got[0]["total"], q) for q in (50, 99)} | {
            "count": got[0]["count"],
            "bad": got[0]["bad"],
        }
        values["big_per_second"] = got[1]["count"] / got[1]["seconds"]
        self.samples.append(Sample("health beside 1 MB", target.name, number, values, round(foreign, 3)))

    def run(self, args: argparse.Namespace) -> None:
        for number in range(0 if args.skip_rounds else args.rounds + 1):
            self.round(number)
            if number == 0:
                self.samples.clear()  # warm-up: imports, pools, compiled schemas
        for number in range(3 if args.beside else 0):
            for target in self.targets:
                self.beside(number, target, args.beside)
                self.health(number, target, args.beside)
        if args.soak:
            self.soak(self.targets[1], args.soak)

    def soak(self, target: peers.Target, requests: int) -> None:
        """Resident memory while `requests` go through, in ten steps."""
        for step in range(11):
            self.samples.append(
                Sample("memory", target.name, step, {"requests": requests * step / 10, "rss_mb": target.resident_mb()}, 0.0)
            )
            if step < 10:
                kind = ("plain", "calls")[step % 2]
                group = target.group(kind, bodies.body(kind, 0.3)) | {"concurrency": 16, "requests": requests // 10}
                (got,) = self.client.run({"seconds": 600, "groups": [group]})
                if got["bad"]:
                    raise SystemExit(f"soak: {got['bad']} bad answers: {got['sample'][:600]}")


def quantile(values: list[int], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def median(samples: list[Sample], cell: str, target: str, name: str) -> float | None:
    found = [s.values[name] for s in samples if (s.cell, s.target) == (cell, target) and name in s.values]
    return statistics.median(found) if found else None


def added(samples: list[Sample], cell: str, target: str, name: str, direct: str = "") -> float | None:
    """The median over rounds of what `target` adds to the direct figure (`direct` names another one) of the same round."""
    base = {s.round: s.values[direct or name] for s in samples if s.cell == cell and s.target == "direct"}
    ours = [s for s in samples if (s.cell, s.target) == (cell, target) and s.round in base and name in s.values]
    found = [s.values[name] - base[s.round] for s in ours]
    return statistics.median(found) if found else None


def tables(samples: list[Sample], names: list[str]) -> Iterator[str]:
    """Markdown: one table a question."""
    others = [n for n in names if n != "direct"]
    yield "| added to the time to first token, ms | " + " | ".join(f"{n} p50 | {n} p95" for n in others) + " | direct p50 |"
    yield "|---" * (2 + 2 * len(others)) + "|"
    for size in SIZES:
        cell = f"ttft {size:g} KB"
        cells = [_ms(added(samples, cell, n, q, "first_50")) for n in others for q in ("first_50", "first_95")]
        yield f"| {size:g} KB of messages | " + " | ".join([*cells, _ms(median(samples, cell, "direct", "first_50"))]) + " |"
        if size >= LONG:
            cells = [_ms(added(samples, cell, n, q, "first_50")) for n in others for q in ("opening_50", "opening_95")]
            yield f"| {size:g} KB, first request of its conversation | " + " | ".join([*cells, ""]) + " |"
    yield ""
    yield "| streams | " + " | ".join(names) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for what, cell, name, scale in (
        ("256 events back to back: whole answer, ms", "chunks", "total_50", 1000),
        ("events every 5 ms: age at the client p50, us", "paced", "stamps_50", 1),
        ("events every 5 ms: CPU of the process per event, us", "paced", "cpu_us", 100),
    ):
        yield f"| {what} | " + " | ".join(_figure(median(samples, cell, n, name), scale) for n in names) + " |"
    yield ""
    yield "| streamed requests/s (CPU of the process per request, ms) | " + " | ".join(names) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for kind, what in (("plain", "nothing looks into the stream"), ("calls", "tool check and thinking verification")):
        for concurrency in CONCURRENCY:
            cell = f"{kind} x{concurrency}"
            cells = [
                f"{median(samples, cell, n, 'per_second') or 0:,.0f} ({_ms(median(samples, cell, n, 'cpu_us'))})" for n in names
            ]
            yield f"| {what}, {concurrency} clients | " + " | ".join(cells) + " |"
            if "asgi" in names:
                cells = [_share(samples, cell, n) for n in names]
                yield f"| the same, share of asgi's, {concurrency} clients | " + " | ".join(cells) + " |"
    yield ""


def beside_table(samples: list[Sample], names: list[str]) -> Iterator[str]:
    yield "| other requests | " + " | ".join(names) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for cell in ("beside nothing", "beside 200 KB"):
        for q in ("late_50", "late_99", "late_99.9", "late_max"):
            yield (
                f"| age of an event, {cell}, {q[5:]}, ms | " + " | ".join(_ms(median(samples, cell, n, q)) for n in names) + " |"
            )
    for q in ("health_50", "health_99"):
        cells = [_ms(median(samples, "health beside 1 MB", n, q)) for n in names]
        yield f"| GET /health beside four clients with 1 MB bodies, p{q[7:]}, ms | " + " | ".join(cells) + " |"
    yield ""


def _share(samples: list[Sample], cell: str, target: str) -> str:
    """Requests a second over those of the yardstick, paired by round."""
    of = {s.round: s.values["per_second"] for s in samples if (s.cell, s.target) == (cell, "asgi")}
    found = [s.values["per_second"] / of[s.round] for s in samples if (s.cell, s.target) == (cell, target) and s.round in of]
    return f"{statistics.median(found):.2f}" if found else "-"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1000:.2f}"


def _figure(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value / scale:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON with every sample")
    parser.add_argument("--litellm", type=Path, help="python of an environment with litellm[proxy]: measured beside ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--skip-rounds", action="store_true", help="only --beside and --soak")
    parser.add_argument("--beside", type=float, default=4.0, help="seconds of each measurement of other streams; 0 = none")
    parser.add_argument("--soak", type=int, default=0, help="requests of the memory test")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp, ExitStack() as stack:
        upstream = stack.enter_context(peers.Upstream())
        targets = [peers.Direct(upstream.port), stack.enter_context(peers.Gateway(Path(tmp), upstream.port))]
        targets += [stack.enter_context(peers.Asgi(upstream.port)), stack.enter_context(peers.Bare(upstream.port))]
        if args.litellm:
            targets.append(stack.enter_context(peers.LiteLLM(Path(tmp), upstream.port, args.litellm.absolute())))
        idle = {t.name: t.resident_mb() for t in targets[1:]}
        bench = Bench(stack.enter_context(peers.Client()), targets, args.seconds)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; what was measured so far follows"))
        try:
            bench.run(args)
        finally:
            report(bench.samples, [t.name for t in targets], idle, args)


def report(everything: list[Sample], names: list[str], idle: dict[str, float], args: argparse.Namespace) -> None:
    samples = [s for s in everything if s.foreign <= MAX_FOREIGN]
    if len(samples) < len(everything):
        print(f"left out, because others used the machine: {len(everything) - len(samples)} of {len(everything)} measurements\n")
    if not args.skip_rounds:
        print("\n".join(tables(samples, names)))
        for name in names[1:]:
            more = (added(samples, "chunks", name, "total_50") or 0) - (added(samples, "chunks", name, "first_50") or 0)
            print(f"{name}: {more / CHUNK_EVENTS:.1f} us added per event of a stream of {CHUNK_EVENTS}, after the first")
    if args.beside:
        print("\n".join(beside_table(samples, names)))
    print("idle, MB resident: " + ", ".join(f"{name} {mb:.0f}" for name, mb in idle.items()))
    for s in samples:
        if s.cell == "memory":
            print(f"after {s.values['requests']:,.0f} requests: {s.values['rss_mb']:.1f} MB")
    if args.out:
        data = {
            "machine": machine.describe(ROOT),
            "command": sys.argv,
            "idle_mb": idle,
            "samples": [asdict(s) for s in everything],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
