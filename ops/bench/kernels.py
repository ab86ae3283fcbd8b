"""Microbenchmark of the native kernels: GB/s of stored weights and GFLOP/s per operation, format and rows, beside a STREAM read.

    python ops/bench/kernels.py [--ops linear,moe,attention,latent,delta,rows] [--formats BF16,Q8_0] [--rows 1,4,16]
                                [--json out.json]
    python ops/bench/kernels.py --ops cached --threads 1    nanoseconds of arithmetic: 32 weights and a row of x, out of L2

Shapes are those of Qwen3-30B-A3B; latent attention has DeepSeek-V2-Lite's and V3's. Every number is the median of interleaved
rounds; weights rotate through more memory than the caches hold, as a decode step's do. Machine noise is real: compare ratios to
the STREAM read of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine import _native  # noqa: E402
from engine.kernels.cpu import CpuOps  # noqa: E402
from engine.kernels.ops import KVLayer, Quant, Segments, StateLayer  # noqa: E402
from engine.models.spec import DeltaNetSpec, MoeSpec  # noqa: E402

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8
COLD_BYTES = 400 << 20  # weights that rotate: several times a usual last-level cache share
SIZES = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24)}
SIZES |= {"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q2_K": (256, 84), "Q3_K": (256, 110)}
SIZES |= {"IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136)}
# What makes a scale of usual size: four bytes of 0x11 are a float32 of 2^-93, with which products underflow.
FILL = {"MXFP4": 0x77, "NVFP4_SCALED": 0x3C, "F8_E4M3": 0x3C}
SIZES |= {"MXFP4": (32, 17), "NVFP4": (64, 36), "NVFP4_SCALED": (128, 76), "F8_E4M3": (128, 132)}


def weight(kind: str, *shape: int):
    """A weight of small numbers; block formats get one byte repeated, of usual size everywhere: subnormal products are slow."""
    if kind in ("BF16", "F16", "F32"):
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[kind]
        return torch.full(shape, 0.01, dtype=dtype)
    elements, size = SIZES[kind]
    return Quant(
        torch.full((*shape[:-1], shape[-1] // elements * size), FILL.get(kind, 0x11), dtype=torch.uint8), kind, shape[-1]
    )


def size_of(w) -> int:
    return w.data.numel() if isinstance(w, Quant) else w.numel() * w.element_size()


CLOCK = {"wall": time.perf_counter, "cpu": time.thread_time}


def seconds(call: Callable[[], object], at_least: float = 0.05, clock: str = "wall") -> float:
    """Mean time of one call over at least `at_least` seconds."""
    now = CLOCK[clock]
    call()
    done, start = 0, now()
    while (spent := now() - start) < at_least or not done:
        call()
        done += 1
    return spent / done


def turns(items: list) -> Iterator:
    while True:
        yield from items


def linear_case(ops: CpuOps, kind: str, rows: int):
    one = size_of(weight(kind, HIDDEN, HIDDEN))
    copies = turns([weight(kind, HIDDEN, HIDDEN) for _ in range(max(2, COLD_BYTES // one))])
    x = torch.randn(rows, HIDDEN)
    return lambda: ops.linear(x, next(copies)), one, 2 * rows * HIDDEN * HIDDEN


def moe_case(ops: CpuOps, kind: str, rows: int):
    up, down = weight(kind, EXPERTS, 2 * INTER, HIDDEN), weight(kind, EXPERTS, HIDDEN, INTER)
    spec, x = MoeSpec(experts=EXPERTS, top_k=TOP_K, inter=INTER), torch.randn(rows, HIDDEN)
    picks = [ops.route(torch.randn(rows, EXPERTS), spec) for _ in range(16)]
    touched = statistics.mean(len(ids.unique()) for ids, _ in picks) / EXPERTS * (size_of(up) + size_of(down))
    choice = turns(picks)
    return lambda: ops.moe(x, *next(choice), up, down, "silu"), touched, rows * TOP_K * 6 * HIDDEN * INTER


def attention_case(ops: CpuOps, context: int, rows: int):
    hq, hkv, dim, layers = 32, 4, 128, 6
    pages = -(-(context + rows) // 64)
    kv = turns([KVLayer(*(torch.zeros(pages, hkv, 64, dim, dtype=torch.bfloat16) for _ in range(2))) for _ in range(layers)])
    q, k = torch.randn(rows, hq, dim), torch.randn(rows, hkv, dim)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, rows], [context], [list(range(pages))], [0])]
    seg = Segments(*ints)
    flops = 4 * rows * (context + rows / 2) * hq * dim
    return lambda: ops.attention(q, k, k, next(kv), seg, dim**-0.5, None), 2 * context * hkv * dim * 2, flops


def cached_ns(ops: CpuOps, kind: str, rows: int) -> float:
    """Of 32 weights: what 128 rows of a matrix in L2 take beyond 32 of them, without the call and packing x; best of many."""
    x, best = torch.randn(rows, HIDDEN), []
    for n in (32, 128):
        w = weight(kind, n, HIDDEN)
        calls = (seconds(lambda w=w: ops.linear(x, w), at_least=2e-4) for _ in range(500))
        best.append(min(calls))
    return (best[1] - best[0]) * 1e9 / (96 * HIDDEN // 32)


def latent_case(ops: CpuOps, heads: int, context: int, rows: int):
    rank, rotated, layers = 512, 64, 6
    dim, pages = rank + rotated, -(-(context + rows) // 64)
    kv = turns([KVLayer(torch.zeros(pages, 1, 64, dim, dtype=torch.bfloat16), None) for _ in range(layers)])
    q, latent = torch.randn(rows, heads, dim), torch.randn(rows, dim)
    seg = Segments(*(torch.tensor(x, dtype=torch.int32) for x in ([0, rows], [context], [list(range(pages))], [0])))
    flops = 2 * rows * (context + rows / 2) * heads * (dim + rank)
    return lambda: ops.latent_attention(q, latent, next(kv), seg, 192**-0.5, rank), context * dim * 2, flops


def heads_case(ops: CpuOps, heads: int, rows: int):
    """The query's product with what makes keys of the latent, and the output's with what makes values: 128 elements a head."""
    one = heads * 512 * 128 * 2
    pairs = [(weight("BF16", heads, 512, 128), weight("BF16", heads, 128, 512)) for _ in range(max(2, COLD_BYTES // 2 // one))]
    choice, q, out = turns(pairs), torch.randn(rows, heads, 128), torch.randn(rows, heads, 512)

    def both() -> None:
        k_b, v_b = next(choice)
        ops.heads_linear(q, k_b)
        ops.heads_linear(out, v_b)

    return both, 2 * one, 4 * rows * heads * 512 * 128


def delta_case(ops: CpuOps, rows: int):
    spec = DeltaNetSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_kernel=4)
    c, hv = spec.conv_channels, spec.value_heads
    state = StateLayer(torch.zeros(1, c, 3), torch.zeros(1, hv, 128, 128))
    weights = {"conv": torch.randn(c, 4), "dt_bias": torch.randn(hv), "a_log": torch.rand(hv)}
    qkv, a = torch.randn(rows, c), torch.randn(rows, hv)
    seg = Segments(*(torch.tensor(x, dtype=torch.int32) for x in ([0, rows], [0], [[0]], [0])))
    flops = rows * hv * 7 * 128 * 128
    return lambda: ops.delta_net(qkv, a, a, weights, state, seg, spec), state.s.numel() * 8, flops


def row_case(ops: CpuOps, rows: int):
    x, w = torch.randn(rows, HIDDEN), torch.ones(HIDDEN)
    return lambda: ops.rms_norm(x, w, 1e-6, False), 8 * x.numel(), 4 * x.numel()


def cases(ops: CpuOps, args: argparse.Namespace) -> Iterator[tuple[str, Callable]]:
    for rows in args.rows:
        for kind in args.formats:
            if "linear" in args.ops:
                yield f"linear {kind} rows={rows}", lambda kind=kind, rows=rows: linear_case(ops, kind, rows)
            if "moe" in args.ops:
                yield f"moe {kind} rows={rows}", lambda kind=kind, rows=rows: moe_case(ops, kind, rows)
        if "attention" in args.ops:
            for context in (2048, 8192):
                yield f"attention context={context} rows={rows}", lambda c=context, rows=rows: attention_case(ops, c, rows)
        if "latent" in args.ops:
            for heads in (16, 128):
                yield f"latent heads={heads} context=8192 rows={rows}", lambda h=heads, r=rows: latent_case(ops, h, 8192, r)
                yield f"latent products heads={heads} rows={rows}", lambda h=heads, r=rows: heads_case(ops, h, r)
        if "delta" in args.ops:
            yield f"delta rows={rows}", lambda rows=rows: delta_case(ops, rows)
        if "rows" in args.ops:
            yield f"rms_norm rows={rows}", lambda rows=rows: row_case(ops, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--ops", type=names, default=["linear", "moe", "attention", "latent", "delta", "rows"])
    parser.add_argument("--formats", type=names, default=["BF16", "Q8_0", "Q4_0", "Q4_K"])
    parser.add_argument("--rows", type=lambda t: [int(x) for x in t.split(",")], default=[1, 4, 16, 128, 512])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCK, default="wall", help="cpu: for --threads 1 on a machine that others use")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = CpuOps(args.threads, args.isa)
    stream = torch.ones(COLD_BYTES, dtype=torch.uint8)

    def read_rate() -> float:
        return stream.numel() / seconds(lambda: ops._ops.stream_read(stream), clock=args.clock) / 1e9

    rates = [read_rate() for _ in range(3)]
    results = []
    if "cached" in args.ops:
        for kind in args.formats:
            for rows in args.rows:
                results.append({"case": f"cached {kind} rows={rows}", "ns_32": cached_ns(ops, kind, rows)})
                print(f"{results[-1]['case']:40} {results[-1]['ns_32']:6.2f} ns for 32 weights", flush=True)
    print(f"isa {ops.isa}, {ops.threads} threads; STREAM read {statistics.median(rates):.1f} GB/s")
    print(f"{'case':40} {'ms':>9} {'GB/s':>7} {'of read':>8} {'GFLOP/s':>9}")
    for name, make in cases(ops, args):
        call, size, flops = make()
        times, ratios = [], []
        for _ in range(args.rounds):
            read = read_rate()
            times.append(seconds(call, clock=args.clock))
            ratios.append(size / times[-1] / 1e9 / read)
        t = statistics.median(times)
        row = {
            "case": name,
            "ms": t * 1e3,
            "gb_s": size / t / 1e9,
            "of_read": statistics.median(ratios),
            "gflop_s": flops / t / 1e9,
        }
        results.append(row)
        print(f"{name:40} {row['ms']:9.3f} {row['gb_s']:7.1f} {row['of_read']:8.2f} {row['gflop_s']:9.1f}", flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"isa": ops.isa, "threads": ops.threads, "read_gb_s": rates, "results": results}, indent=1)
        )


assert set(SIZES) <= set(_native.TYPES)
if __name__ == "__main__":
    main()
