"""Count what the Arm build's products execute under qemu and write it to docs/results/arm-instructions.json.

32 rows of weights of 512 columns times 1 row of x and 32, with each instruction set: every instruction that a set's own functions
execute, packing of x left out (it serves all rows of a matrix), for 256 weights times a row of x. Counts say nothing of cycles.
    python ops/bench/arm_instructions.py
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.native import arm, program  # noqa: E402
from tests.native.helpers import block_bytes  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "arm-instructions.json"
KINDS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "IQ2_XXS", "MXFP4", "NVFP4", "F8_E4M3", "BF16")
WEIGHT_ROWS, COLS, FEW, MANY = 32, 512, 1, 32
PRODUCT = re.compile(r"fmla|fmadd|smmla|bfmmla")
MEMORY = re.compile(r"ld|st|prfm")


def group_of(mnemonic: str, operands: str) -> str:
    if PRODUCT.fullmatch(mnemonic):
        return "products"
    if MEMORY.match(mnemonic):
        return "memory"
    return "vector" if re.search(r"\b[vqdshb]\d+\b", operands) else "other"


def listing(binary: Path, name: str) -> dict[int, str]:
    """The group of every instruction in a set's functions, by address."""
    text = subprocess.run(["aarch64-linux-gnu-objdump", "-d", "-C", binary], check=True, capture_output=True, text=True).stdout
    groups, ours = {}, False
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            ours = f"{name}::" in head[1] and "::pack" not in head[1]
        elif ours and (found := re.match(r" +([0-9a-f]+):\t\S+ \t(\S+)\t?(.*)", line)):
            groups[int(found[1], 16)] = group_of(found[2], found[3])
    return groups


def executed(binary: Path, model: str, case: program.Case, groups: dict[int, str], folder: Path) -> Counter:
    log = folder / "log"
    command = [arm.EMULATOR, "-singlestep", "-d", "exec,nochain", "-D", log, "-cpu", model, binary, "1"]
    subprocess.run(command, input=program.stdin_of([case]), capture_output=True, check=True)
    count: Counter = Counter()
    with log.open() as lines:
        for line in lines:
            if found := re.match(r"Trace \d+: \S+ \[[0-9a-f]+/([0-9a-f]+)/", line):
                count[groups.get(int(found[1], 16), "elsewhere")] += 1
    log.unlink()
    return count


def measured(binary: Path, folder: Path) -> list[dict]:
    rows = []
    for name, model in arm.MODELS.items():
        groups = listing(binary, name)
        for kind in KINDS:
            plain = program.torch.randn(WEIGHT_ROWS, COLS, generator=program.gen(1)).bfloat16()
            w = plain if kind == "BF16" else block_bytes(kind, WEIGHT_ROWS, COLS)
            for n in (FEW, MANY):
                x = program.torch.randn(n, COLS, generator=program.gen(2))
                numbers = [program.code_of(kind), n, WEIGHT_ROWS, COLS]
                case = program.Case(program.LINEAR, numbers, [x, program.stored(w)], (n, WEIGHT_ROWS))
                count, unit = executed(binary, model, case, groups, folder), WEIGHT_ROWS * COLS * n / 256
                each = {g: round(count[g] / unit, 1) for g in ("products", "vector", "memory", "other")}
                rows.append({"format": kind, "set": name, "rows": n, **each, "all": round(sum(each.values()), 1)})
                print(rows[-1], flush=True)
    return rows


def summary_of(rows: list[dict]) -> list[dict]:
    """What i8mm executes of base's: products and vector arithmetic, and all."""
    found = {(r["format"], r["rows"], r["set"]): r for r in rows}
    parts = []
    for kind in KINDS:
        for n in (FEW, MANY):
            base, ours = found[kind, n, "base"], found[kind, n, "i8mm"]
            arithmetic = (ours["products"] + ours["vector"]) / (base["products"] + base["vector"])
            part = {"format": kind, "rows": n, "arithmetic of base": round(arithmetic, 3)}
            parts.append({**part, "all of base": round(ours["all"] / base["all"], 3)})
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name:
        rows = measured(arm.build(Path(name), "-O3"), Path(name))
    machine = "qemu-user 7.2, g++-aarch64-linux-gnu 12.2 -O3; no Arm processor"
    result = {"machine": machine, "per": "256 weights and a row of x", "rows": rows, "summary": summary_of(rows)}
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
