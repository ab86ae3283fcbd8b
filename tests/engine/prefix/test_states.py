"""The real tensors: a copied page and a restored state are bitwise the originals, in every layer."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.ops import KVLayer, StateLayer
from engine.nn.batch import PAGE, Cache
from engine.prefix.cache import RadixCache
from engine.prefix.states import TensorStorage


def tensors(pages: int = 6, slots: int = 2) -> Cache:
    torch.manual_seed(1)
    kv = KVLayer(torch.randn(pages, 2, PAGE, 8), torch.randn(pages, 2, PAGE, 8).to(torch.bfloat16))
    state = StateLayer(torch.randn(slots, 10, 3), torch.randn(slots, 2, 4, 4))
    return Cache((kv, None, kv), (None, state, None))


def test_sizes_count_every_layer() -> None:
    storage = TensorStorage(tensors())
    assert storage.page_bytes == 2 * (2 * PAGE * 8 * 4 + 2 * PAGE * 8 * 2)
    assert storage.state_bytes == (10 * 3 + 2 * 4 * 4) * 4


def test_copied_page_and_restored_state_are_the_originals() -> None:
    cache = tensors()
    storage = TensorStorage(cache)
    before = [t[1].clone() for t in (cache.kv[0].k, cache.kv[0].v)]
    storage.copy_page(1, 4)
    assert torch.equal(cache.kv[0].k[4], before[0]) and torch.equal(cache.kv[2].v[4], before[1])
    blob = storage.save(0)
    saved = [t.clone() for t in blob]
    cache.states[1].s.add_(1)  # the live state goes on; the blob must not
    assert all(torch.equal(a, b) for a, b in zip(blob, saved, strict=True))
    storage.load(blob, 1)
    assert torch.equal(cache.states[1].s[1], saved[1]) and torch.equal(cache.states[1].conv[1], saved[0])
    storage.clear(1)
    assert not cache.states[1].s[1].any() and not cache.states[1].conv[1].any()


def test_a_lease_over_real_tensors_sees_the_rows_that_were_written() -> None:
    tensors_ = tensors()
    cache = RadixCache(TensorStorage(tensors_), pages=6, slots=2, state_budget=1 << 20)
    prompt = list(range(PAGE + 10))
    one = cache.open(prompt, session="a", anchors=())
    one.grow(len(prompt))
    tensors_.kv[0].k[one.pages[1], :, :10] = 7.0
    tensors_.states[1].s[one.slot] = 3.0
    one.close(prompt, "stop")
    two = cache.open([*prompt, 5], session="a", anchors=())
    assert two.match.common == len(prompt) and two.pages[0] == one_page(cache) and two.pages[1] not in (two.pages[0],)
    assert (tensors_.kv[0].k[two.pages[1], :, :10] == 7.0).all() and (tensors_.states[1].s[two.slot] == 3.0).all()


def one_page(cache: RadixCache) -> int:
    return next(iter(cache.tree.root.children.values())).pages[0]


@pytest.mark.parametrize("start,count", [(0, 1), (0, PAGE), (5, 3), (60, 10), (1, 3 * PAGE), (PAGE, 2 * PAGE), (63, 130)])
@pytest.mark.parametrize("skip,more", [(0, 0), (7, 9)])
def test_rows_and_states_come_back_from_bytes_bit_by_bit(start: int, count: int, skip: int, more: int) -> None:
    source, target = tensors(12), tensors(12)
    for layer in (target.kv[0],):
        layer.k.zero_(), layer.v.zero_()
    read, write = TensorStorage(source), TensorStorage(target)
    pages, others = [7, 2, 9, 4, 0], [3, 8, 1, 10, 5]
    first = start + PAGE - skip  # a run that begins `skip` rows before and ends `more` rows behind the wanted ones
    data = b"".join(read.read_rows([11, *pages], first, skip + count + more))
    assert len(data) == (skip + count + more) * read.row_bytes
    write.write_rows(others, start, count, memoryview(bytearray(data)), skip)
    for at in range(start, start + count):
        (p, r), q = divmod(at, PAGE), others[at // PAGE]
        for a, b in ((source.kv[0].k, target.kv[0].k), (source.kv[0].v, target.kv[0].v)):
            assert torch.equal(a[pages[p], :, r], b[q, :, r])
    touched = torch.zeros(12, PAGE, dtype=torch.bool)
    for at in range(start, start + count):
        touched[others[at // PAGE], at % PAGE] = True
    assert not target.kv[0].k.transpose(1, 2)[~touched].any(), "rows were written that are not part of the run"
    blob = read.save(1)
    again = read.unpack(memoryview(bytearray(b"".join(read.pack(blob)))))
    assert all(torch.equal(a, b) for a, b in zip(blob, again, strict=True))


def test_latent_attention_keeps_one_row_a_token() -> None:
    latent = [Cache((KVLayer(torch.randn(4, 1, PAGE, dim), None),), (None,)) for dim in (12, 12, 10)]
    source, target, other = (TensorStorage(cache) for cache in latent)
    assert source.page_bytes == PAGE * 12 * 4 and source.layout() == target.layout() != other.layout()
    data = b"".join(source.read_rows([2, 0], 60, 10))
    target.write_rows([1, 3], 60, 10, memoryview(bytearray(data)), 0)
    assert torch.equal(latent[1].kv[0].k[1, :, 60:], latent[0].kv[0].k[2, :, 60:])
    target.copy_page(1, 2)
    assert torch.equal(latent[1].kv[0].k[2], latent[1].kv[0].k[1])
