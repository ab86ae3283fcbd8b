"""Recorded agent sessions as traffic for the prefix simulator: block traces -> requests in the order of their arrival."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GIB = 1 << 30
BLOCK = 64  # tokens a hash of the traces stands for
PAUSE_S = 300.0  # between two sessions of one user


@dataclass(frozen=True)
class Shape:
    """Bytes a token's KV rows and a recurrent state take, bfloat16 KV."""

    row_bytes: int
    state_bytes: int


SHAPES = {
    "attention": Shape(48 * 4 * 128 * 2 * 2, 0),  # Qwen3-30B-A3B: 48 layers, 4 KV heads of 128
    "hybrid": Shape(10 * 2 * 256 * 2 * 2, 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 4)),  # Qwen3.5-35B-A3B: 10 attention, 30 DeltaNet
}


@dataclass(frozen=True)
class Request:
    at: float
    session: str
    agent: str  # "" for the main conversation
    tokens: np.ndarray  # int32, one id a token
    fixed: tuple[int, int]  # ends of tools and of system text


def sessions(folder: Path) -> list[list[Request]]:
    """The sessions of `folder`, each as its requests in order. Raises SystemExit when there are none."""
    found, base = [], 0
    for path in sorted(folder.glob("*.json")):
        trace = json.loads(path.read_text())
        requests = list(_requests(trace, trace["requests"], trace["id"], "", 0.0, base))
        base += 1 + max(int(r.tokens.max()) // BLOCK - base for r in requests)
        found.append(sorted(requests, key=lambda r: r.at))
    if not found:
        raise SystemExit(f"no traces in {folder}: give a directory of session JSON files")
    return found


def _requests(owner: dict, entries: list[dict], session: str, agent: str, start: float, base: int) -> Iterator[Request]:
    tools = owner.get("tool_tokens", 0) // BLOCK * BLOCK
    fixed = (tools, (tools + owner.get("system_tokens", 0)) // BLOCK * BLOCK)
    for entry in entries:
        if entry["type"] == "subagent":
            yield from _requests(entry, entry["requests"], session, entry["agent_id"], start + entry["t"], base)
        elif entry.get("hash_ids"):
            blocks = np.asarray(entry["hash_ids"], np.int32) + base
            tokens = (blocks[:, None] * BLOCK + np.arange(BLOCK, dtype=np.int32)).reshape(-1)
            yield Request(start + entry["t"], session, agent, tokens, fixed)


def interleave(all_sessions: list[list[Request]], users: int) -> list[Request]:
    """`users` people work side by side, each through their share of the sessions, one after the other."""
    streams = []
    for user in range(users):
        now, stream = 0.0, []
        for requests in all_sessions[user::users]:
            stream += [Request(now + r.at, r.session, r.agent, r.tokens, r.fixed) for r in requests]
            now = stream[-1].at + PAUSE_S
        streams.append(stream)
    return list(heapq.merge(*streams, key=lambda r: r.at))


def working_set(requests: list[Request], shape: Shape) -> int:
    """Bytes that all sessions together would take, each token once."""
    blocks: dict[str, list[np.ndarray]] = {}
    for request in requests:
        blocks.setdefault(request.session, []).append(request.tokens[::BLOCK])
    return sum(len(np.unique(np.concatenate(b))) for b in blocks.values()) * BLOCK * shape.row_bytes


def longest(requests: list[Request], shape: Shape) -> int:
    """Bytes of KV of the longest prompt, a page for its answer and one for a shared page's copied tail."""
    return (max(len(r.tokens) for r in requests) + 3 * BLOCK) * shape.row_bytes
