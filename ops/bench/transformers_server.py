#!/usr/bin/env python3
"""transformers as one more engine behind HTTP for the speed benches: `POST /v1/completions` with token ids, streamed, greedy.

    ops/bench/transformers_server.py CHECKPOINT --port 9002 --threads 2

It answers one request after the other and keeps the caches of the last prompts, cropped to what a new prompt shares with them, so
that a turn behind a resident prompt costs it the new tokens only, as it does the other engines. Not a server for anybody's use.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

KEPT = 4  # caches of prompts


@dataclass
class Resident:
    tokens: list[int]
    cache: DynamicCache


class Engine:
    def __init__(self, checkpoint: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        self.model.set_experts_implementation("grouped_mm")  # its fastest on a CPU (shared by all tokens of a chunk)
        self.kept: list[Resident] = []

    def resident(self, prompt: list[int]) -> tuple[Resident, int]:
        """The kept cache that shares most with `prompt`, cropped to that, and how many tokens those are (never all)."""

        def shared(tokens: list[int]) -> int:
            pairs = zip(tokens, prompt[:-1], strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(prompt) - 1))

        best = max(self.kept, key=lambda r: shared(r.tokens), default=None)
        if best is None or not shared(best.tokens):
            best = Resident([], DynamicCache(config=self.model.config))
        else:
            self.kept.remove(best)
        known = shared(best.tokens)
        if known < len(best.tokens):
            best.cache.crop(known - len(best.tokens))  # by a negative count: others are refused
        self.kept = [*self.kept[-(KEPT - 1) :], best]
        return best, known

    @torch.inference_mode()
    def tokens(self, prompt: list[int], count: int):
        """Yields how many prompt tokens were computed, then `count` times the token that follows."""
        resident, known = self.resident(prompt)
        yield len(prompt) - known
        step = prompt[known:]
        resident.tokens = list(prompt)
        for number in range(count):
            out = self.model(torch.tensor([step]), past_key_values=resident.cache, use_cache=True, logits_to_keep=1)
            token = int(out.logits[0, -1].argmax())
            if number:
                resident.tokens.append(step[0])
            step = [token]
            yield token


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        tokens = self.engine.tokens(body["prompt"], body["max_tokens"])
        new = next(tokens)
        for token in tokens:
            self.event({"choices": [{"token": token}]})
        details = {"cached_tokens": len(body["prompt"]) - new}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
        self.event({"choices": [], "usage": usage})

    def event(self, event: dict) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """The bench says what it asks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    Handler.engine = Engine(args.checkpoint, args.threads)
    HTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
