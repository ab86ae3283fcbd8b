"""Latent attention: the truth's numbers, bits that know nothing of chunks, neighbours or threads, one row a token in a page."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import CpuOps
from engine.kernels.ops import KVLayer
from tests.native.helpers import PAGE, block_bytes, close, segments

SHAPES = [(16, 512, 64), (128, 64, 16), (5, 28, 8), (67, 32, 16), (1, 16, 0), (20, 80, 32)]  # heads, rank, rotated


def fresh(pages: int, dim: int, dtype=torch.bfloat16) -> KVLayer:
    return KVLayer(torch.zeros(pages, 1, PAGE, dim, dtype=dtype), None)


def random_rows(n: int, heads: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, heads, dim, generator=gen), torch.randn(n, dim, generator=gen).bfloat16().float()


def run(ops, rows, kv: KVLayer, cuts: list[int], table: list[int], rank: int) -> torch.Tensor:
    """One sequence from position 0, prefilled in the chunks that end at `cuts`."""
    q, latent = rows
    out, at = [], 0
    for end in cuts:
        seg = segments([0, end - at], [at], [table], [0])
        out.append(ops.latent_attention(q[at:end], latent[at:end], kv, seg, q.shape[2] ** -0.5, rank))
        at = end
    return torch.cat(out)


@pytest.mark.parametrize(("heads", "rank", "rotated"), SHAPES)
def test_against_the_truth(ops, truth, heads: int, rank: int, rotated: int) -> None:
    n, table, dim = 150, [5, 1, 3], rank + rotated
    rows = random_rows(n, heads, dim)
    want = run(truth, rows, fresh(6, dim, torch.float32), [n], table, rank)
    for cuts in ([n], [70, 71, 72, n]):
        close(run(ops, rows, fresh(6, dim), cuts, table, rank), want, 5e-5)


def test_values_are_the_first_elements_of_the_keys(ops) -> None:
    """Bit for bit what attention gives that holds its values apart."""
    n, heads, rank, dim, table = 90, 8, 64, 96, [1, 0]
    q, latent = random_rows(n, heads, dim)
    apart = KVLayer(*(torch.zeros(2, 1, PAGE, dim, dtype=torch.bfloat16) for _ in range(2)))
    seg = segments([0, n], [0], [table], [0])
    whole = ops.attention(q, latent[:, None], latent[:, None], apart, seg, dim**-0.5, None)
    assert torch.equal(run(ops, (q, latent), fresh(2, dim), [n], table, rank), whole[..., :rank])


def test_one_row_a_token_lands_in_its_page(ops) -> None:
    q, latent = random_rows(70, 4, 40)
    kv = fresh(4, 40)
    run(ops, (q, latent), kv, [30, 70], [3, 1], 32)
    assert torch.equal(kv.k[3, 0].float(), latent[:64]) and torch.equal(kv.k[1, 0, :6].float(), latent[64:])
    assert not kv.k[[0, 2]].any()


def test_bits_of_a_long_context_do_not_depend_on_chunks_or_threads(ops) -> None:
    n, table, dim, rank = 1400, list(range(22)), 80, 64
    rows = random_rows(n, 12, dim)
    whole = run(ops, rows, fresh(22, dim), [n], table, rank)
    steps = [600, 1100, *range(1101, 1105), 1399, n]
    assert torch.equal(run(ops, rows, fresh(22, dim), steps, table, rank), whole)
    for threads in (1, 5):
        assert torch.equal(run(CpuOps(threads, ops.isa), rows, fresh(22, dim), steps, table, rank), whole)


@settings(max_examples=20)
@given(
    n=st.integers(1, 200),
    cuts=st.lists(st.integers(1, 199), max_size=5),
    shape=st.sampled_from([(8, 64, 16), (70, 32, 32), (3, 20, 4)]),
)
def test_any_chunking_gives_the_same_bits(n: int, cuts: list[int], shape) -> None:
    heads, rank, rotated = shape
    rows, pages = random_rows(n, heads, rank + rotated), -(-n // PAGE)
    cuts = sorted({min(c, n) for c in cuts} | {n})
    table = list(reversed(range(pages)))
    whole = run(BEST, rows, fresh(pages, rank + rotated), [n], table, rank)
    assert torch.equal(run(BEST, rows, fresh(pages, rank + rotated), cuts, table, rank), whole)


def test_neighbours_do_not_matter(ops) -> None:
    lengths, starts, dim, rank = [1, 90, 3, 64], [130, 0, 63, 64], 48, 32
    kv, alone, tables = fresh(16, dim), [], [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    for i, start in enumerate(starts):
        if start:  # fill the past of each sequence
            run(ops, random_rows(start, 6, dim, seed=i), kv, [start], tables[i], rank)
    parts = [random_rows(length, 6, dim, seed=10 + i) for i, length in enumerate(lengths)]
    for i, part in enumerate(parts):
        seg = segments([0, lengths[i]], [starts[i]], [tables[i]], [0])
        alone.append(ops.latent_attention(*part, kv, seg, 0.2, rank))
    seg = segments([0, 1, 91, 94, 158], starts, tables, [0] * 4)
    together = ops.latent_attention(*(torch.cat(x) for x in zip(*parts, strict=True)), kv, seg, 0.2, rank)
    assert torch.equal(together, torch.cat(alone))


def test_a_matrix_for_each_head(ops, truth, rng) -> None:
    """The products of the absorbed form, of float and of block weights, with the bits of one head's product alone."""
    for weight in (torch.randn(3, 70, 40, generator=rng), torch.randn(3, 24, 64, generator=rng).bfloat16()):
        x = torch.randn(37, 3, weight.shape[2], generator=rng)
        out = ops.heads_linear(x, weight)
        close(out, truth.heads_linear(x, weight.float()), 1e-5)
        assert all(torch.equal(out[:, h], ops.linear(x[:, h], weight[h])) for h in range(3))
        assert torch.equal(ops.heads_linear(x[5:6], weight), out[5:6])
    flat = block_bytes("Q4_0", rows=3 * 16, cols=64)
    stack = type(flat)(flat.data.view(3, 16, -1), "Q4_0", 64)
    x = torch.randn(9, 3, 64, generator=rng)
    out = ops.heads_linear(x, stack)
    close(out, truth.heads_linear(x, truth.prepare(stack)), 1e-5)


def test_what_does_not_fit_is_refused(ops) -> None:
    q, latent = random_rows(3, 2, 24)
    seg = segments([0, 3], [0], [[0]], [0])
    for rank, kv in ((25, fresh(1, 24)), (16, fresh(1, 20)), (16, fresh(0, 24))):
        with pytest.raises(ValueError, match="out|pages"):
            ops.latent_attention(q, latent, kv, seg, 1.0, rank)
    with pytest.raises(ValueError, match="weight"):
        ops.heads_linear(q, torch.zeros(3, 5, 24))


BEST = CpuOps(threads=1)
