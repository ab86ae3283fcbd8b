#!/usr/bin/env python3
"""From nothing to the first token: our engine's start against llama-server's, files cold and warm, and the most memory each held.

    ops/bench/engine_start.py --model FILE --llama-server BUILD/bin/llama-server [--pack DIRECTORY] --out docs/results/NAME.json

Cold: the files are dropped from the page cache before (posix_fadvise; only clean pages go, so nothing may be writing them). Every
round starts each engine once cold and once warm, one after the other, in alternating order, and asks for one token. With `--pack`
ours starts once more from packed experts (`moorage engine pack`), mapped as llama-server maps its file. `weights`: our time
from opening the checkpoint to having all weights where they are computed on, imports aside. `disk`: a plain read of that file.

With `--prompts SIZES` instead: files warm, one token behind a new prompt of each size as soon as an engine is ready, and behind
others a second time. What is read, imported or touched for whoever asks first shows as the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402
from engine_http import ROOT, LlamaServer, Ours, Server, free_port, llama_command, our_command, prompt_of, running  # noqa: E402

CONTEXT = 2048
SETTLE_S = 6.0  # in which ours reads what it leaves for later: it counts as held


@dataclass(frozen=True)
class Start:
    what: str
    cold: bool
    round: int
    ready: float  # seconds to the first "healthy"
    first_token: float  # seconds to the first token of a prompt of 16
    weights: float | None  # seconds of ours for weights alone, as its log says
    peak_bytes: int
    foreign: float  # share of the machine that others used, 0..1


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def drop(paths: list[Path]) -> None:
    """Take the files out of the page cache."""
    os.sync()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(path: Path) -> float:
    """Bytes per second of a plain read of `path`, cold."""
    drop([path])
    began, size = time.perf_counter(), 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(8 << 20)
        while count := file.readinto(buffer):
            size += count
    return size / (time.perf_counter() - began)


def start(what: str, kind: type[Server], command: list[str], port: int, log: str, cold: bool, number: int) -> Start:
    said = Path(log).stat().st_size if Path(log).is_file() else 0
    share, began = machine.Share.start(), time.perf_counter()
    with running(kind, command, port, log) as server:
        server.stream(prompt_of(16, 16), 1)
        first = time.perf_counter() - began
        foreign = share.foreign(server.cpu_seconds())
        time.sleep(SETTLE_S if kind is Ours else 0.0)
        peak = server.peak_bytes()
        found = re.search(rb" weights .*\bs=([0-9.]+)", Path(log).read_bytes()[said:]) if Path(log).is_file() else None
        weights = float(found[1]) if found else None
        return Start(what, cold, number, server.ready, first, weights, peak, foreign)


def measure(args: argparse.Namespace) -> tuple[list[Start], list[float]]:
    starts, rates = [], []
    kinds = {"moorage": Ours, "llama.cpp": LlamaServer} | ({"moorage, packed": Ours} if args.pack else {})
    paths = files_of(args.model) + (files_of(args.pack) if args.pack else [])
    for number in range(args.rounds):
        rates.append(read_rate(max(files_of(args.model), key=lambda p: p.stat().st_size)))
        for what in kinds if number % 2 == 0 else reversed(kinds):
            for cold in (True, False):
                port = free_port()
                options = [*shlex.split(args.engine_options), *(["--experts-pack", str(args.pack)] if "packed" in what else [])]
                command = our_command(args.model, args.threads, options, port)
                if kinds[what] is LlamaServer:
                    command = llama_command(args.llama_server, args.model, args.threads, CONTEXT, 1, port)
                if cold:
                    drop(paths)
                starts.append(start(what, kinds[what], command, port, args.log, cold, number))
                print(f"# {starts[-1]}", file=sys.stderr, flush=True)
    return starts, rates


def measure_prompts(args: argparse.Namespace) -> list[dict]:
    """Of each round and engine, seconds to the token behind each prompt, in order."""
    found = []
    for number in range(args.rounds):
        for kind in (Ours, LlamaServer) if number % 2 == 0 else (LlamaServer, Ours):
            port = free_port()
            command = our_command(args.model, args.threads, shlex.split(args.engine_options), port)
            if kind is LlamaServer:
                command = llama_command(args.llama_server, args.model, args.threads, CONTEXT, 1, port)
            with running(kind, command, port, args.log) as server:
                seconds = [server.stream(prompt_of(size, 1000 * i + size), 1).first for i in (0, 1) for size in args.prompts]
            found.append({"what": kind.name, "round": number, "seconds": seconds})
            print(f"# {found[-1]}", file=sys.stderr, flush=True)
    return found


def summarise_prompts(found: list[dict], sizes: list[int]) -> list[dict]:
    rows = []
    for place, (time_, size) in enumerate((time_, size) for time_ in ("first", "second") for size in sizes):
        ours, theirs = ([f["seconds"][place] for f in found if f["what"] == kind.name] for kind in (Ours, LlamaServer))
        row = {"prompt": size, "time": time_, "moorage": statistics.median(ours), "llama.cpp": statistics.median(theirs)}
        row["ratio to llama.cpp"] = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        rows.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    return rows


def summarise(starts: list[Start], weights: int) -> list[dict]:
    rows = []
    for what, cold in dict.fromkeys((s.what, s.cold) for s in starts):
        mine = [s for s in starts if (s.what, s.cold) == (what, cold)]
        row = {"what": what, "files": "cold" if cold else "warm", "rounds": len(mine)}
        row |= {name: round(statistics.median(getattr(s, name) for s in mine), 2) for name in ("ready", "first_token")}
        if all(s.weights is not None for s in mine):
            row["weights"] = round(statistics.median(s.weights for s in mine), 3)
        rows.append(row | {"peak of weights": round(max(s.peak_bytes for s in mine) / weights, 3)})
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, for both")
    parser.add_argument("--llama-server", type=Path, required=True, help="path of llama-server")
    parser.add_argument("--pack", type=Path, help="the same model's packed experts")
    parser.add_argument("--prompts", type=lambda text: [int(size) for size in text.split(",")], help="sizes, instead of starts")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads for both (default: all cores)")
    parser.add_argument("--engine-options", default="", help="more options for our engine, as one string")
    parser.add_argument("--log", default=os.devnull, help="file for the engines' output")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    weights = sum(p.stat().st_size for p in files_of(args.model))
    if args.prompts:
        read_rate(args.model)
        found = measure_prompts(args)
        rows, raw = summarise_prompts(found, args.prompts), {"prompts": found}
    else:
        starts, rates = measure(args)
        rows, raw = summarise(starts, weights), {"disk_bytes_s": rates, "starts": [asdict(s) for s in starts]}
        print(f"disk: {statistics.median(rates) / 1e9:.2f} GB/s, {weights / 1e9:.2f} GB")
    for row in rows:
        print(row)
    if args.out:
        command = shlex.join([Path(sys.argv[0]).name, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])
        result = {"machine": machine.describe(ROOT), "command": command, "weights": weights, "summary": rows}
        args.out.write_text(json.dumps(result | raw, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
