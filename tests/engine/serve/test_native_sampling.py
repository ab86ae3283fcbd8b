"""The native module's sampling against numpy's: the same tokens for the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import runner, sampling
from engine.ipc import Generate, Sampling, Thinking, token_array
from engine.runner import sample_plainly, sample_row
from engine.sampling import NoToken
from engine.sequence import Sampler, Sequence
from engine.step import Chunk

pytestmark = pytest.mark.skipif(not runner.SAMPLING, reason="native module not built: run ops/build_native")


class Rule:
    """A grammar's mask."""

    def __init__(self, allowed: bytes, may_end: bool) -> None:
        self.may_end, self._allowed = may_end, allowed

    def mask(self) -> bytes:
        return self._allowed

    def restrict(self, row, stop_ids) -> None:
        bits = np.unpackbits(np.frombuffer(self._allowed, np.uint8), bitorder="little")
        forbidden = np.ones(len(row), bool)
        forbidden[: len(bits)] = bits[: len(row)] == 0
        forbidden[list(stop_ids)] = not self.may_end
        row[forbidden] = -np.inf


def sequence(p: Sampling, seen: list[int] = (), prompt: list[int] = (0,), rule: Rule | None = None, **more) -> Sequence:
    request = Generate(id="r", tokens=token_array(prompt), max_new=9, sampling=p, **more)
    sampler = Sampler(request)
    for token in seen:
        sampler.observe(token)
    sampler.grammar = rule
    limit = {"arrived": 0.0, "arrived_at": 0.0, "limit": 9}
    return Sequence(request=request, prompt=len(prompt), sampler=sampler, tokens=request.tokens[:], **limit)


def both(row: np.ndarray, seq: Sequence):
    ours = sample_row(row.copy(), seq)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "SAMPLING", False)  # logprobs too
        (plain,) = sample_plainly(row[None].copy(), [seq])
    return ours, plain


def agree(row: np.ndarray, seq: Sequence) -> None:
    ours, plain = both(row, seq)
    if isinstance(plain, NoToken):
        assert isinstance(ours, NoToken) and (ours.status, ours.code) == (plain.status, plain.code)
        return
    assert not isinstance(ours, NoToken)
    if ours[0] != plain[0]:  # a sum of another last bit decides only what lies on a border
        assert ours[0] in on_the_border(row.copy(), seq), f"{ours[0]} is not {plain[0]}"
        return
    if plain[1] is None:
        assert ours[1] is None
        return
    assert ours[1].token == plain[1].token and ours[1].logprob == pytest.approx(plain[1].logprob, abs=1e-5)
    assert [i for i, _ in ours[1].top] == [i for i, _ in plain[1].top]
    assert [v for _, v in ours[1].top] == pytest.approx([v for _, v in plain[1].top], abs=1e-5)


def on_the_border(row: np.ndarray, seq: Sequence) -> set[int]:
    """What is drawn when u and top_p are a billionth less or more."""
    p = seq.request.sampling
    u = sampling.uniform(seq.sampler.seed, seq.sampler.sampled)
    runner.edit(row, seq)
    found = set()
    for by, least in ((a, b) for a in (-1e-9, 1e-9) for b in (-1e-9, 1e-9)):
        moved = Sampling(temperature=p.temperature, top_k=p.top_k, top_p=min(1.0, p.top_p * (1 + least)), min_p=p.min_p)
        found.add(sampling.draw(row, moved, min(max(u + by, 0.0), 1 - 1e-15)))
    return found


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 600, 2000, 10**6]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    seed=st.integers(-5, 2**70),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.dictionaries(st.integers(0, 63), st.floats(-9, 9), max_size=3),
    banned=st.sampled_from([(), (1, 2)]),
)
rows = st.tuples(
    st.sampled_from([64, 100, 1300, 5000]), st.integers(0, 2**32), st.sampled_from(["smooth", "ties", "flat", "peaked"])
)


