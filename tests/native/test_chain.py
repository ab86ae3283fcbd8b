"""A whole step in one call: bit for bit its halves one by one, whatever the family, the batch and the rows that are wanted."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import _native
from engine.experts.recording import Recording
from engine.kernels.cpu import CpuOps
from engine.models.load import load_model
from engine.models.spec import MoeSpec
from engine.nn.batch import Batch, Cache, Flat
from engine.nn.decoder import Decoder
from engine.nn.experts import InPlace, expert_banks
from tests.support.oracle import tokens
from tests.support.steps import Driver, across_a_recording
from tests.support.tiny import KINDS, make_tiny

pytestmark = pytest.mark.skipif(not hasattr(_native.Ops, "chain"), reason="the module was built from other sources")

LENGTH = 97  # more than a page and no multiple of anything


class HalfByHalf(CpuOps):
    """As `CpuOps`; a step is never one call."""

    @property
    def joined(self):
        joined = super().joined
        joined.chain = lambda parts: None
        return joined


def flat(batch: Batch, wanted: list[int] | None = None) -> Flat:
    """The batch as a scheduler would have it; the tokens behind each sequence's past are all that is known of it."""
    seg, pieces = batch.segments, []
    rows = set(batch.logit_rows.tolist() if wanted is None else wanted)
    for s, (low, high) in enumerate(zip(seg.cu.tolist(), seg.cu[1:].tolist(), strict=False)):
        start = int(seg.start[s])
        known = array("i", [0] * start + batch.tokens[low:high].tolist())
        keep = None
        if seg.kept is not None and int(seg.kept[s, 1]) >= 0:
            keep = (start + int(seg.kept[s, 0]), int(seg.kept[s, 1]))
        asked = tuple(start + row - low for row in range(low, high) if row in rows)
        pieces.append((known, start, len(known), int(seg.slot[s]), seg.pages[s].tolist(), asked, keep))
    return Flat(pieces)


class Chained:
    """A decoder that gets its steps as the runner gives them."""

    def __init__(self, inner: Decoder, wanted: list[int] | None = None, kept: torch.Tensor | None = None) -> None:
        self.spec, self._inner, self._wanted, self._kept = inner.spec, inner, wanted, kept
        self.arrays = 0  # steps that were one call

    def forward(self, batch: Batch, cache: Cache) -> torch.Tensor:
        batch = replace(batch, segments=replace(batch.segments, kept=self._kept))
        out = self._inner.forward(flat(batch, self._wanted), cache)
        self.arrays += isinstance(out, np.ndarray)
        return torch.from_numpy(out.copy()) if isinstance(out, np.ndarray) else out


def logits(decoder: Decoder | Chained) -> torch.Tensor:
    """Of a prompt in odd chunks, of steps of one token, and of two sequences at once."""
    driver, prompt = Driver(decoder, torch.bfloat16), tokens(LENGTH)
    out = [driver.chunks(2, prompt, [1, 7, 13]), driver.chunks(1, prompt[:70], [64, 1])]
    together = driver.step({0: prompt[:41], 3: tokens(20, 5)}) | driver.step({1: prompt[70:80], 2: prompt[:1]})
    return torch.cat([*out, *(together[s] for s in sorted(together))])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_chain_has_the_bits_of_its_halves(kind, tmp_path) -> None:
    make_tiny(kind, tmp_path, torch.bfloat16)
    ops, apart = CpuOps(2), HalfByHalf(2)
    loaded = load_model(tmp_path, ops)
    truth = logits(Decoder(loaded.spec, loaded.weights, apart))
    chained = Chained(Decoder(loaded.spec, loaded.weights, ops))
    assert torch.equal(logits(chained), truth)
    assert chained.arrays > 0
    fallen_back = Chained(Decoder(loaded.spec, loaded.weights, apart))
    assert torch.equal(logits(fallen_back), truth) and fallen_back.arrays == 0


