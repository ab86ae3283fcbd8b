#!/usr/bin/env python3
"""What a machine allows steps and prompts with exact weights and activations: bytes at a plain read's rate, products at FMA's.

    ops/bench/roof.py --model FILE.gguf [--threads N] [--rounds 20]

`Roof` is what `engine_resident.py --roof` measures beside the engines, before and behind each of them. No engine that reads each
weight of a token once is faster than the read. Products of floats have FMA; 8 bits by words (`vpmaddwd`, x in two digits) have as
many, 4 bits by bytes (`vpmaddubsw`, x in three) a third more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from engine.hostmem import huge  # noqa: E402
from engine.kernels.cpu import CpuOps  # noqa: E402

ACTIVATION = 2  # bytes of an element of keys and values in llama.cpp's cache and ours
PART, PARTS = 128 << 20, 4  # bytes of one plain read, several times the last-level cache, and how many lie side by side
# Twelve sums: an FMA's latency of four times its two pipes, and some to spare.
SUMS = range(12)
SOURCE = """#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#ifdef __AVX512F__
enum { WIDTH = 64 };
#elif defined(__AVX2__)
enum { WIDTH = 32 };
#else
enum { WIDTH = 16 };
#endif
typedef float V __attribute__((vector_size(WIDTH)));
static const long TURNS = 10000000;
static volatile float source = 0.5f, sink;
static void multiply() {
    V a = {}, b = {};
    for (unsigned i = 0; i < WIDTH / 4; i++) a[i] = source, b[i] = source;
    V DECLARED;
    for (long i = 0; i < TURNS; i++) { PRODUCTS }
    sink = TOTAL;
}
int main(int, char** argv) {
    const int threads = atoi(argv[1]);
    while (getchar() != EOF) {
        const auto start = std::chrono::steady_clock::now();
        std::vector<std::thread> others;
        for (int t = 1; t < threads; t++) others.emplace_back(multiply);
        multiply();
        for (auto& t : others) t.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        printf("%.3f\\n", 2e-9 * sizeof(V) / sizeof(float) * NUMBER * TURNS * threads / took.count());
        fflush(stdout);
    }
}
"""
WORDS = {
    "DECLARED": ", ".join(f"s{i} = b * {i + 1}.0f" for i in SUMS),
    "PRODUCTS": " ".join(f"s{i} = a * s{i} + b;" for i in SUMS),
    "TOTAL": " + ".join(f"s{i}[0]" for i in SUMS),
    "NUMBER": str(len(SUMS)),
}


@dataclass(frozen=True)
class Needs:
    """Of one token: stored bytes outside of experts, bytes of one expert of each layer, weights multiplied, elements kept."""

    dense: int
    expert: int
    experts: int
    chosen: int
    weights: int
    kept: int

    @staticmethod
    def of(path: Path) -> Needs:
        """Of a GGUF file; raises ValueError for anything else."""
        reader = gguf.GGUFReader(path)
        about = {name.split(".", 1)[-1]: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
        experts, chosen = about.get("expert_count", 1), about.get("expert_used_count", 1)
        tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
        dense = expert = weights = layers = 0
        for tensor in reader.tensors:
            routed = "_exps." in tensor.name
            if tensor.name == "token_embd.weight" and not tied:
                continue
            dense += 0 if routed else tensor.n_bytes
            expert += tensor.n_bytes // experts if routed else 0
            if len(tensor.shape) > 1 and tensor.name not in ("token_embd.weight", "output.weight"):
                weights += int(tensor.n_elements) * chosen // experts if routed else int(tensor.n_elements)
            layers += tensor.name.endswith("attn_k.weight")
        heads = about["attention.head_count_kv"]
        heads = max(heads) if isinstance(heads, list) else heads
        kept = layers * heads * (about["attention.key_length"] + about["attention.value_length"])
        return Needs(dense, expert, experts, chosen, weights, kept)

    def step(self, rows: int, depth: int) -> float:
        """Bytes of a step of `rows` conversations of `depth` tokens whose experts are chosen at random."""
        distinct = self.experts * (1 - (1 - self.chosen / self.experts) ** rows)
        return self.dense + self.expert * distinct + rows * depth * self.kept * ACTIVATION


class Roof:
    """Tokens per second of steps and prompts at the best rates measured since `forget`: GB/s of a read, GFLOP/s of FMAs."""

    name = "roof"

    def __init__(self, needs: Needs, threads: int, process: subprocess.Popen) -> None:
        self._needs, self._process = needs, process
        self._native = CpuOps(threads)._ops
        self._memory = torch.frombuffer(huge(PART * PARTS), dtype=torch.uint8)
        self._memory.fill_(1)
        self._next = 0
        self.forget()

    def forget(self) -> None:
        self.read = self.fma = 0.0

    def measure(self) -> None:
        for _ in range(PARTS):
            self._next = (self._next + 1) % PARTS
            part = self._memory[self._next * PART :][:PART]
            start = time.perf_counter()
            self._native.stream_read(part)
            self.read = max(self.read, PART / 1e9 / (time.perf_counter() - start))
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.fma = max(self.fma, float(self._process.stdout.readline()))

    def knows(self, kind: str) -> bool:
        """Whether memory or products alone bound it."""
        return kind in ("decode", "crowd", "fresh")

    def rate(self, kind: str, size: int, rows: int) -> float:
        """Tokens per second, of all `rows` conversations of a crowd."""
        if kind == "fresh":
            return 1e9 * self.fma / (2 * self._needs.weights)
        together = rows if kind == "crowd" else 1
        return together * 1e9 * self.read / self._needs.step(together, size)


@contextmanager
def roof(model: Path, threads: int) -> Iterator[Roof]:
    """Raises OSError without g++, subprocess.CalledProcessError where it cannot compile for this machine."""
    needs, text = Needs.of(model), SOURCE
    for word, meaning in WORDS.items():
        text = text.replace(word, meaning)
    with tempfile.TemporaryDirectory() as at:
        source, binary = Path(at) / "roof.cpp", Path(at) / "roof"
        source.write_text(text)
        subprocess.run(["g++", "-O3", "-std=c++20", "-march=native", "-pthread", source, "-o", binary], check=True)
        with subprocess.Popen([binary, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Roof(needs, threads, process)
            finally:
                process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=20, help="the best of so many (default 20)")
    args = parser.parse_args()
    with roof(args.model, args.threads) as measured:
        for _ in range(args.rounds):
            measured.measure()
        print(f"read {measured.read:.1f} GB/s, FMA {measured.fma:.0f} GFLOP/s")
        for kind, size, rows in (("decode", 0, 1), ("decode", 2048, 1), ("decode", 8192, 1), ("crowd", 0, 4), ("fresh", 512, 1)):
            print(f"{kind} {size}: {measured.rate(kind, size, rows):.0f} tok/s")


if __name__ == "__main__":
    main()
