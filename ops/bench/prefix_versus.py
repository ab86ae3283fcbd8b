#!/usr/bin/env python3
"""What an agent's turns cost with our engine and with llama-server, side by side on the same weights.

    ops/bench/agent_requests.py SESSION.jsonl /tmp/agent
    ops/bench/prefix_versus.py MODEL.gguf /tmp/agent --llama-server BUILD/bin/llama-server --out docs/results/NAME.json

Starts each server in turn on the same GGUF file and replays the same bytes (agent_replay.py), one control at a time: live (with
an edit), pairs (each tool turn beside a user's turn of the same size, two conversations on a server of their own), cold, hot,
negative, disk. The tool/other multiplier is the median over the pairs, in time a new token. llama-server runs with `--cache-
reuse`; for `disk` once as it is and once with its slot saved before the restart and restored behind it, by hand, as its users
would have to.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ops.bench import machine  # noqa: E402
from ops.bench.agent_replay import (  # noqa: E402
    OPENING,
    ReplayError,
    Turn,
    classify,
    replay,
    send,
    summary,
    wait_ready,
    written_bytes,
)

FILES = {
    "live": "live",
    "pairs": "user",
    "cold": "cold",
    "hot": "cold",
    "negative": "cold",
    "disk": "restart",
    "disk+slot": "restart",
}
STOP_S = 60.0


class Server:
    """One server process on a port of its own; `restart` ends it in order and starts it again."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.name, self.log = name, log
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.log.open("a") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        wait_ready(self.url)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOP_S)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def restart_with_slot(self) -> None:
        """Save llama-server's only slot, restart, restore it."""
        self._slot("save")
        self.restart()
        self._slot("restore")

    def _slot(self, action: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = json.dumps({"filename": "agent.bin"})
        connection.request("POST", f"/slots/0?action={action}", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ReplayError(f"slot {action}: status {answer.status}: {answer.read(300).decode(errors='replace')}")
        connection.close()


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.stop()


def moorage(args: argparse.Namespace, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "engine.cli", "serve", str(args.model), "--name", "bench", "--kv-disk", str(folder / "kv")]
    return [*command, "--max-context", str(args.context), "--threads", str(args.threads), *shlex.split(args.engine_options)]


def llama(args: argparse.Namespace, folder: Path) -> list[str]:
    command = [str(args.llama_server), "-m", str(args.model), "-c", str(args.context), "-t", str(args.threads), "-np", "1"]
    return [*command, "--jinja", "--cache-reuse", "256", "--slot-save-path", str(folder), *shlex.split(args.llama_options)]


def measure(server: Server, control: str, lines: list[bytes]) -> tuple[dict, list[Turn]]:
    restart = server.restart_with_slot if control == "disk+slot" else server.restart
    before = written_bytes(server.url)
    turns = replay(lines, server.url, control.removesuffix("+slot"), restart, "none", 3600.0)
    after = written_bytes(server.url)
    if control == "negative" and max(t.cached for t in turns) > OPENING:
        raise ReplayError("the negative control was answered from a cache: the figures cannot be trusted")
    return summary(turns, after - before if 0 <= before <= after else after), turns


def run(args: argparse.Namespace) -> list[dict]:
    """One entry an engine and control, in the order they ran. `live`, `pairs` and what restarts meet a fresh server."""
    makers = {"moorage": moorage, "llama-server": llama}
    alone = [[c] for c in FILES if c in args.controls and (c.startswith("disk") or c == "pairs")]
    staying = [c for c in FILES if c in args.controls and [c] not in alone]
    found = []
    for group in [staying, *alone] if staying else alone:
        for name in args.engines:
            if group == ["disk+slot"] and name == "moorage":
                continue
            with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
                server = Server(name, makers[name](args, Path(folder)), args.log)
                with running(server):
                    for control in group:
                        print(f"# {name} {control}", file=sys.stderr, flush=True)
                        if control == "pairs":
                            turns = in_pairs(server.url, lines_of(args, "live"), lines_of(args, "user"))
                            result = summary(turns, -1)
                        else:
                            result, turns = measure(server, control, lines_of(args, FILES[control]))
                        entry = {"engine": name, "control": control, "requests": Path(args.requests).name, "summary": result}
                        found.append({**entry, "turns": [asdict(t) for t in turns]})
    return found


def lines_of(args: argparse.Namespace, name: str) -> list[bytes]:
    return [line for line in Path(f"{args.requests}.{name}.jsonl").read_bytes().splitlines() if line.strip()]


def in_pairs(url: str, live: list[bytes], user: list[bytes]) -> list[Turn]:
    """Both conversations side by side, turn by turn; which of the two goes first changes every time."""
    talks = [list(zip(lines, classify([json.loads(x) for x in lines]), strict=True)) for lines in (live, user)]
    turns = []
    for number, pair in enumerate(zip(*talks, strict=False)):
        for line, kind in pair[:: -1 if number % 2 else 1]:
            first, total, usage = send(url, line, "none", 3600.0)
            turns.append(Turn(number, kind, first, total, usage["prompt"], usage["cached"], usage.get("lost", -1)))
    return turns


def table(found: list[dict]) -> str:
    """One row a class of turns: engines side by side, seconds to the first token and tokens reused."""
    lines = [
        "| engine | control | class | turns | TTFT p50, s | p90, s | hit rate | tool/other |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in found:
        result = entry["summary"]
        rate = "" if result["hit_rate_tokens"] is None else f"{result['hit_rate_tokens']:.3f}"
        ratio = "" if result["tool_over_other"] is None else f"{result['tool_over_other']:.2f}"
        for kind, figures in result["classes"].items():
            cells = [entry["engine"], entry["control"], kind, str(figures["turns"])]
            cells += [f"{figures['ttft_p50_s']:.2f}", f"{figures['ttft_p90_s']:.2f}", rate, ratio]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tool_over_other(found: list[dict]) -> dict[str, float]:
    """Engine -> median over the pairs of what a new token costs in seconds to the first token, tool turn over user's turn."""
    out = {}
    for entry in found:
        if entry["control"] != "pairs":
            continue
        cost = {(t["number"], t["kind"]): t["ttft_s"] / max(1, t["prompt"] - t["cached"]) for t in entry["turns"]}
        pairs = [tool / cost[n, "user"] for (n, kind), tool in cost.items() if kind == "tool" and (n, "user") in cost]
        out[entry["engine"]] = statistics.median(pairs)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file both engines load")
    parser.add_argument("requests", help="prefix of the files agent_requests.py wrote")
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--controls", nargs="+", choices=sorted(FILES), default=list(FILES))
    parser.add_argument("--engines", nargs="+", choices=["moorage", "llama-server"], default=["moorage", "llama-server"])
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--engine-options", default="", help="more options for our engine, as one string")
    parser.add_argument("--llama-options", default="", help="more options for llama-server, as one string")
    parser.add_argument("--scratch", type=Path, help="where caches and slot files go [the system's temporary directory]")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file for the servers' output")
    parser.add_argument("--out", type=Path, help="JSON file; entries of other controls in it are kept")
    args = parser.parse_args()
    try:
        found = run(args)
    except (ReplayError, OSError) as e:
        raise SystemExit(f"prefix_versus: {e}") from None
    print(table(found))
    print("tool/other, same sizes:", tool_over_other(found) or "needs the control pairs")
    if args.out:
        write(args, found)


def write(args: argparse.Namespace, found: list[dict]) -> None:
    kept = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    new = {(e["engine"], e["control"], e["requests"]) for e in found}
    before = json.loads(args.out.read_text())["requests"] if args.out.exists() else {}
    sums = before | {
        f"{Path(args.requests).name}.{name}.jsonl": hashlib.sha256(Path(f"{args.requests}.{name}.jsonl").read_bytes()).hexdigest()
        for name in sorted(set(FILES.values()))
    }
    command = shlex.join([Path(sys.argv[0]).name, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])
    head = {"machine": machine.describe(ROOT), "command": command, "requests": sums}
    runs = [e for e in kept if (e["engine"], e["control"], e["requests"]) not in new] + found
    args.out.parent.mkdir(parents=True, exist_ok=True)
    same = [e for e in runs if e["requests"] == Path(args.requests).name]
    ratios = {**before_ratios(args.out), Path(args.requests).name: tool_over_other(same)}
    args.out.write_text(json.dumps({**head, "tool_over_other": ratios, "runs": runs}, indent=1) + "\n")


def before_ratios(path: Path) -> dict[str, dict[str, float]]:
    return json.loads(path.read_text()).get("tool_over_other", {}) if path.exists() else {}


if __name__ == "__main__":
    main()
