"""Paged attention: the truth's numbers, and bits that know nothing of chunks, neighbours or who walks the spans."""

import pytest
import torch

from engine.kernels.cuda import attention
from engine.kernels.ops import KVLayer
from tests.native.attention_inputs import fresh, random_qkv, run
from tests.native.helpers import PAGE, close, segments

EXACT = 5e-5


def filled(pages: int, heads: int, dim: int) -> KVLayer:
    """Pages of some past."""
    gen = torch.Generator().manual_seed(5)
    return KVLayer(*(torch.randn(pages, heads, PAGE, dim, generator=gen).bfloat16() for _ in range(2)))


@pytest.mark.parametrize(("hq", "hkv", "dim", "window"), [(4, 1, 64, None), (6, 3, 20, 60), (2, 1, 256, 50)])
def test_against_the_truth_in_any_chunks(ops, truth, hq: int, hkv: int, dim: int, window) -> None:
    n, table = 68, [5, 1]
    qkv = random_qkv(n, hq, hkv, dim)
    whole = run(ops, qkv, fresh(6, hkv, dim), [n], table, window)
    close(whole, run(truth, qkv, fresh(6, hkv, dim, torch.float32), [n], table, window), EXACT)
    assert torch.equal(run(ops, qkv, fresh(6, hkv, dim), [63, n], table, window), whole)


@pytest.mark.parametrize("window", [None, 600])
def test_spans_joined_and_walked_have_the_same_bits(there, truth, window) -> None:
    """1,100 keys are three spans."""
    n, table = 1100, list(range(18))
    q, k, v = random_qkv(n, 2, 1, 32)
    kv = filled(18, 1, 32)
    seg = segments([0, 3], [n - 3], [table], [0])
    write, attend = there(attention.write_pages), there(attention.attend)
    write(k[-3:], kv.k, seg)
    write(v[-3:], kv.v, seg)
    last = segments([0, 3], [n - 3], [table], [0])
    split = attend(q[-3:], kv, last, 0.3, window, split=True)
    assert torch.equal(attend(q[-3:], kv, last, 0.3, window, split=False), split)
    exact = KVLayer(kv.k.float(), kv.v.float())
    close(split, truth.attention(q[-3:], k[-3:], v[-3:], exact, last, 0.3, window), EXACT)


def test_neighbours_do_not_matter(ops) -> None:
    lengths, starts, dim = [1, 9, 3, 12], [130, 0, 63, 64], 32
    kv, alone = filled(9, 2, dim), []
    tables = [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    parts = [random_qkv(length, 4, 2, dim, seed=10 + i) for i, length in enumerate(lengths)]
    for i, part in enumerate(parts):
        alone.append(ops.attention(*part, kv, segments([0, lengths[i]], [starts[i]], [tables[i]], [0]), 0.2, None))
    seg = segments([0, 1, 10, 13, 25], starts, tables, [0] * 4)
    together = ops.attention(*(torch.cat(x) for x in zip(*parts, strict=True)), kv, seg, 0.2, None)
    assert torch.equal(together, torch.cat(alone))


def test_keys_land_in_their_pages_and_nowhere_else(ops) -> None:
    q, k, v = random_qkv(70, 2, 2, 16)
    kv = fresh(4, 2, 16)
    run(ops, (q, k, v), kv, [30, 70], [3, 1], None)
    assert torch.equal(kv.k[3].transpose(0, 1).float(), k[:64]) and torch.equal(kv.v[1, :, :6].transpose(0, 1).float(), v[64:])
    assert not kv.k[[0, 2]].any()


def test_keys_are_rounded_to_the_nearest(there) -> None:
    k = torch.tensor([1.00390625, 1.01171875, -1.0040, 3.0e38, float("inf"), 0.0, -0.0, 65535.0]).view(1, 1, 8)
    cache = torch.zeros(1, 1, PAGE, 8, dtype=torch.bfloat16)
    there(attention.write_pages)(k, cache, segments([0, 1], [0], [[0]], [0]))
    assert torch.equal(cache[0, 0, 0], k[0, 0].bfloat16())


def test_what_a_page_held_before_does_not_matter(ops) -> None:
    qkv = random_qkv(20, 2, 2, 16)
    spoilt = fresh(2, 2, 16)
    spoilt.k.fill_(float("nan"))
    spoilt.v.fill_(float("inf"))
    assert torch.equal(run(ops, qkv, spoilt, [20], [1], None), run(ops, qkv, fresh(2, 2, 16), [20], [1], None))


@pytest.mark.parametrize(("heads", "rank", "rotated"), [(5, 28, 8), (20, 64, 16), (1, 16, 0)])
def test_latent_attention(ops, truth, heads: int, rank: int, rotated: int) -> None:
    n, dim = 80, rank + rotated
    q, latent = random_qkv(n, heads, 1, dim)[:2]
    seg = segments([0, n], [0], [[2, 0]], [0])
    kv, exact = (KVLayer(torch.zeros(3, 1, PAGE, dim, dtype=dtype), None) for dtype in (torch.bfloat16, torch.float32))
    whole = ops.latent_attention(q, latent[:, 0], kv, seg, dim**-0.5, rank)
    close(whole, truth.latent_attention(q, latent[:, 0], exact, seg, dim**-0.5, rank), EXACT)
    last = segments([0, 3], [n - 3], [[2, 0]], [0])
    assert torch.equal(ops.latent_attention(q[-3:], latent[-3:, 0], kv, last, dim**-0.5, rank), whole[-3:])
