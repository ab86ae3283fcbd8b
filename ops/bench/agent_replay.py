#!/usr/bin/env python3
"""Replay recorded chat requests, byte for byte, against any OpenAI endpoint and say what each turn cost.

    ops/bench/agent_replay.py REQUESTS.jsonl --url http://127.0.0.1:8008 --control live
    ops/bench/agent_replay.py REQUESTS.jsonl --control disk --restart "systemctl restart moorage"

REQUESTS has one request body a line, as a client sent it (streaming, with `stream_options.include_usage` for token figures). The
controls tell a cache from luck: `live` sends the file as it is; `cold` gives every request another first character of text, so
that nothing can be reused; `hot` sends each request twice and counts the second; `disk` restarts the server between turns;
`negative` is `hot` with the first text changed in between: nothing but the template's own opening may hit. The first token counts
on any channel.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

CONTROLS = ("live", "cold", "hot", "disk", "negative")
OPENING = 16  # tokens a chat template writes before the first text of a conversation
READY_S = 600.0  # a server may load a large model after a restart
CHANNELS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class ReplayError(Exception):
    """One line: what stopped the replay."""


@dataclass(frozen=True)
class Turn:
    """What one request cost. Token counts are the server's own; -1 where it does not say."""

    number: int
    kind: str  # first | user | tool | edit | restart
    ttft_s: float
    total_s: float
    prompt: int
    cached: int
    lost: int


def classify(bodies: list[dict]) -> list[str]:
    """first: nothing before it; edit: an earlier message changed; tool: ends with a tool result; user: anything else."""
    kinds, before = [], []
    for body in bodies:
        messages = body.get("messages", [])
        kept = [m for m, old in zip(messages, before, strict=False) if m == old]
        if not before:
            kinds.append("first")
        elif len(kept) < len(before):
            kinds.append("edit")
        else:
            kinds.append("tool" if messages[-1].get("role") == "tool" else "user")
        before = messages
    return kinds


def salted(body: dict, salt: str) -> dict:
    """The same request with `salt` in front of its first text, so that it shares no prefix with the original."""
    first, *rest = body["messages"]
    content = first.get("content") or ""
    if isinstance(content, list):
        head = {**content[0], "text": salt + content[0].get("text", "")}
        return {**body, "messages": [{**first, "content": [head, *content[1:]]}, *rest]}
    return {**body, "messages": [{**first, "content": salt + content}, *rest]}


def events(response: http.client.HTTPResponse) -> Iterator[dict]:
    """The JSON objects of a server-sent event stream."""
    for line in response:
        text = line.strip()
        if text.startswith(b"data:") and text[5:].strip() != b"[DONE]":
            yield json.loads(text[5:])


