"""Paged attention: the truth's numbers, and bits that know nothing of chunks, neighbours or threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import CpuOps
from tests.native.attention_inputs import fresh, random_qkv, run
from tests.native.helpers import PAGE, close, segments


@pytest.mark.parametrize(
    ("hq", "hkv", "dim", "window"),
    [
        (8, 2, 64, None),
        (2, 2, 128, 1),
        (8, 1, 256, 50),
        (6, 3, 20, 64),
        (3, 3, 8, None),
        (12, 1, 80, 100),
        (10, 2, 48, 33),
        (7, 1, 96, None),
    ],
)
def test_against_the_truth(ops, truth, hq: int, hkv: int, dim: int, window) -> None:
    n = 150
    qkv = random_qkv(n, hq, hkv, dim)
    table = [5, 1, 3, 2, 0, 4]
    want = run(truth, qkv, fresh(6, hkv, dim, torch.float32), [n], table, window)
    close(run(ops, qkv, fresh(6, hkv, dim), [n], table, window), want, 5e-5)
    close(run(ops, qkv, fresh(6, hkv, dim), [70, 71, 72, n], table, window), want, 5e-5)


def test_a_window_that_begins_with_the_last_key_of_a_span(ops, truth) -> None:
    """Token 574 sees 64 tokens, of which the first, 511, is the last of 512."""
    qkv, table = random_qkv(600, 4, 2, 32), list(range(10))
    want = run(truth, qkv, fresh(10, 2, 32, torch.float32), [600], table, 64)
    close(run(ops, qkv, fresh(10, 2, 32), [574, 575, 576, 600], table, 64)[570:580], want[570:580], 5e-5)


@pytest.mark.parametrize("window", [None, 64])
def test_single_tokens_at_the_borders_of_pages(ops, window) -> None:
    qkv, table = random_qkv(140, 4, 2, 24), [2, 0, 1]
    whole = run(ops, qkv, fresh(3, 2, 24), [140], table, window)
    steps = [62, 63, 64, 65, 126, 127, 128, 129, 140]
    assert torch.equal(run(ops, qkv, fresh(3, 2, 24), steps, table, window), whole)


def test_keys_land_in_their_pages(ops) -> None:
    q, k, v = random_qkv(70, 2, 2, 16)
    kv = fresh(4, 2, 16)
    run(ops, (q, k, v), kv, [30, 70], [3, 1], None)
    assert torch.equal(kv.k[3].transpose(0, 1).float(), k[:64]) and torch.equal(kv.v[1, :, :6].transpose(0, 1).float(), v[64:])
    assert not kv.k[[0, 2]].any()


def test_bits_of_a_long_context_do_not_depend_on_chunks_or_threads(ops) -> None:
    n, table = 1400, list(range(22))
    qkv = random_qkv(n, 8, 1, 64)
    whole = run(ops, qkv, fresh(22, 1, 64), [n], table, None)
    steps = [600, 1100, *range(1101, 1105), 1399, n]
    assert torch.equal(run(ops, qkv, fresh(22, 1, 64), steps, table, None), whole)
    for threads in (1, 5):
        assert torch.equal(run(CpuOps(threads, ops.isa), qkv, fresh(22, 1, 64), steps, table, None), whole)


@settings(max_examples=20)
@given(
    n=st.integers(1, 300),
    cuts=st.lists(st.integers(1, 299), max_size=5),
    window=st.sampled_from([None, 3, 64, 100]),
    shape=st.sampled_from([(8, 1, 64), (4, 2, 32), (2, 2, 24), (5, 1, 80), (3, 3, 144), (6, 1, 16), (9, 1, 48), (7, 1, 160)]),
)
def test_any_chunking_gives_the_same_bits(n: int, cuts: list[int], window, shape) -> None:
    qkv, pages = random_qkv(n, *shape), -(-n // PAGE)
    cuts = sorted({min(c, n) for c in cuts} | {n})
    table = list(reversed(range(pages)))
    whole = run(BEST, qkv, fresh(pages, *shape[1:]), [n], table, window)
    assert torch.equal(run(BEST, qkv, fresh(pages, *shape[1:]), cuts, table, window), whole)


def test_neighbours_do_not_matter(ops) -> None:
    lengths, starts, dim = [1, 90, 3, 64], [130, 0, 63, 64], 32
    kv, alone = fresh(16, 2, dim), []
    tables = [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    for i, start in enumerate(starts):
        if start:  # fill the past of each sequence
            q, k, v = random_qkv(start, 4, 2, dim, seed=i)
            ops.attention(q, k, v, kv, segments([0, start], [0], [tables[i]], [0]), 0.2, None)
    parts = [random_qkv(length, 4, 2, dim, seed=10 + i) for i, length in enumerate(lengths)]
    for i, part in enumerate(parts):
        alone.append(ops.attention(*part, kv, segments([0, lengths[i]], [starts[i]], [tables[i]], [0]), 0.2, None))
    cu = [0, 1, 91, 94, 158]
    together = ops.attention(
        *(torch.cat(x) for x in zip(*parts, strict=True)), kv, segments(cu, starts, tables, [0] * 4), 0.2, None
    )
    assert torch.equal(together, torch.cat(alone))


BEST = CpuOps(threads=1)
