#!/usr/bin/env python3
"""Turn a recorded session of the pi coding agent into request files for agent_replay.py: one chat completion body a line.

    ops/bench/agent_requests.py SESSION.jsonl OUT --tokens 8192

Writes `OUT.live.jsonl`: a first request of three quarters of `--tokens`, then one a turn up to `--tokens`, then the first tool
output behind the middle replaced by a placeholder (an edit at 50 %), and the turn after it. `OUT.cold.jsonl` is the last request
before the edit alone, `OUT.restart.jsonl` the two last ones before it, `OUT.user.jsonl` the live requests before the edit with
the tools' results said by the user: turns of the same size of another class, to compare tool turns with. Long texts are cut to
`--text` characters, so that turns cost about the same; sizes count `--chars` characters a token, which depends on the model's
tokenizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

SYSTEM = (
    "You are a coding agent. You read and change files of the user's project with the tools you are given, run its tests, "
    "and say briefly what you did. Keep to the style of the code around you. "
) * 8
PLACEHOLDER = "[old tool output removed to save room]"
Message = dict[str, Any]


def messages(session: list[dict], most: int) -> list[Message]:
    """The session as chat messages: tool calls with their results behind them, empty and aborted answers left out."""
    out: list[Message] = [{"role": "system", "content": SYSTEM}]
    open_calls: set[str] = set()
    for entry in session:
        if entry["type"] != "message":
            continue
        said = entry["message"]
        text = "\n".join(p["text"] for p in said["content"] if p["type"] == "text")[:most]
        if said["role"] == "toolResult":
            if said["toolCallId"] in open_calls:
                out.append({"role": "tool", "tool_call_id": said["toolCallId"], "content": text or "(no output)"})
                open_calls.discard(said["toolCallId"])
            continue
        if open_calls:  # an aborted turn: its calls were never answered
            while out[-1]["role"] != "assistant":
                out.pop()
            out.pop()
            open_calls = set()
        calls = [
            {
                "id": p["id"],
                "type": "function",
                "function": {"name": p["name"], "arguments": json.dumps(_cut(p["arguments"], most))},
            }
            for p in said["content"]
            if p["type"] == "toolCall"
        ]
        if said["role"] == "assistant" and (text or calls):
            out.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
            open_calls = {c["id"] for c in calls}
        elif said["role"] == "user" and text:
            out.append({"role": "user", "content": text})
    return out


def _cut(arguments: dict, most: int) -> dict:
    return {k: v[:most] if isinstance(v, str) else v for k, v in arguments.items()}


def size(history: list[Message]) -> int:
    """Characters the model sees of `history`, about."""
    return sum(len(m["content"]) + sum(len(c["function"]["arguments"]) for c in m.get("tool_calls", ())) + 30 for m in history)


def asks(history: list[Message]) -> list[int]:
    """Where a request ends: before each answer."""
    return [n for n, m in enumerate(history) if m["role"] == "assistant" and n > 1]


def edited(history: list[Message]) -> list[Message]:
    """The first tool output behind the middle replaced by a placeholder."""
    half = size(history) / 2
    tools = [n for n, m in enumerate(history) if m["role"] == "tool" and m["content"] != PLACEHOLDER]
    place = next((n for n in tools if size(history[:n]) >= half), tools[-1])
    return [*history[:place], {**history[place], "content": PLACEHOLDER}, *history[place + 1 :]]


def said_by_user(history: list[Message]) -> list[Message]:
    """The same texts, tool results as user messages."""
    return [{"role": "user", "content": m["content"]} if m["role"] == "tool" else m for m in history]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", type=Path)
    parser.add_argument("out", help="prefix of the files to write")
    parser.add_argument("--tokens", type=int, default=8192, help="of the last prompt before the edit")
    parser.add_argument("--chars", type=float, default=3.3, help="characters a token")
    parser.add_argument("--text", type=int, default=1000, help="characters of one text at most")
    parser.add_argument("--answer", type=int, default=4, help="max_tokens of each request")
    parser.add_argument("--model", default="bench")
    args = parser.parse_args()
    history = messages([json.loads(line) for line in args.session.read_text().splitlines()], args.text)
    most = args.tokens * args.chars
    ends = [n for n in asks(history) if size(history[:n]) <= most]
    if size(history) <= most or len(ends) < 5:
        raise SystemExit(f"agent_requests: {args.session} is too short for {args.tokens} tokens")
    turns = [history[:n] for n in ends if size(history[:n]) >= most * 0.75]
    if not turns or not any(m["role"] == "tool" for m in turns[-1]):
        least = f"{0.75 * args.tokens:.0f}"
        raise SystemExit(
            f"agent_requests: no turn with a tool's result ends between {least} and {args.tokens} tokens; try other --tokens"
        )
    later = next(n for n in asks(history) if n > ends[-1])
    files = {
        "live": [*turns, edited(turns[-1]), [*edited(turns[-1]), *history[ends[-1] : later]]],
        "cold": turns[-1:],
        "restart": turns[-2:],
        "user": [said_by_user(turn) for turn in turns],
    }
    for name, requests in files.items():
        path = Path(f"{args.out}.{name}.jsonl")
        bodies = [
            {
                "model": args.model,
                "messages": request,
                "max_tokens": args.answer,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for request in requests
        ]
        data = "".join(json.dumps(body, ensure_ascii=False) + "\n" for body in bodies).encode()
        path.write_bytes(data)
        print(f"sha256 {hashlib.sha256(data).hexdigest()}  {path.name}  {len(bodies)} requests")


if __name__ == "__main__":
    main()
