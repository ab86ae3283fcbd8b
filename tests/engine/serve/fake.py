"""A decoder whose answer depends on every token it reads back from its pages and on its state slot.

Any mix-up of pages, slots, positions or chunk borders changes the text or raises, so scheduling can be tested without a model.
"""

from __future__ import annotations

import numpy as np

from engine import tensors  # not torch, which a worker's process would import for two seconds
from engine.kernels.ops import KVLayer, StateLayer
from engine.nn.batch import PAGE, Batch, Cache

VOCAB = 97


def step_hash(state: int, token: int, position: int) -> int:
    return (state * 31 + token * 7 + position + 1) % 1_000_003


def hashes_of(history: list[int]) -> list[int]:
    """The state after 0, 1, ... tokens."""
    hashes = [0]
    for position, token in enumerate(history):
        hashes.append(step_hash(hashes[-1], token, position))
    return hashes


def logits_of(history: list[int]) -> np.ndarray:
    """Float32 [VOCAB], all distinct, from the whole history."""
    return logits_of_state(hashes_of(history)[-1])


def logits_of_state(state: int) -> np.ndarray:
    order = (np.arange(VOCAB) * (state % 96 + 1) + state) % VOCAB  # a permutation, as 97 is prime
    return (order / 16).astype(np.float32)


def fake_cache(pages: int, slots: int) -> Cache:
    """Pages hold the token ids; the state slot holds the hash of the history."""
    k = tensors.from_numpy(np.full((pages, 1, PAGE, 1), -1, np.float32))
    conv, state = np.zeros((slots, 1, 1), np.float32), np.zeros((slots, 1, 1, 1), np.float32)
    state = StateLayer(tensors.from_numpy(conv), tensors.from_numpy(state))
    return Cache((KVLayer(k, k.clone()),), (state,))


class FakeDecoder:
    """`fail` may hold a token: a step that contains it raises."""

    def __init__(self, fail: int | None = None) -> None:
        self.fail = fail
        self.steps = 0
        self.rows = 0

    def forward(self, batch: Batch, cache: Cache) -> tensors.Tensor:
        self.steps += 1
        self.rows += len(batch.tokens)
        if self.fail is not None and self.fail in batch.tokens.numpy().tolist():
            raise RuntimeError("kernel failed")
        wanted = batch.logit_rows.numpy().tolist()
        out = np.zeros((len(wanted), VOCAB), np.float32)
        cu, starts, slots = (t.numpy().tolist() for t in (batch.segments.cu, batch.segments.start, batch.segments.slot))
        pages, states = cache.kv[0].k.numpy()[:, 0, :, 0], cache.states[0].s.numpy().reshape(-1)
        tokens, positions = batch.tokens.numpy(), batch.positions.numpy()
        assert len(set(slots)) == len(slots), "two sequences share a state slot"
        kept = [(0, -1)] * len(slots) if batch.segments.kept is None else batch.segments.kept.numpy().tolist()
        for s, slot in enumerate(slots):
            start, low, high = starts[s], cu[s], cu[s + 1]
            at = np.arange(start, start + high - low)
            assert (positions[low:high] == at).all()
            table = batch.segments.pages[s].numpy()
            pages[table[at // PAGE], at % PAGE] = tokens[low:high]
            at = np.arange(start + high - low)
            history = pages[table[at // PAGE], at % PAGE].astype(int).tolist()
            hashes = hashes_of(history)
            assert int(states[slot]) == hashes[start], "the state slot and the pages tell different histories"
            states[slot] = hashes[-1]
            count, to = kept[s]
            if to >= 0:
                assert 0 <= count < high - low and to not in slots
                states[to] = hashes[start + count]
            for i, row in enumerate(wanted):
                if low <= row < high:
                    out[i] = logits_of_state(hashes[start + row - low + 1])
        return tensors.from_numpy(out)


def alone(tokens: list[int], max_new: int, stop_ids: tuple[int, ...] = (), banned: tuple[int, ...] = ()) -> list[int]:
    """Greedy continuation of `tokens` computed without any engine; the stop token is not part of it."""
    history, out = list(tokens), []
    for _ in range(max_new):
        logits = logits_of(history)
        logits[list(banned)] = -np.inf
        token = int(logits.argmax())
        if token in stop_ids:
            break
        out.append(token)
        history.append(token)
    return out