@pytest.mark.parametrize("wanted", [[], [2], [0, 4], [0, 1, 2, 3, 4]])
def test_only_wanted_rows_are_returned(wanted, tmp_path) -> None:
    make_tiny("qwen3_next", tmp_path, torch.bfloat16)
    ops = CpuOps(1)
    loaded = load_model(tmp_path, ops)
    drivers = [Driver(Chained(Decoder(loaded.spec, loaded.weights, ops), rows), torch.bfloat16) for rows in (wanted, None)]
    batches = []
    for driver in drivers:
        forward = driver.decoder.forward
        driver.decoder.forward = lambda batch, cache, forward=forward: batches.append(forward(batch, cache)) or torch.zeros(5, 1)
        driver.step({0: tokens(3), 2: tokens(2, 9)})
        assert driver.decoder.arrays == 1
    assert torch.equal(batches[0], batches[1][wanted])


def test_a_state_is_kept_on_the_way(tmp_path) -> None:
    make_tiny("qwen3_next", tmp_path, torch.bfloat16)
    ops, prompt = CpuOps(1), tokens(20)
    loaded = load_model(tmp_path, ops)
    decoder = Decoder(loaded.spec, loaded.weights, ops)
    paused = Driver(decoder, torch.bfloat16)
    paused.chunks(0, prompt[:9], [9])
    slot, spare = int(paused.slots[0]), int(paused.slots[3])
    chained = Chained(decoder, kept=torch.tensor([[9, spare]], dtype=torch.int32))
    through = Driver(chained, torch.bfloat16)
    through.chunks(0, prompt, [20])
    assert chained.arrays == 1
    for one, other in zip(paused.cache.states, through.cache.states, strict=True):
        assert one is None or (torch.equal(one.conv[slot], other.conv[spare]) and torch.equal(one.s[slot], other.s[spare]))


def test_tables_of_angles_grow(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("engine.nn.rope.FIRST_ROWS", 16)
    make_tiny("qwen3_moe", tmp_path, torch.bfloat16)
    ops = CpuOps(1)
    loaded = load_model(tmp_path, ops)
    chained = Chained(Decoder(loaded.spec, loaded.weights, ops))
    assert torch.equal(logits(chained), logits(Decoder(loaded.spec, loaded.weights, ops))) and chained.arrays


def test_another_cache_and_a_recording_are_noticed(tmp_path) -> None:
    make_tiny("qwen2_moe", tmp_path, torch.bfloat16)
    ops = CpuOps(1)
    loaded = load_model(tmp_path, ops)
    moe = [layer.ffn for layer in loaded.spec.layers if isinstance(layer.ffn, MoeSpec)]
    recording = Recording(InPlace(expert_banks(loaded.spec, loaded.weights), ops), len(moe), moe[0].experts)
    chained = Chained(Decoder(loaded.spec, loaded.weights, ops, recording))
    truth = Driver(Decoder(loaded.spec, loaded.weights, ops), torch.bfloat16).chunks(0, tokens(9), [3])
    for _ in range(2):
        driver = Driver(chained, torch.bfloat16)  # each has a cache of its own
        got = across_a_recording(driver, recording, tokens(9))
        assert torch.equal(got, truth)
    assert chained.arrays == 4


GOOD = (array("i", [1, 2, 3]), 0, 3, 0, [1], (2,), None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ((0, array("i", [1, 2])), "tokens"),
        ((0, array("i", [1, 2, -1])), "tokens"),
        ((0, array("i", [1, 2, 1 << 30])), "tokens"),
        ((0, array("q", [1, 2, 3])), "tokens"),
        ((1, -1), "start"),
        ((2, 0), "end"),
        ((2, 1 << 40), "end"),
        ((3, 4), "slot"),
        ((4, []), "pages"),
        ((4, [-1]), "pages"),
        ((4, [1 << 20]), "pages"),
        ((5, (3,)), "wanted"),
        ((5, (2, 1)), "wanted"),
        ((6, (3, 1)), "kept"),
        ((6, (1, 4)), "kept"),
    ],
)
def test_a_step_is_checked_before_anything_is_computed(change, name, chain) -> None:
    run, cache = chain
    piece = list(GOOD)
    piece[change[0]] = change[1]
    with pytest.raises(ValueError, match=f"^{name}:"):
        run([tuple(piece)])
    assert not any(kv is not None and kv.k.any() for kv in cache.kv)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hybrid")
    make_tiny("qwen3_next", directory, torch.bfloat16)
    ops = CpuOps(1)
    loaded = load_model(directory, ops)
    decoder = Decoder(loaded.spec, loaded.weights, ops)
    cache = Driver(decoder, torch.bfloat16).cache
    return decoder._chains.get(3, cache), cache
