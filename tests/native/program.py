"""Cases for the kernels as a plain program (program.cpp), and what every machine that runs it must answer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine import _native
from engine.kernels.ops import KVLayer, Quant, StateLayer
from engine.kernels.reference import ReferenceOps, dequantize
from engine.models.spec import DeltaNetSpec, MoeSpec
from tests.native.helpers import PAGE, block_bytes, close, segments
from tests.native.test_formats import BLOCKS, meaning

# In the order of program.cpp.
DEQUANTIZE, LINEAR, MOE, ATTENTION, LATENT, HEADS, DELTA, NORMS, ROPE, GATE, ROUTE, BEST, HALVES = range(13)
SETS = ("base", "avx2", "avx512", "avx512vnni", "amx")  # native/cpu.h
ARM_SETS = ("base", "i8mm")
ACTS = ("silu", "gelu_tanh", "sigmoid")  # in the order of engine/kernels/cpu.py


@dataclass(frozen=True)
class Case:
    code: int
    numbers: list[int]
    arrays: list[torch.Tensor]
    shape: tuple[int, ...]  # of the result


Run = Callable[[list[Case]], list[torch.Tensor]]


def stdin_of(cases: list[Case]) -> bytes:
    parts = []
    for case in cases:
        parts += [struct.pack(f"<{1 + len(case.numbers)}i", case.code, *case.numbers)]
        parts += [a.contiguous().numpy().tobytes() for a in case.arrays]
    return b"".join([*parts, b"\xff" * 4])


def results_of(cases: list[Case], stdout: bytes) -> list[torch.Tensor]:
    values = torch.from_numpy(np.frombuffer(stdout, dtype=np.float32).copy())
    sizes = [int(np.prod(case.shape)) for case in cases]
    assert values.numel() == sum(sizes)
    return [part.view(case.shape) for part, case in zip(values.split(sizes), cases, strict=True)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def code_of(kind: str) -> int:
    return _native.TYPES.index(kind)


def stored(w: Quant | torch.Tensor) -> torch.Tensor:
    return w.data if isinstance(w, Quant) else w.view(torch.uint8)


def values(w: Quant | torch.Tensor) -> torch.Tensor:
    return dequantize(w) if isinstance(w, Quant) else w.float()


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_formats(run: Run) -> None:
    weights = [block_bytes(kind, rows=3, cols=512, seed=3) for kind in BLOCKS]
    results = run([Case(DEQUANTIZE, [code_of(w.type), *w.shape], [w.data], w.shape) for w in weights])
    for weight, out in zip(weights, results, strict=True):
        assert same_bits(out, torch.from_numpy(np.ascontiguousarray(meaning(weight)))), weight.type


def check_products(run: Run, truth: ReferenceOps, exact: float) -> dict[str, tuple]:
    """Returns x, the weights and the result of every kind."""
    x, plain = torch.randn(21, 768, generator=gen(1)), torch.randn(45, 768, generator=gen(2))
    weights = {kind: block_bytes(kind, rows=45, cols=768) for kind in BLOCKS}
    weights |= {"F32": plain, "F16": plain.half(), "BF16": plain.bfloat16()}
    rows = (1, 2, 5, 21)
    results = run(
        [Case(LINEAR, [code_of(kind), n, 45, 768], [x[:n], stored(w)], (n, 45)) for kind, w in weights.items() for n in rows]
    )
    for i, (kind, w) in enumerate(weights.items()):
        *few, many = results[4 * i : 4 * i + 4]
        close(many, truth.linear(x, values(w)), exact)
        assert all(same_bits(part, many[: len(part)]) for part in few), kind
    return {kind: (x, w, results[4 * i + 3]) for i, (kind, w) in enumerate(weights.items())}


def experts_of(kind: str, experts: int, hidden: int, inter: int) -> tuple:
    """Gate and up, down, and both as floats."""
    shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)
    if kind == "BF16":
        up, down = ((torch.randn(shape, generator=gen(i)) / 16).bfloat16() for i, shape in enumerate(shapes))
        return up, down, (up.float(), down.float())
    flat = [block_bytes(kind, s[0] * s[1], s[2], seed) for seed, s in enumerate(shapes, 1)]
    up, down = (Quant(w.data.view(*s[:2], -1), kind, s[2]) for w, s in zip(flat, shapes, strict=True))
    return up, down, tuple(dequantize(w).view(s) for w, s in zip(flat, shapes, strict=True))


def check_experts(run: Run, truth: ReferenceOps, exact: float) -> dict[str, tuple]:
    """Returns what moe takes and its result, of every kind."""
    n, k, experts, hidden, inter = 9, 2, 4, 256, 256
    x, weights = torch.randn(n, hidden, generator=gen(4)), torch.rand(n, k, generator=gen(5))
    ids = torch.stack([torch.randperm(experts, generator=gen(6 + i))[:k] for i in range(n)]).int()
    kinds = {kind: experts_of(kind, experts, hidden, inter) for kind in ("BF16", "Q4_K", "MXFP4", "Q8_0")}

    def case(kind: str, rows: int) -> Case:
        up, down, _ = kinds[kind]
        arrays = [x[:rows], ids[:rows], weights[:rows], stored(up), stored(down)]
        return Case(MOE, [code_of(kind), rows, k, experts, hidden, inter], arrays, (rows, hidden))

    results = run([case(kind, rows) for kind in kinds for rows in (n, 1)])
    given = {}
    for (kind, (up, down, floats)), out, first in zip(kinds.items(), results[::2], results[1::2], strict=True):
        close(out, truth.moe(x, ids, weights, *floats, "silu"), exact)
        assert same_bits(first, out[:1]), kind
        given[kind] = (x, ids, weights, up, down, "silu"), out
    return given


def check_attention(run: Run, truth: ReferenceOps, tokens: int, hq: int, hkv: int, dim: int, window: int) -> tuple:
    """Returns a function that computes the same with other Ops, and the result."""
    g = gen(5)
    q, k, v = (torch.randn(tokens, h, dim, generator=g).bfloat16().float() for h in (hq, hkv, hkv))
    whole, steps = run(
        [Case(ATTENTION, [tokens, step, hq, hkv, dim, window], [q, k, v], (tokens, hq, dim)) for step in (tokens, 37)]
    )
    assert same_bits(whole, steps)

    def by(ops, dtype: torch.dtype) -> torch.Tensor:
        pages = -(-tokens // PAGE)
        kv = KVLayer(*(torch.zeros(pages, hkv, PAGE, dim, dtype=dtype) for _ in range(2)))
        return ops.attention(q, k, v, kv, segments([0, tokens], [0], [list(range(pages))], [0]), 0.125, window or None)

    close(whole, by(truth, torch.float32), 5e-5)
    return by, whole


def check_latent_attention(run: Run, truth: ReferenceOps, exact: float, tokens: int, heads: int) -> tuple:
    """Returns a function that computes the same with other Ops, and both results: attention, and each head's matrix behind it."""
    rank, dim, g = 32, 48, gen(6)
    q, latent = torch.randn(tokens, heads, dim, generator=g), torch.randn(tokens, dim, generator=g).bfloat16().float()
    weight = torch.randn(heads, 24, rank, generator=g)
    whole, steps = run(
        [Case(LATENT, [tokens, step, heads, dim, rank], [q, latent], (tokens, heads, rank)) for step in (tokens, 37)]
    )
    assert same_bits(whole, steps)
    cases = [
        Case(HEADS, [code_of("F32"), n, heads, 24, rank], [whole[:n], weight.view(torch.uint8)], (n, heads, 24))
        for n in (tokens, 1)
    ]
    product, first = run(cases)
    close(product, truth.heads_linear(whole, weight), exact)
    assert same_bits(first, product[:1])

    def by(ops, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        pages = -(-tokens // PAGE)
        seg = segments([0, tokens], [0], [list(range(pages))], [0])
        kv = KVLayer(torch.zeros(pages, 1, PAGE, dim, dtype=dtype), None)
        return ops.latent_attention(q, latent, kv, seg, 0.125, rank), ops.heads_linear(whole, weight)

    close(whole, by(truth, torch.float32)[0], 5e-5)
    return by, (whole, product)


def check_delta(run: Run, truth: ReferenceOps) -> None:
    tokens, cases, specs = 60, [], (DeltaNetSpec(2, 4, 32, 32, 4), DeltaNetSpec(1, 3, 13, 70, 3))
    given = [delta_inputs(spec, tokens) for spec in specs]
    for spec, (rows, weights) in zip(specs, given, strict=True):
        numbers = [spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.conv_kernel]
        size = sum(int(np.prod(s)) for s in delta_shapes(spec, tokens))
        cases += [Case(DELTA, [tokens, step, *numbers], [*rows, *weights.values()], (size,)) for step in (tokens, 7)]
    results = run(cases)
    for spec, (rows, weights), whole, steps in zip(specs, given, results[::2], results[1::2], strict=True):
        assert same_bits(whole, steps)
        shapes = delta_shapes(spec, tokens)
        parts = whole.split([int(np.prod(s)) for s in shapes])
        out, state, past = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        theirs = StateLayer(torch.zeros(1, *shapes[2]), torch.zeros(1, *shapes[1]))
        close(out, truth.delta_net(*rows, weights, theirs, segments([0, tokens], [0], [[0]], [0]), spec), 2e-5)
        close(state, theirs.s[0], 2e-5)
        assert torch.equal(past, theirs.conv[0])


def delta_inputs(spec: DeltaNetSpec, tokens: int) -> tuple:
    g, c, hv = gen(7), spec.conv_channels, spec.value_heads
    rows = [torch.randn(tokens, width, generator=g) for width in (c, hv, hv)]
    conv = torch.randn(c, spec.conv_kernel, generator=g) / 2
    return rows, {"conv": conv, "dt_bias": torch.randn(hv, generator=g), "a_log": torch.rand(hv, generator=g)}


def delta_shapes(spec: DeltaNetSpec, tokens: int) -> list[tuple[int, ...]]:
    """Of the result, the state and the convolution's past."""
    heads = spec.value_heads
    return [(tokens, heads, spec.value_dim), (heads, spec.key_dim, spec.value_dim), (spec.conv_channels, spec.conv_kernel - 1)]


def check_rows(run: Run, truth: ReferenceOps) -> None:
    """Norms, rotations, gates."""
    g = gen(8)
    norms = [
        (*(scale * torch.randn(5, d, generator=g) for scale in (1, 20)), torch.randn(d, generator=g), d % 2)
        for d in (33, 128, 100)
    ]
    ropes = [
        (torch.randn(9, 3, d, generator=g), 10 * torch.randn(9, rot // 2, generator=g))
        for d, rot in ((64, 64), (20, 12), (40, 36))
    ]
    gate = torch.cat([torch.linspace(-120, 120, 1001), torch.tensor([0.0, -0.0, 1e30, -1e30])]).view(-1, 1)
    cases = [Case(NORMS, [5, x.shape[1], plus], [x, z, w], (2, *x.shape)) for x, z, w, plus in norms]
    cases += [
        Case(ROPE, [9, 3, x.shape[2], 2 * a.shape[1], i % 2], [x, a.cos(), a.sin()], x.shape) for i, (x, a) in enumerate(ropes)
    ]
    cases += [Case(GATE, [len(gate), i], [gate, torch.ones_like(gate)], gate.shape) for i in range(len(ACTS))]
    results = iter(run(cases))
    for x, z, w, plus in norms:
        plain, gated = next(results)
        close(plain, truth.rms_norm(x, w, 1e-6, bool(plus)), 1e-6)
        close(gated, truth.gated_norm(x, z, w, 1e-6), 1e-6)
    for i, (x, angle) in enumerate(ropes):
        close(next(results), truth.rope(x, angle.cos(), angle.sin(), bool(i % 2)), 1e-6)
    for act in ACTS:
        got, want = next(results), truth.gate_mul(gate, torch.ones_like(gate), act)
        assert torch.isfinite(got).all() and ((got - want).abs() <= 2e-5 * want.abs() + 1e-12).all(), act


def check_routing(run: Run, truth: ReferenceOps) -> None:
    rules = ((256, 8, "sigmoid", 8, 4), (7, 3, "softmax", 1, 1), (128, 8, "softmax", 1, 1))
    specs = [
        MoeSpec(e, k, 1, score=score, scale=2.5, bias=True, groups=groups, top_groups=top) for e, k, score, groups, top in rules
    ]
    given = [(torch.randn(20, s.experts, generator=gen(9)), torch.randn(s.experts, generator=gen(10))) for s in specs]

    def case(s: MoeSpec, arrays: tuple[torch.Tensor, ...]) -> Case:
        return Case(ROUTE, [20, s.experts, s.top_k, s.score == "sigmoid", s.groups, s.top_groups], list(arrays), (2, 20, s.top_k))

    results = run([case(s, arrays) for s, arrays in zip(specs, given, strict=True)])
    for spec, (logits, bias), (ids, weights) in zip(specs, given, results, strict=True):
        want_ids, want = truth.route(logits, spec, bias)
        assert torch.equal(ids.int(), want_ids.int())
        close(weights, want, 1e-6)


@dataclass(frozen=True)
class Sizes:
    """Of five half layers, in the order of program.cpp."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inter: int
    key_heads: int
    value_heads: int
    key_dim: int
    taps: int
    experts: int
    k: int


def check_halves(run: Run, truth: ReferenceOps) -> None:
    """Exact in any batch; loose beside the truth: a key that is 1e-6 off may round to the other bf16, 1e-3 of what follows."""
    tokens, s = 9, Sizes(96, 4, 2, 32, 64, 1, 2, 32, 4, 5, 2)
    x, angle = torch.randn(tokens, s.hidden, generator=gen(11)), 3 * torch.randn(tokens, s.dim // 2, generator=gen(12))
    for kind in ("BF16", "Q8_0"):
        w = half_weights(kind, s)
        arrays = [
            x,
            angle.cos(),
            angle.sin(),
            *(stored(t) if isinstance(t, Quant) or t.dtype != torch.float32 else t for t in w.values()),
        ]
        numbers = list(vars(s).values())
        whole, steps, ones = run(
            [Case(HALVES, [code_of(kind), tokens, step, *numbers], arrays, x.shape) for step in (tokens, 4, 1)]
        )
        assert same_bits(whole, steps) and same_bits(whole, ones), kind
        close(whole, halves_by(truth, s, x.clone(), angle, {name: values(t) for name, t in w.items()}), 2e-3)


def half_weights(kind: str, s: Sizes) -> dict[str, Quant | torch.Tensor]:
    """By name, in the order in which program.cpp reads them."""
    q, kv, mix, v = s.heads * s.dim, s.kv_heads * s.dim, (2 * s.key_heads + s.value_heads) * s.key_dim, s.value_heads * s.key_dim
    h, i = s.hidden, s.inter
    shapes = {"norm 1": (h,), "q": (2 * q, h), "k": (kv, h), "v": (kv, h), "q norm": (s.dim,), "k norm": (s.dim,), "o": (h, q)}
    shapes |= {"norm 2": (h,), "gate": (i, h), "up": (i, h), "down": (h, i)}
    shapes |= {
        "norm 3": (h,),
        "qkv": (mix, h),
        "z": (v, h),
        "b": (s.value_heads, h),
        "a": (s.value_heads, h),
        "conv": (mix * s.taps,),
    }
    shapes |= {"dt_bias": (s.value_heads,), "a_log": (s.value_heads,), "out norm": (s.key_dim,), "out": (h, v)}
    shapes |= {"norm 4": (h,), "router": (s.experts, h), "switch": (1, h), "shared gate": (i, h), "shared up": (i, h)}
    shapes |= {"shared down": (h, i), "ups": (s.experts * 2 * i, h), "downs": (s.experts * h, i)}
    r, d = 2 * s.dim, s.dim  # rank of the latent; elements of a head that turn, and that do not
    shapes |= {
        "norm 5": (h,),
        "q_a": (i, h),
        "kv_a": (r + d, h),
        "q_a norm": (i,),
        "q_b": (s.heads * 2 * d, i),
        "kv_a norm": (r,),
    }
    shapes |= {"k_b": (s.heads * r, d), "v_b": (s.heads * d, r), "latent out": (h, s.heads * d)}
    weights: dict[str, Quant | torch.Tensor] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 1:
            weights[name] = torch.rand(shape, generator=gen(seed))
        elif kind == "BF16":
            weights[name] = (torch.randn(shape, generator=gen(seed)) / shape[1] ** 0.5).bfloat16()
        else:
            weights[name] = block_bytes(kind, *shape, seed=seed)
    return weights


def halves_by(ops, s: Sizes, x: torch.Tensor, angle: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same, operation by operation."""
    n, heads, (cos, sin) = len(x), (s.heads, s.kv_heads), (angle.cos(), angle.sin())
    seg = segments([0, n], [0], [[0]], [0])

    def normed(name: str) -> torch.Tensor:
        return ops.rms_norm(x, w[name], 1e-6, False)

    h = normed("norm 1")
    q, gate = ops.linear(h, w["q"]).view(n, s.heads, 2, s.dim).unbind(2)
    k, v = (ops.linear(h, w[name]).view(n, s.kv_heads, s.dim) for name in "kv")
    turned = ops.turn_heads(torch.cat([q, k], 1), *heads, (w["q norm"], w["k norm"]), 1e-6, (cos, sin), False)
    kv = KVLayer(*(torch.zeros(1, s.kv_heads, PAGE, s.dim) for _ in range(2)))
    mixed = ops.attention(
        turned[:, : s.heads], turned[:, s.heads :].bfloat16().float(), v.bfloat16().float(), kv, seg, 0.125, None
    )
    x = x + ops.linear((mixed * gate.sigmoid()).flatten(1), w["o"])

    h = normed("norm 2")
    x = x + ops.linear(ops.gate_mul(ops.linear(h, w["gate"]), ops.linear(h, w["up"]), "silu"), w["down"])

    h, spec = normed("norm 3"), DeltaNetSpec(s.key_heads, s.value_heads, s.key_dim, s.key_dim, s.taps)
    _, state, past = delta_shapes(spec, n)
    layer = StateLayer(torch.zeros(1, *past), torch.zeros(1, *state))
    rows = [ops.linear(h, w[name]) for name in ("qkv", "a", "b")]
    kept = {"conv": w["conv"].view(-1, s.taps), "dt_bias": w["dt_bias"], "a_log": w["a_log"]}
    z = ops.linear(h, w["z"]).view(n, s.value_heads, -1)
    x = x + ops.linear(ops.gated_norm(ops.delta_net(*rows, kept, layer, seg, spec), z, w["out norm"], 1e-6).flatten(1), w["out"])

    h = normed("norm 4")
    ids, weights = ops.route(ops.linear(h, w["router"]), MoeSpec(s.experts, s.k, s.inter))
    banks = w["ups"].view(s.experts, -1, s.hidden), w["downs"].view(s.experts, s.hidden, -1)
    shared = ops.linear(ops.gate_mul(ops.linear(h, w["shared gate"]), ops.linear(h, w["shared up"]), "silu"), w["shared down"])
    x = x + ops.moe(h, ids, weights, *banks, "silu") + ops.linear(h, w["switch"]).sigmoid() * shared

    h, rank = normed("norm 5"), 2 * s.dim
    q = ops.linear(ops.rms_norm(ops.linear(h, w["q_a"]), w["q_a norm"], 1e-6, False), w["q_b"]).view(n, s.heads, -1)
    latent = ops.linear(h, w["kv_a"])
    key = ops.rope(latent[:, None, rank:], cos, sin, True)[:, 0]
    latent = torch.cat([ops.rms_norm(latent[:, :rank], w["kv_a norm"], 1e-6, False), key], 1).bfloat16().float()
    q = torch.cat(
        [ops.heads_linear(q[..., : s.dim], w["k_b"].view(s.heads, rank, -1)), ops.rope(q[..., s.dim :], cos, sin, True)], 2
    )
    mixed = ops.latent_attention(q, latent, KVLayer(torch.zeros(1, 1, PAGE, 3 * s.dim), None), seg, 0.125, rank)
    return x + ops.linear(ops.heads_linear(mixed, w["v_b"].view(s.heads, -1, rank)).flatten(1), w["latent out"])