def row_of(size: int, seed: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    row = rng.normal(size=size) * {"smooth": 2.0, "ties": 3.0, "flat": 0.01, "peaked": 12.0}[kind]
    return (np.round(row * 2) / 2 if kind == "ties" else row).astype(np.float32)


@settings(max_examples=300, deadline=None)
@given(rows, samplings, st.lists(st.integers(0, 63), max_size=6), st.lists(st.integers(0, 63), min_size=1, max_size=6), st.data())
def test_tokens_and_logprobs_are_numpys(shape, p, seen, prompt, data) -> None:
    row, rule = row_of(*shape), None
    if data.draw(st.booleans()):
        size = data.draw(st.sampled_from([-(-len(row) // 8), len(row) // 8 - 3, len(row) // 8 + 4]))
        allowed = np.random.default_rng(shape[1]).integers(0, 256, size, np.uint8) & data.draw(st.sampled_from([0, 1, 255]))
        rule = Rule(allowed.tobytes(), data.draw(st.booleans()))
    more = {
        "logprobs": data.draw(st.sampled_from([None, 0, 5])),
        "stop_ids": (5, 9),
        "min_new": data.draw(st.sampled_from([0, 9])),
    }
    agree(row, sequence(p, seen, prompt, rule, **more))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", ["one", "all"])
def test_logits_that_are_no_numbers(odd, temperature, where) -> None:
    row = np.full(200, odd, np.float32)
    if where == "one":
        row[:] = 1.0
        row[77] = odd
    agree(row, sequence(Sampling(temperature=temperature, seed=3)))


def test_a_forced_token_is_taken_if_there_could_be_one() -> None:
    row = np.zeros(100, np.float32)
    thinking = Thinking(close=(90, 91), open_at_start=True, budget=0)
    ours, plain = both(row, sequence(Sampling(temperature=1.0), thinking=thinking, logprobs=1))
    assert ours[0] == plain[0] == 90 and ours[1].token == 90
    agree(np.full(100, -np.inf, np.float32), sequence(Sampling(), thinking=thinking))


def test_the_whole_range_of_u_is_walked() -> None:
    """Every token that has mass is drawn by some u, the last one at the end."""
    row, p = np.array([0.0, -1e30, 1.0, -np.inf, 0.5] * 40, np.float32), Sampling(temperature=1.0)
    for u in [0.0, 1e-12, *np.linspace(0, 1, 97, endpoint=False).tolist(), 1 - 2**-53]:
        assert runner._native.sample_row(row, None, 1.0, 0, 1.0, 0.0, u, -1) == sampling.draw(row, p, u)


@pytest.mark.parametrize("size", [100, 3000])  # sorted at once, and through buckets
@pytest.mark.parametrize("cut", [{"top_p": 0.1}, {"top_k": 10}, {"top_k": 50, "top_p": 0.2}])
def test_of_equals_at_the_border_the_lower_tokens_stay(size: int, cut: dict) -> None:
    row, kept = np.zeros(size, np.float32), size // 10 if cut == {"top_p": 0.1} else 10
    for seed in range(40):
        seq = sequence(Sampling(temperature=1.0, **cut))
        seq.sampler.seed = seed
        agree(row, seq)
        assert sample_row(row.copy(), seq)[0] <= kept


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    row = np.zeros(8, np.float32)
    for p in (Sampling(logit_bias={8: 1.0}), Sampling(banned=(-1,))):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            sample_row(row, sequence(p))


def chunk_of(seq: Sequence) -> Chunk:
    return Chunk(seq, 0, 1, True)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("p", "more"),
    [
        ({}, {}),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.05}, {}),
        ({"banned": (3,)}, {}),
        ({"logit_bias": {2: 5.0}}, {}),
        ({"presence_penalty": 1.0}, {}),
        ({"repetition_penalty": 1.3}, {}),
        ({}, {"min_new": 2, "stop_ids": (1,)}),
        ({}, {"logprobs": 2}),
        ({}, {"thinking": Thinking(close=(4, 5), open_at_start=True, budget=0)}),
    ],
)
def test_plain_rows_get_the_token_of_the_long_way(p, more, temperature) -> None:
    rows = np.random.default_rng(7).standard_normal((3, 64)).astype(np.float32) * 3
    seqs = [sequence(Sampling(temperature=temperature, seed=seed, **p), [seed], **more) for seed in range(3)]
    found = runner.read_logits(tuple(map(chunk_of, seqs)), rows.copy())
    drawn = [sample_row(row, seq) for row, seq in zip(rows.copy(), seqs, strict=True)]
    assert [(o.token, o.logprob) for o in found] == drawn
    assert seqs[0].sampler.plain == (not p.keys() - {"top_k", "top_p", "min_p"} and not more)


def test_a_plain_row_without_a_token_says_why() -> None:
    for value, status in ((-np.inf, 400), (np.nan, 500)):
        row = np.full((1, 64), value, np.float32)
        (found,) = runner.read_logits((chunk_of(sequence(Sampling(temperature=0.0))),), row)
        assert found.token is None and found.error.status == status
