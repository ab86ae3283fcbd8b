#!/usr/bin/env python3
"""What a token costs on its way to the client: CPU time of every thread of an engine, and the time between tokens.

    ops/bench/engine_threads.py --model FILE --llama-server BUILD/bin/llama-server --out docs/results/NAME.json
    ops/bench/engine_threads.py --model FILE --checkout OTHER,CHECKOUTS

Engines run side by side, each idle while another is measured, in alternating order. `--checkout` measures other checkouts of
this repository (each with its native module built) beside this one. Times are microseconds a token; a thread's `waits` are what
it was ready to run and had no core for, its `sleeps` how often it gave its core away.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_http  # noqa: E402
import machine  # noqa: E402
from engine_http import ROOT, LlamaServer, Ours, Server, free_port, llama_command, our_command, prompt_of, running  # noqa: E402

LEAST_US = 2.0  # a thread that needs less a token is not told
Counts = dict[tuple[int, int], tuple[str, float, float, int]]  # by process and thread: name, us run, us waited, sleeps


@dataclass(frozen=True)
class Sample:
    engine: str
    round: int
    gap_us: float  # median between two tokens of one answer
    tokens_per_second: float
    client_us: float  # CPU of the client itself, a token
    foreign: float
    threads: list[dict[str, object]]


def counts_of(pid: int) -> Counts:
    found: Counts = {}
    for process in machine.descendants(pid):
        for task in Path(f"/proc/{process}/task").iterdir():
            try:
                ran, waited, _ = (task / "schedstat").read_text().split()
                status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            except OSError:
                continue  # it ended
            sleeps = int(status["voluntary_ctxt_switches"])
            found[process, int(task.name)] = (status["Name"], int(ran) / 1e3, int(waited) / 1e3, sleeps)
    return found


def per_token(before: Counts, after: Counts, tokens: int) -> list[dict[str, object]]:
    """Busiest first."""
    out = []
    for key, (name, ran, waited, sleeps) in after.items():
        _, ran0, waited0, sleeps0 = before.get(key, (name, 0.0, 0.0, 0))
        if (ran - ran0) / tokens >= LEAST_US:
            spent = {"runs_us": round((ran - ran0) / tokens, 1), "waits_us": round((waited - waited0) / tokens, 1)}
            out.append({"name": name, "main": key[0] == key[1], **spent, "sleeps": round((sleeps - sleeps0) / tokens, 2)})
    return sorted(out, key=lambda thread: -thread["runs_us"])


def measure(name: str, server: Server, number: int, rows: int, tokens: int) -> Sample:
    prompts = [prompt_of(16, 1000 + 10 * number + i) for i in range(rows)]
    share, own, before, client = machine.Share.start(), server.cpu_seconds(), counts_of(server.pid), time.process_time()
    with ThreadPoolExecutor(rows) as pool:
        times = list(pool.map(lambda p: server.times(p, tokens), prompts))
    client, after = time.process_time() - client, counts_of(server.pid)
    gaps = [b - a for each in times for a, b in zip(each, each[1:], strict=False)]
    whole = max(each[-1] for each in times) - min(each[0] for each in times)
    threads = per_token(before, after, rows * tokens)
    rate, foreign = rows * (tokens - 1) / whole, share.foreign(server.cpu_seconds() - own)
    return Sample(name, number, statistics.median(gaps) * 1e6, rate, client / (rows * tokens) * 1e6, foreign, threads)


def summarise(samples: list[Sample]) -> list[dict[str, object]]:
    """Medians of the rounds others left alone (all, if there was none), and the threads of the fastest one."""
    rows = []
    for engine in dict.fromkeys(s.engine for s in samples):
        mine = [s for s in samples if s.engine == engine]
        mine = [s for s in mine if s.foreign <= engine_http.NOISY] or mine
        best = min(mine, key=lambda s: s.gap_us)
        names = ("gap_us", "tokens_per_second", "client_us")
        middle = {name: round(statistics.median(getattr(s, name) for s in mine), 1) for name in names}
        rows.append(
            {"engine": engine, "rounds": len(mine), **middle, "best_gap_us": round(best.gap_us, 1), "threads": best.threads}
        )
    return rows


def start(args: argparse.Namespace, stack: ExitStack) -> dict[str, Server]:
    engines = {}
    for root in (ROOT, *args.checkout):
        engine_http.ROOT, port = root, free_port()
        command = our_command(args.model, args.threads, [], port)
        engines["moorage" if root == ROOT else root.name] = stack.enter_context(running(Ours, command, port, os.devnull))
    if args.llama_server:
        port = free_port()
        command = llama_command(args.llama_server, args.model, args.threads, 8192, 4, port)
        engines["llama.cpp"] = stack.enter_context(running(LlamaServer, command, port, os.devnull))
    return engines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--llama-server", type=Path, help="path of llama-server, to be measured too")
    parser.add_argument("--checkout", type=lambda text: [Path(p) for p in text.split(",")], default=[], help="others, to compare")
    parser.add_argument("--rows", type=int, default=1, help="conversations at once (default 1)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads (default: all cores)")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    samples = []
    with ExitStack() as stack:
        engines = start(args, stack)
        for number in range(-1, args.rounds):  # the first round warms up
            for name in list(engines) if number % 2 else reversed(engines):
                sample = measure(name, engines[name], number, args.rows, args.tokens)
                print(
                    f"# {number:3} {name}: {sample.gap_us:.0f} us a token, foreign={sample.foreign:.0%}",
                    file=sys.stderr,
                    flush=True,
                )
                samples += [sample] if number >= 0 else []
    rows = summarise(samples)
    print(json.dumps(rows, indent=1))
    if args.out:
        command = shlex.join([Path(sys.argv[0]).name, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])
        result = {"machine": machine.describe(ROOT), "command": command, "summary": rows}
        args.out.write_text(json.dumps(result | {"samples": [vars(s) for s in samples]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
