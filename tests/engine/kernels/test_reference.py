"""The reference kernels against other people's implementations, and their promise that rows do not touch each other."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.ops import KVLayer, Quant, Segments, StateLayer
from engine.kernels.reference import ReferenceOps
from engine.models.spec import DeltaNetSpec, MoeSpec
from engine.nn.batch import Batch

OPS = ReferenceOps()
PAGE = 8
DELTA = DeltaNetSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=6, conv_kernel=4)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def segments(*sequences: tuple[int, int, list[int], int]) -> Segments:
    """(start, rows, pages, slot) of each sequence."""
    cu = torch.tensor([0, *(rows for _, rows, _, _ in sequences)]).cumsum(0)
    width = max(len(pages) for _, _, pages, _ in sequences)
    table = [pages + [-1] * (width - len(pages)) for _, _, pages, _ in sequences]
    start, slot = [s for s, _, _, _ in sequences], [s for _, _, _, s in sequences]
    return Segments(*(torch.tensor(x).int() if isinstance(x, list) else x.int() for x in (cu, start, table, slot)))


def split(total: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, total, *(c for c in cuts if c < total)})
    return list(zip(edges, edges[1:], strict=False))


cuts = st.lists(st.integers(1, 40), max_size=5)


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 80), st.integers(1, 70), cuts)
def test_rows_alone_equal_rows_together(rows, inner, outer, cuts) -> None:
    x, w, z = random(rows, inner), random(outer, inner, seed=1), random(rows, inner, seed=2)
    functions = [
        lambda a, b: OPS.linear(a, w),
        lambda a, b: OPS.rms_norm(a, w[0], 1e-6, False),
        lambda a, b: OPS.gated_norm(a, b, w[0], 1e-6),
        lambda a, b: OPS.gate_mul(a, b, "silu"),
        lambda a, b: OPS.gate_mul(a, b, "gelu_tanh"),
        lambda a, b: OPS.gate_mul(a[:, :1].contiguous(), b, "sigmoid"),
    ]
    for function in functions:
        parts = [function(x[a:b], z[a:b]) for a, b in split(rows, cuts)]
        assert torch.equal(torch.cat(parts), function(x, z))


@settings(max_examples=15)
@given(st.integers(1, 40), cuts, st.booleans())
def test_moe_rows_alone_equal_rows_together(rows, cuts, renorm) -> None:
    spec = MoeSpec(experts=6, top_k=3, inter=10, renorm=renorm)
    gate_up, down, x = random(6, 20, 12), random(6, 12, 10, seed=1), random(rows, 12, seed=2)

    def run(x: torch.Tensor) -> torch.Tensor:
        return OPS.moe(x, *OPS.route(x[:, :6].contiguous(), spec), gate_up, down, "silu")

    assert torch.equal(torch.cat([run(x[a:b]) for a, b in split(rows, cuts)]), run(x))


@settings(max_examples=15)
@given(st.integers(1, 40), cuts, st.sampled_from([None, 5]))
def test_attention_chunks_equal_whole(rows, cuts, window) -> None:
    q, k, v = random(rows, 4, 6), random(rows, 2, 6, seed=1), random(rows, 2, 6, seed=2)
    pages = [5, 2, 0, 3, 1]

    def run(pieces: list[tuple[int, int]]) -> torch.Tensor:
        kv = KVLayer(torch.zeros(6, 2, PAGE, 6), torch.zeros(6, 2, PAGE, 6))
        out = [
            OPS.attention(q[a:b], k[a:b], v[a:b], kv, segments((a, b - a, pages[: -(-b // PAGE)], 0)), 0.4, window)
            for a, b in pieces
        ]
        return torch.cat(out)

    assert torch.equal(run(split(rows, cuts)), run([(0, rows)]))


@pytest.mark.parametrize("window", [None, 1, 7])
def test_attention_equals_torch(window) -> None:
    rows = 29
    q, k, v = random(rows, 4, 6), random(rows, 2, 6, seed=1), random(rows, 2, 6, seed=2)
    kv = KVLayer(torch.zeros(6, 2, PAGE, 6), torch.zeros(6, 2, PAGE, 6))
    ours = OPS.attention(q, k, v, kv, segments((0, rows, [5, 2, 0, 3], 0)), 0.4, window)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    visible = (distance >= 0) & (distance < (window or rows))
    want = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), visible, scale=0.4, enable_gqa=True)
    torch.testing.assert_close(ours, want.transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert kv.k[4].abs().sum() == 0 and kv.k[3, :, rows % PAGE :].abs().sum() == 0  # pages and tails of others are untouched


def test_attention_reads_the_dtype_of_its_pages() -> None:
    q, k, v = random(9, 4, 6), random(9, 2, 6, seed=1), random(9, 2, 6, seed=2)
    kv = KVLayer(*(torch.zeros(2, 2, PAGE, 6, dtype=torch.bfloat16) for _ in range(2)))
    ours = OPS.attention(q, k, v, kv, segments((0, 9, [1, 0], 0)), 0.4, None)
    exact = KVLayer(*(torch.zeros(2, 2, PAGE, 6) for _ in range(2)))
    assert torch.equal(
        ours, OPS.attention(q, k.bfloat16().float(), v.bfloat16().float(), exact, segments((0, 9, [1, 0], 0)), 0.4, None)
    )


def delta_inputs(rows: int):
    weights = {"conv": random(DELTA.conv_channels, 4, seed=3), "dt_bias": random(4, seed=4), "a_log": random(4, seed=5)}
    return random(rows, DELTA.conv_channels), random(rows, 4, seed=1), random(rows, 4, seed=2), weights


def delta_state(slots: int = 2) -> StateLayer:
    return StateLayer(torch.zeros(slots, DELTA.conv_channels, 3), torch.zeros(slots, 4, 8, 6))


@settings(max_examples=15)
@given(st.integers(1, 40), cuts)
def test_delta_net_chunks_equal_whole(rows, cuts) -> None:
    qkv, a, b, weights = delta_inputs(rows)

    def run(pieces: list[tuple[int, int]]) -> tuple[torch.Tensor, StateLayer]:
        state = delta_state()
        out = [OPS.delta_net(qkv[x:y], a[x:y], b[x:y], weights, state, segments((x, y - x, [0], 1)), DELTA) for x, y in pieces]
        return torch.cat(out), state

    (parts, left), (whole, right) = run(split(rows, cuts)), run([(0, rows)])
    assert torch.equal(parts, whole) and torch.equal(left.s, right.s) and torch.equal(left.conv, right.conv)
    assert left.s[0].abs().sum() == 0  # the other slot


def test_delta_net_equals_transformers() -> None:
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs

    rows = 70  # more than one of their chunks
    qkv, a, b, weights = delta_inputs(rows)
    ours = OPS.delta_net(qkv, a, b, weights, delta_state(), segments((0, rows, [0], 1)), DELTA)
    mixed = F.silu(F.conv1d(F.pad(qkv.T, (3, 0))[None], weights["conv"][:, None], groups=DELTA.conv_channels))[0].T
    q, k, v = mixed.split([16, 16, 24], dim=1)
    want, _ = theirs.torch_chunk_gated_delta_rule(
        q.view(1, rows, 2, 8),
        k.view(1, rows, 2, 8),
        v.view(1, rows, 4, 6),
        g=(-weights["a_log"].exp() * F.softplus(a + weights["dt_bias"]))[None],
        beta=b.sigmoid()[None],
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(ours, want[0], atol=1e-5, rtol=1e-4)


def test_rope_rotates_the_first_dimensions_only() -> None:
    x, angle = random(3, 2, 10), random(3, 4)
    for interleaved in (False, True):
        out = OPS.rope(x, angle.cos(), angle.sin(), interleaved)
        assert torch.equal(out[..., 8:], x[..., 8:])
        first = x[..., 0:8:2] if interleaved else x[..., :4]
        second = x[..., 1:8:2] if interleaved else x[..., 4:8]
        turned = torch.view_as_complex(torch.stack([first, second], -1)) * torch.polar(torch.ones(3, 1, 4), angle[:, None])
        got = out[..., 0:8:2] if interleaved else out[..., :4]
        torch.testing.assert_close(got, turned.real)


def test_route_prefers_the_lower_id_on_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    ids, weights = OPS.route(logits, MoeSpec(experts=5, top_k=2, inter=1))
    assert ids.tolist() == [[1, 2], [0, 1]] and ids.dtype == torch.int32
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_route_scores() -> None:
    logits = random(4, 8)
    ids, weights = OPS.route(logits, MoeSpec(experts=8, top_k=3, inter=1, renorm=False, scale=2.0))
    torch.testing.assert_close(weights, 2 * logits.softmax(1).gather(1, ids.long()))
    ids, weights = OPS.route(logits, MoeSpec(experts=8, top_k=3, inter=1, score="sigmoid", renorm=False))
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, ids.long()))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_dequantized_as_gguf_does(kind) -> None:
    values = random(3, 5, 64).numpy()
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    weight = OPS.prepare(Quant(torch.from_numpy(stored), kind, 64))
    assert weight.shape == (3, 5, 64)
    np.testing.assert_array_equal(weight.numpy(), gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]))


def test_what_is_kept_goes_along_to_a_device() -> None:
    numbers, kept = torch.zeros(2, dtype=torch.int32), torch.tensor([[1, 2]], dtype=torch.int32)
    moved = Batch(numbers, numbers, Segments(numbers, numbers, numbers, numbers, kept), numbers).on(torch.device("meta"))
    assert moved.segments.cu.is_meta and torch.equal(moved.segments.kept, kept)
