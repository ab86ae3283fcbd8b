#!/usr/bin/env python3
"""What a core's pipes do with the product of 256 weights of Q4_0 and a row of many (AVX2): cycles of loops of nothing else.

    ops/bench/pipes.py [--rounds 1000] [--out docs/results/NAME.json]

Numbers stay in registers, x comes out of L1, sixteen rows of it in turn. Every case runs in turn with the others; the best of the
rounds counts, in cycles of a chain of additions that runs beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ops/bench"))
import machine  # noqa: E402

STEP, APART, ROWS = 896, 1024, 16  # bytes of a step of x, and between the sums of two rows
NUMBERS = range(8)  # registers; 8 to 15 are free
HEAD = """#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <x86intrin.h>
alignas(4096) static char x[1 << 16], acc[1 << 16], constants[1024];
extern "C" void chain(uint64_t);
__asm__("chain: add $1,%rax\\nadd $1,%rax\\nadd $1,%rax\\nadd $1,%rax\\nsub $1,%rdi\\njnz chain\\nret\\n");
"""
MAIN = """int main() {
    for (char& c : x) c = 1;
    for (int i = 0; i < 192; i++) constants[i] = 1;
    for (int i = 0; i < 8; i++) ((float*)(constants + 192))[i] = 1;
    for (int t = 0; t < 16; t++)
        for (int i = 0; i < 8; i++) ((float*)(x + 896 * t + 768))[i] = 0.01f;
    static double best[CASES];
    double cycle = 1e9;
    for (double& b : best) b = 1e9;
    for (int k = 0; k < ROUNDS; k++)
        for (int i = 0; i < CASES; i++) {
            const uint64_t a = __rdtsc();
            chain(1000);
            const uint64_t b = __rdtsc();
            cases[i](32, x, acc, constants);
            const uint64_t c = __rdtsc();
            cycle = std::min(cycle, (b - a) / 4000.0), best[i] = std::min(best[i], (c - b) / 512.0);
        }
    for (double b : best) printf("%.2f\\n", b / cycle);
}
"""


def multiply(digit: int, vector: int, to: int) -> str:
    return f"vpmaddubsw {256 * digit + 32 * vector}(%rsi),%ymm{vector},%ymm{to}"


def independent(products: int, additions: int) -> Iterator[str]:
    """Products and additions that wait for nothing, four and four."""
    for i in range(0, products, 4):
        for j in range(i, min(i + 4, products)):
            yield f"vpmaddubsw %ymm0,%ymm1,%ymm{8 + j % 4}"
        for j in range(i * additions // products, min(i + 4, products) * additions // products):
            yield f"vpaddw %ymm2,%ymm{12 + j % 4},%ymm{12 + j % 4}"


def sums(count: int) -> Iterator[str]:
    """24 products, each added to the next of `count` sums; three of them are no addition."""
    for i in range(24):
        to = 15 - i % count
        yield multiply(i // 8, i % 8, 8 if i >= 3 else 15 - i % 3 if count > 1 else 15)
        if i >= 3:
            yield f"vpaddw %ymm8,%ymm{to},%ymm{to}"


def digits(turns: bool) -> Iterator[str]:
    """The words of three digits in registers 13 to 15, one digit after the other or in turn, and what widens and joins them."""
    order = [(d, v) for v in NUMBERS for d in range(3)] if turns else [(d, v) for d in range(3) for v in NUMBERS]
    for i in range(0, 24, 3):
        for j, (d, v) in enumerate(order[i : i + 3]):
            yield multiply(d, v, 10 + j if v else 13 + d)
        yield from (f"vpaddw %ymm{10 + j},%ymm{13 + d},%ymm{13 + d}" for j, (d, v) in enumerate(order[i : i + 3]) if v)
    yield from (f"vpmaddwd {64 * d}(%rcx),%ymm{13 + d},%ymm{13 + d}" for d in range(3))
    yield from ("vpaddd %ymm13,%ymm14,%ymm14", "vpaddd %ymm14,%ymm15,%ymm15", "vpsubd 832(%rsi),%ymm15,%ymm15")


SCALED = (
    *("vmovaps 192(%rcx),%ymm8", "vmulps 768(%rsi),%ymm8,%ymm8", "vcvtdq2ps %ymm15,%ymm15"),
    *("vfmadd213ps (%rdx),%ymm8,%ymm15", "vmovaps %ymm15,(%rdx)"),
)
CASES = {
    "27 products": list(independent(27, 0)),
    "27 products and 27 additions that wait for nothing": list(independent(27, 27)),
    "24 products and 21 additions that wait for nothing": list(independent(24, 21)),
    **{f"24 products added up in {n}": list(sums(n)) for n in (1, 3, 6)},
    "joined, digit after digit": list(digits(False)),
    "joined, digits in turn": list(digits(True)),
    "whole, digit after digit": [*digits(False), *SCALED],
    "whole, digits in turn": [*digits(True), *SCALED],
}


def program(rounds: int) -> str:
    text = []
    for i, body in enumerate(CASES.values()):
        lines = [f"vmovdqa {32 * v}(%rcx),%ymm{v}" for v in NUMBERS]
        lines += ["mov %rsi,%r8", "mov %rdx,%r9", "2: mov %r8,%rsi", "mov %r9,%rdx", f"mov ${ROWS},%eax", ".p2align 6", "1:"]
        lines += [*body, f"add ${STEP},%rsi", f"add ${APART},%rdx", "dec %eax", "jnz 1b"]
        lines += ["add $32,%r9", "dec %rdi", "jnz 2b", "vzeroupper", "ret"]
        text.append(f'__asm__("case{i}:\\n{"".join(line + chr(92) + "n" for line in lines)}");')
        text.append(f'extern "C" void case{i}(uint64_t, const char*, char*, const char*);')
    names = ", ".join(f"case{i}" for i in range(len(CASES)))
    table = f"static decltype(case0)* const cases[] = {{{names}}};\nenum {{ CASES = {len(CASES)}, ROUNDS = {rounds} }};\n"
    return HEAD + "\n".join(text) + "\n" + table + MAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as at:
        source, binary = Path(at) / "pipes.cpp", Path(at) / "pipes"
        source.write_text(program(args.rounds))
        subprocess.run(["g++", "-O2", "-mavx2", "-mfma", source, "-o", binary], check=True)
        told = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split()
    cycles = dict(zip(CASES, map(float, told), strict=True))
    for name, value in cycles.items():
        print(f"{name:55} {value:6.2f} cycles, {len([i for i in CASES[name] if not i.startswith('vmovaps')])} instructions")
    if args.out:
        args.out.write_text(json.dumps({"machine": machine.describe(ROOT), "cycles": cycles}, indent=1) + "\n")


if __name__ == "__main__":
    main()
