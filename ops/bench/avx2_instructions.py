"""Vector instructions that 256 weights and one row of x take with AVX2, counted in the built object file (objdump of binutils).

    python ops/bench/avx2_instructions.py [--json out.json]

What is counted is the loop of `one_row` (native/kernels/bytes_row.h) over a row's steps: every vector instruction, and of them
products of whole numbers, loads alone (not those inside of other instructions), copies of registers and stores.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OBJECT = ROOT / "build/native/CMakeFiles/kernels_avx2.dir/kernels/linear.cpp.o"
KINDS = {
    "products": r"vpmadd",
    "loads": r"(vmov\w+|v\w*broadcast\w*) +[^%]*\(.*\),%[xy]mm\d+$",
    "copies": r"vmov\w+ +%[xy]mm\d+,%[xy]mm\d+$",
    "stores": r"vmov\w+ +%[xy]mm\d+,.*\(",
}


def names() -> list[str]:
    """Of the formats, in the order of their numbers."""
    return re.findall(r'\{"(\w+)", \d+, \d+\}', (ROOT / "native/formats.h").read_text())


def functions(text: str) -> dict[int, list[tuple[str, str]]]:
    """Number of a format -> its `one_row` as (address, instruction)."""
    found: dict[int, list[tuple[str, str]]] = {}
    for block in text.split("\n\n"):
        if of := re.match(r"\w+ <\w*one_row\w*IntegersIL\w*?Format(\d+)E", block):
            lines = re.findall(r"^ *(\w+):\t(.*?) *(?:#.*)?$", block, re.M)
            found[int(of[1])] = [(at, re.sub(r" <.*", "", what)) for at, what in lines]
    return found


def loop(code: list[tuple[str, str]]) -> list[str]:
    """The shortest loop that multiplies a step: eight vectors by three digits, or by words."""
    where = {at: i for i, (at, _) in enumerate(code)}
    best: list[str] = []
    for i, (_, what) in enumerate(code):
        back = re.match(r"j\w+ +(\w+)$", what)
        if back and where.get(back[1], i) < i:
            body = [w for _, w in code[where[back[1]] : i + 1]]
            if sum(w.startswith("vpmaddubsw") for w in body) >= 16 and (not best or len(body) < len(best)):
                best = body
    return best


def count(body: list[str]) -> dict[str, int]:
    vector = [w for w in body if w.startswith("v")]
    return {"all": len(body), "vector": len(vector)} | {k: sum(bool(re.match(p, w)) for w in vector) for k, p in KINDS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", OBJECT], check=True, capture_output=True, text=True).stdout
    results = {names()[n]: count(loop(code)) for n, code in sorted(functions(text).items())}
    for name, counts in results.items():
        print(f"{name:13}", *(f"{k} {v:3}" for k, v in counts.items()))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
