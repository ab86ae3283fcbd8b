#!/usr/bin/env python3
"""Decode and prefill speed of our engine against llama.cpp's llama-bench on the same weights, interleaved.

    ops/bench/engine.py --model CHECKPOINT --gguf FILE --llama-bench BUILD/bin/llama-bench --out docs/results/NAME.json

Every round measures each cell with both engines, in alternating order, so that a busy minute hits both. Ours is measured from
outside, over HTTP: prefill is the prompt's length over the time to the first token; decode is the rate between first and last
token at a given depth, on a prompt that is already resident. llama-bench has no HTTP and no sampling in its figure. The table
gives medians and the median of the paired ratios; the JSON keeps every sample with the share of the machine that others used.
A round in which others used more than a tenth of it is left out of a cell's medians, unless all its rounds are like that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402
from engine_http import NOISY, ROOT, Cell, Ours, Server, free_port, our_command, prompt_of, running  # noqa: E402

TURN = 20  # tokens of a short user turn


@dataclass(frozen=True)
class Sample:
    engine: str
    kind: str
    size: int
    round: int
    tokens_per_second: float
    foreign: float  # share of the machine that others used, 0..1


class OverHttp:
    """Our engine behind its HTTP API."""

    name = Ours.name

    def __init__(self, server: Server, tokens: int) -> None:
        self.server, self.tokens = server, tokens
        self.cpu_seconds = server.cpu_seconds
        self._seed = 1 << 20  # of the next prompt nobody saw yet

    def measure(self, cell: Cell) -> float:
        if cell.kind == "prefill":
            self._seed += 1
            prompt = prompt_of(cell.size, self._seed)
            return len(prompt) / self.server.stream(prompt, 1).first
        if cell.kind == "turn":
            self._seed += 1
            resident = prompt_of(cell.size, cell.size)
            self.server.stream(resident, 1)
            return TURN / self.server.stream([*resident, *prompt_of(TURN, self._seed)], 1).first
        return self.server.stream(prompt_of(cell.size, cell.size), self.tokens).decode_rate


class LlamaBench:
    name = "llama.cpp"

    def __init__(self, program: Path, gguf: Path, threads: int, tokens: int) -> None:
        self.base = [str(program), "-m", str(gguf), "-t", str(threads), "-r", "1", "-o", "json"]
        self.tokens = tokens

    def cpu_seconds(self) -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def measure(self, cell: Cell) -> float:
        what = {
            "prefill": ["-p", str(cell.size), "-n", "0"],
            "decode": ["-p", "0", "-n", str(self.tokens), "-d", str(cell.size)],
            "turn": ["-p", str(TURN), "-n", "0", "-d", str(cell.size)],
        }[cell.kind]
        run = subprocess.run([*self.base, *what], capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"llama-bench failed: {run.stderr.strip().splitlines()[-1:]}")
        return float(json.loads(run.stdout)[0]["avg_ts"])


def run_rounds(engines: list, cells: list[Cell], rounds: int, warm_up: int) -> list[Sample]:
    """`warm_up` whole rounds are thrown away: first touch of pages and idle clocks make the first figures lie."""
    samples: list[Sample] = []
    for number in range(-warm_up, rounds):
        for cell in cells:
            for engine in engines if number % 2 == 0 else reversed(engines):
                share, own = machine.Share.start(), engine.cpu_seconds()
                speed = engine.measure(cell)
                foreign = share.foreign(engine.cpu_seconds() - own)
                print(
                    f"# {number:3} {cell.kind} {cell.size} {engine.name}: {speed:.1f} tok/s foreign={foreign:.0%}",
                    file=sys.stderr,
                    flush=True,
                )
                if number >= 0:
                    samples.append(Sample(engine.name, cell.kind, cell.size, number, speed, foreign))
    return samples


def summarise(samples: list[Sample], cells: list[Cell], peers: list[str]) -> list[dict]:
    """Medians per cell and engine; ratio = median over rounds of ours / peer in the same round."""
    rows = []
    for cell in cells:
        mine = _quiet([s for s in samples if (s.kind, s.size) == (cell.kind, cell.size)])
        speeds = {name: {s.round: s.tokens_per_second for s in mine if s.engine == name} for name in peers}
        row: dict = {"kind": cell.kind, "size": cell.size, "rounds": len(speeds[peers[0]])}
        row |= {name: round(statistics.median(values.values()), 2) for name, values in speeds.items()}
        ours = speeds["moorage"]
        for name in peers:
            if name != "moorage":
                row[f"ratio to {name}"] = round(statistics.median(ours[r] / speeds[name][r] for r in ours), 3)
        row["foreign"] = round(max(s.foreign for s in mine), 3)
        rows.append(row)
    return rows


def _quiet(samples: list[Sample]) -> list[Sample]:
    """The samples of one cell without its noisy rounds; all of them if every round is noisy."""
    noisy = {s.round for s in samples if s.foreign > NOISY}
    return [s for s in samples if s.round not in noisy] or samples


def table(rows: list[dict]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows])


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="what our engine loads: checkpoint directory or GGUF file")
    parser.add_argument("--gguf", type=Path, required=True, help="the same weights for llama.cpp")
    parser.add_argument("--llama-bench", type=Path, required=True, help="path of llama-bench")
    parser.add_argument("--prefill", type=numbers, default=[512, 2048], help="prompt lengths (default 512,2048)")
    parser.add_argument("--depth", type=numbers, default=[0, 2048], help="context lengths decode is measured at (default 0,2048)")
    parser.add_argument("--turn", type=numbers, default=[], help="resident prompts before a short turn (default none)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens decoded per sample (default 32)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before those (default 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads for both (default: all cores)")
    parser.add_argument("--engine-options", default="", help="more options for our engine, as one string")
    parser.add_argument("--log", default=os.devnull, help="file for our engine's output")
    parser.add_argument("--out", type=Path, help="JSON file for samples and summary")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    cells = [Cell("prefill", size) for size in args.prefill] + [Cell("decode", size) for size in args.depth]
    cells += [Cell("turn", size) for size in args.turn]
    port = free_port()
    command = our_command(args.model, args.threads, shlex.split(args.engine_options), port)
    with running(Ours, command, port, args.log) as server:
        engines = [OverHttp(server, args.tokens), LlamaBench(args.llama_bench, args.gguf, args.threads, args.tokens)]
        samples = run_rounds(engines, cells, args.rounds, args.warm_up)
    rows = summarise(samples, cells, [engine.name for engine in engines])
    print(table(rows))
    if args.out:
        command = shlex.join([Path(sys.argv[0]).name, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])
        result = {"machine": machine.describe(ROOT), "command": command, "unit": "tokens per second", "summary": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**result, "samples": [asdict(sample) for sample in samples]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
