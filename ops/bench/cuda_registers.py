"""Compile every GPU kernel ahead of time and write its registers, spills and shared memory to docs/results/cuda-registers.json.

Needs no GPU: Triton and its ptxas compile for any target. The product's few-row and many-row programs must use one tensor
instruction, or one row would have other bits among many than alone; that is checked in the PTX.
    TRITON_INTERPRET=0 python ops/bench/cuda_registers.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

TARGETS = (86, 89, 90, 120, 121)
RESULTS = ROOT / "docs" / "results" / "cuda-registers.json"
SHARED_LIMIT = 99 * 1024  # bytes a block may have on sm_86, 89, 120 and 121, the least of all targets
TENSOR = re.compile(r"(wgmma\.mma_async\.sync\.aligned\.m64)n\d+(k16\S*)|(mma\.sync\.aligned\S+)")
ROUTED = ("BF16", "Q4_0", "Q4_K")  # formats whose expert kernels are compiled too: they are `linear` with other rows


@dataclass(frozen=True)
class Variant:
    """One kernel with its constants; `types` of the arguments in order, constants left out."""

    name: str
    module: str
    kernel: str
    types: str  # p: float pointer, i: int32 pointer, w: weight pointer, b: bf16 pointer, n: int32, f: float32
    constants: dict[str, object]
    warps: int = 4
    weight: str = "u8"


def variants() -> list[Variant]:
    """The shapes of a Qwen3-30B-A3B and a Qwen3.5-35B-A3B layer."""
    from engine.kernels.cuda.attention import KEYS
    from engine.kernels.cuda.formats import FORMATS
    from engine.kernels.cuda.products import FEW, MANY, SPAN, TILE, shape_of, warps

    found = []
    stored = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
    for kind in FORMATS:
        dtype = stored.get(kind, "u8")
        for size, width in (("few", FEW), ("many", MANY)):
            tile = dict(COLS=2048, TILE=TILE, WIDTH=width, **shape_of(kind))
            linear = dict(tile, SPAN=SPAN, SPLIT=width == FEW, BIASED=False, bias=None)
            found.append(Variant(f"linear {kind} {size}", "products", "linear_kernel", "ppwnnnn", linear, warps(width), dtype))
            if kind not in ROUTED:
                continue
            routed = dict(tile, EXPERTS=128, POWER=128, PLACED=True)
            up = dict(routed, ACT="silu", TOP=8)
            found.append(Variant(f"gate_up {kind} {size}", "experts", "gate_up_kernel", "ppwiiinnnnn", up, warps(width), dtype))
            down = dict(routed, COLS=768)
            found.append(Variant(f"down {kind} {size}", "experts", "down_kernel", "ppwiiinnnn", down, warps(width), dtype))
    for dim, window in ((64, 0), (128, 0), (128, 4096), (256, 0)):
        for split in (True, False):
            width = 16 if split else max(16, 64 * 64 // dim)
            shape = dict(HEADS=32, GROUP=8, DIM=dim, BLOCK=dim, TAIL=0, TAIL_BLOCK=16, WINDOW=window, SEQUENCES=16)
            shape |= dict(SPLIT=split, WIDTH=width, KEYS=KEYS)
            name = f"attention {dim}{' window' if window else ''} {'spans' if split else 'walk'}"
            found.append(Variant(name, "attention", "attention_kernel", "pppbbiiinnnnnf", shape, 4 if split else 8))
    for split in (True, False):
        shape = dict(
            HEADS=64,
            GROUP=64,
            DIM=512,
            BLOCK=512,
            TAIL=64,
            TAIL_BLOCK=64,
            WINDOW=0,
            SEQUENCES=16,
            SPLIT=split,
            WIDTH=16,
            KEYS=KEYS,
        )
        found.append(
            Variant(f"latent {'spans' if split else 'walk'}", "attention", "attention_kernel", "pppbbiiinnnnnf", shape, 8)
        )
    rule = dict(REPEAT=2, KEYS=128, VALUES=128, KEY_BLOCK=128, BLOCK=32)
    found.append(Variant("delta rule", "delta", "rule_kernel", "pppppppiinnnnf", rule))
    found.append(Variant("group", "experts", "group_kernel", "iiin", dict(EXPERTS=128, CHUNK=1024)))
    found.append(Variant("merge", "experts", "merge_kernel", "ppipn", dict(TOP=8, POWER=8, BLOCK=1024)))
    choice = dict(
        EXPERTS=128, TOP=8, SOFTMAX=True, RENORM=True, BIASED=False, GROUPS=1, TOP_GROUPS=1, GROUP_BEST=2, BLOCK=128, TOP_BLOCK=8
    )
    found.append(Variant("route", "rows", "route_kernel", "ippnf", dict(choice, GROUP_BLOCK=1, bias=None)))
    norm = dict(ADDED=True, GATED=False, PLUS_ONE=False, BLOCK=2048, z=None)
    found.append(Variant("norm", "rows", "norm_kernel", "ppppnnnnf", norm))
    heads = dict(NORMED=True, HALF=64, STEP=1, APART=64, BLOCK=128)
    found.append(Variant("heads", "rows", "heads_kernel", "ppppppnnnnnf", heads))
    return found


def build(variant: Variant, target: int) -> dict[str, object]:
    """What the compiler made of a variant."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"engine.kernels.cuda.{variant.module}"), variant.kernel)
    kinds = {"p": "*fp32", "i": "*i32", "w": f"*{variant.weight}", "b": "*bf16", "n": "i32", "f": "fp32"}
    names = [name for name in kernel.arg_names if name not in variant.constants]
    assert len(names) == len(variant.types), f"{variant.name}: {names}"
    signature = {name: kinds[kind] for name, kind in zip(names, variant.types, strict=True)}
    signature |= {name: "constexpr" for name in variant.constants}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"}
    constants = {(kernel.arg_names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": variant.warps})
    registers, spilled = usage(made.asm["cubin"], target)
    tensor = sorted({"".join(part for part in found if part) for found in TENSOR.findall(made.asm["ptx"])})
    return {
        "kernel": variant.name, "target": f"sm_{target}", "registers": registers, "spilled_bytes": spilled,
        "shared_bytes": made.metadata.shared, "tensor": tensor,
    }  # fmt: skip


def usage(cubin: bytes, target: int) -> tuple[int, int]:
    """Registers a thread has and bytes of its stack, by cuobjdump."""
    import subprocess
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr)
    assert found, told
    return int(found[1]), int(found[2])


def one(job: tuple[Variant, int]) -> dict[str, object]:
    return build(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, nargs="*", default=TARGETS)
    parser.add_argument("--match", default="", help="only kernels whose name holds this")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    jobs = [(variant, target) for variant in variants() if re.search(args.match, variant.name) for target in args.targets]
    rows = []
    with ProcessPoolExecutor(2) as pool:
        for row in pool.map(one, jobs):
            rows.append(row)
            print(*row.values(), flush=True)
    import triton

    args.output.write_text(json.dumps({"triton": triton.__version__, "kernels": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