def send(url: str, data: bytes, key: str, timeout: float) -> tuple[float, float, dict]:
    """(seconds to the first token on any channel, seconds in total, usage). Raises ReplayError."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    began, first, usage = time.perf_counter(), 0.0, {}
    try:
        connection.request("POST", f"{parts.path.rstrip('/')}/v1/chat/completions", data, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ReplayError(f"status {response.status}: {response.read(500).decode('utf-8', 'replace')}")
        for event in events(response):
            if "error" in event:
                raise ReplayError(f"the stream broke: {event['error']}")
            deltas = [c.get("delta", {}) for c in event.get("choices", ())]
            if not first and any(d.get(channel) for d in deltas for channel in CHANNELS):
                first = time.perf_counter() - began
            usage = usage_of(event) or usage
    except OSError as e:
        raise ReplayError(f"{url}: {e}") from None
    finally:
        connection.close()
    total = time.perf_counter() - began
    return first or total, total, usage


def usage_of(event: dict) -> dict:
    """Prompt, cached and lost tokens, in OpenAI's form or llama-server's."""
    if event.get("usage"):
        usage = event["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        lost = (usage.get("moorage") or {}).get("lost", -1)
        found = {"prompt": usage["prompt_tokens"], "cached": -1 if cached is None else cached, "lost": lost}
    else:
        found = {}
    timings = event.get("timings")
    if timings and "cache_n" in timings:
        found |= {"prompt": timings["cache_n"] + timings["prompt_n"], "cached": timings["cache_n"]}
    return found


def wait_ready(url: str) -> None:
    parts = urlsplit(url)
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        try:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # not listening yet
        time.sleep(0.2)
    raise ReplayError(f"{url} was not ready {READY_S:.0f} s after the restart")


def replay(lines: list[bytes], url: str, control: str, restart: Callable[[], None], key: str, timeout: float) -> list[Turn]:
    """Send all requests in order; `restart` restarts the server (control `disk`). Raises ReplayError."""
    bodies = [json.loads(line) for line in lines]
    turns = []
    for number, (line, body, kind) in enumerate(zip(lines, bodies, classify(bodies), strict=True)):
        data = line
        if control == "cold":
            data = json.dumps(salted(body, f"{secrets.token_hex(8)} ")).encode()
        elif control in ("hot", "negative"):
            send(url, line, key, timeout)
            data = line if control == "hot" else json.dumps(salted(body, f"{secrets.token_hex(8)} ")).encode()
        elif control == "disk" and number:
            restart()
            wait_ready(url)
            kind = "restart"
        first, total, usage = send(url, data, key, timeout)
        turn = Turn(number, kind, first, total, usage.get("prompt", -1), usage.get("cached", -1), usage.get("lost", -1))
        print(f"{number:4} {kind:8} ttft {first:8.3f} s  prompt {turn.prompt:7}  cached {turn.cached:7}", file=sys.stderr)
        turns.append(turn)
    return turns


def written_bytes(url: str) -> int:
    """What the server has written to its disk cache, -1 where it does not say."""
    parts = urlsplit(url)
    try:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        connection.request("GET", "/v1/cache/status")
        disk = json.loads(connection.getresponse().read()).get("disk") or {}
        return int(disk["counters"].get("stored_bytes", 0))
    except (OSError, ValueError, KeyError, AttributeError):
        return -1


def summary(turns: list[Turn], written: int) -> dict:
    """Medians and tails by class, the tool/other multiplier per new token, hit rate in tokens, lost tokens."""
    by_kind = {}
    for kind in dict.fromkeys(t.kind for t in turns):
        times = sorted(t.ttft_s for t in turns if t.kind == kind)
        p90 = times[min(len(times) - 1, int(len(times) * 0.9))]
        by_kind[kind] = {"turns": len(times), "ttft_p50_s": statistics.median(times), "ttft_p90_s": p90}
    known = [t for t in turns if t.prompt >= 0 and t.cached >= 0]

    def per_new_token(tool: bool) -> float | None:
        costs = [t.ttft_s / max(1, t.prompt - t.cached) for t in known if (t.kind == "tool") == tool]
        return statistics.median(costs) if costs else None

    tool, other = per_new_token(True), per_new_token(False)
    prompt = sum(t.prompt for t in known)
    return {
        "classes": by_kind,
        "tool_over_other": tool / other if tool and other else None,
        "hit_rate_tokens": sum(t.cached for t in known) / prompt if prompt else None,
        "lost_tokens": sum(t.lost for t in turns if t.lost >= 0),
        "written_gib": written / (1 << 30) if written >= 0 else None,
    }


def run_restart(command: str) -> None:
    if subprocess.run(command, shell=True).returncode:
        raise ReplayError(f"the restart command failed: {command}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8008")
    parser.add_argument("--control", choices=CONTROLS, default="live")
    parser.add_argument("--restart", default="", help="command that restarts the server, for --control disk")
    parser.add_argument("--key", default="none")
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--json", type=Path, help="write every turn and the summary here")
    args = parser.parse_args()
    try:
        if args.control == "disk" and not args.restart:
            raise ReplayError("--control disk needs --restart COMMAND")
        raw = args.requests.read_bytes()
        lines = [line for line in raw.splitlines() if line.strip()]
        if not lines:
            raise ReplayError(f"{args.requests} holds no requests")
        print(f"sha256 {hashlib.sha256(raw).hexdigest()}  {args.requests.name}  {len(lines)} requests  control {args.control}")
        before = written_bytes(args.url)
        turns = replay(lines, args.url, args.control, lambda: run_restart(args.restart), args.key, args.timeout)
        after = written_bytes(args.url)
    except (ReplayError, OSError, ValueError) as e:
        raise SystemExit(f"agent_replay: {e}") from None
    result = summary(turns, after - before if before >= 0 and after >= before else after)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"summary": result, "turns": [asdict(t) for t in turns]}, indent=1) + "\n")
    if args.control == "negative" and max(t.cached for t in turns) > OPENING:
        raise SystemExit("agent_replay: the negative control was answered from a cache: the figures cannot be trusted")


if __name__ == "__main__":
    main()
