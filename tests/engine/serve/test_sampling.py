"""Sampling against its plain definitions, written here over Python lists."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ipc import Generate, Sampling, Thinking, token_array
from engine.runner import sample
from engine.sampling import NoToken, ban, draw, greedy, logprobs, nucleus, penalize, support, top_ids, uniform
from engine.sequence import Sampler, Sequence

# few distinct values, so that ties are common
values = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=40)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
)


def array(values) -> np.ndarray:
    return np.array(values, np.float32)


def by_definition(row: list[float], p: Sampling) -> dict[int, float]:
    """Token -> probability: keep top-k, then top-p of what is left, then what reaches min_p of the best."""
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if p.top_k:
        ranked = ranked[: p.top_k]
    mass = {i: math.exp((row[i] - row[ranked[0]]) / p.temperature) for i in ranked}
    total, kept, reached = sum(mass.values()), [], 0.0
    for i in ranked:
        kept.append(i)
        reached += mass[i]
        if reached >= p.top_p * total and p.top_p < 1.0:
            break
    kept = [i for i in kept if mass[i] >= p.min_p * (1 - 1e-12)]
    norm = sum(mass[i] for i in kept)
    return {i: mass[i] / norm for i in kept}


@given(values, samplings)
def test_the_support_and_its_probabilities_are_those_of_the_definition(row, p) -> None:
    ids, x = support(array(row), p)
    probabilities = (np.exp(x) / np.exp(x).sum()).tolist()
    got = dict(zip(range(len(row)) if ids is None else ids.tolist(), probabilities, strict=True))
    expected = by_definition(row, p)
    if got.keys() != expected.keys():  # a sum that meets top_p to the last bit may fall on either side
        near = [abs(s / p.top_p - 1) for s in _partial_masses(row, p)]
        assert min(near) < 1e-9
        return
    assert got == pytest.approx(expected, rel=1e-6)


def _partial_masses(row: list[float], p: Sampling) -> list[float]:
    full = by_definition(row, Sampling(temperature=p.temperature, top_k=p.top_k))
    out, reached = [], 0.0
    for q in sorted(full.values(), reverse=True):
        reached += q
        out.append(reached)
    return out


@given(values, samplings, st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_inverse_of_the_distribution(row, p, u) -> None:
    ids, x = support(array(row), p)
    allowed = list(range(len(row))) if ids is None else ids.tolist()
    token = draw(array(row), p, u)
    before = sum((np.exp(x) / np.exp(x).sum())[: allowed.index(token)].tolist())
    own = float((np.exp(x) / np.exp(x).sum())[allowed.index(token)])
    assert before - 1e-9 <= u <= before + own + 1e-9


def test_draws_follow_the_distribution() -> None:
    row, p = [0.0, 1.0, 2.0, -1.0, 2.5], Sampling(temperature=0.8, top_k=4)
    counts = [0] * 5
    for n in range(8000):
        counts[draw(array(row), p, uniform(7, n))] += 1
    expected = by_definition(row, p)
    for token, count in enumerate(counts):
        q = expected.get(token, 0.0)
        assert abs(count / 8000 - q) <= 4 * math.sqrt(q * (1 - q) / 8000)  # four standard deviations; the seed is fixed


@given(values, st.integers(1, 40))
def test_top_ids_prefers_low_ids_among_ties(row, k) -> None:
    k = min(k, len(row))
    expected = sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])
    assert top_ids(array(row), k).tolist() == expected


def test_a_nucleus_larger_than_the_first_guess_is_found_whole() -> None:
    x = np.zeros(5000)
    assert len(nucleus(x, 0.9)) == 4500
    assert nucleus(x, 1e-9).tolist() == [0]


@given(st.lists(values.filter(lambda v: len(v) >= 5).map(lambda v: v[:5]), min_size=1, max_size=4))
def test_greedy_is_the_first_highest(rows) -> None:
    assert greedy(array(rows)) == [row.index(max(row)) for row in rows]


def test_what_cannot_be_sampled_says_why() -> None:
    everything_banned = array([-math.inf] * 3)
    broken = array([0.0, math.nan, 1.0])
    for row, status in ((everything_banned, 400), (broken, 500)):
        (problem,) = greedy(row[None])
        assert isinstance(problem, NoToken) and problem.status == status
        with pytest.raises(NoToken):
            draw(row, Sampling(), 0.5)


@given(
    st.lists(st.floats(-5, 5, width=32), min_size=8, max_size=8),
    st.lists(st.integers(0, 7), max_size=6),
    st.lists(st.integers(0, 7), min_size=1, max_size=6),
    st.sampled_from([1.0, 1.3, 0.8]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, -0.25, 0.5]),
)
def test_penalties_are_those_of_the_definition(row, sampled, prompt, repetition, presence, frequency) -> None:
    p = Sampling(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    seq = sequence(row_request(p, prompt))
    for token in sampled:
        seq.sampler.observe(token)
    got = array(row)
    penalize(got, p, seq.sampler.prompt_ids, seq.sampler.counts)
    expected = list(row)
    for i in range(8):
        if i in prompt or i in sampled:
            expected[i] = expected[i] / repetition if expected[i] > 0 else expected[i] * repetition
        if i in sampled:
            expected[i] -= presence + frequency * sampled.count(i)
    assert got.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(values.filter(lambda v: len(v) >= 3), st.integers(0, 50))
def test_logprobs_are_those_of_the_raw_softmax(row, top) -> None:
    (got,) = logprobs(array([row]), [1], top)
    norm = math.log(sum(math.exp(v) for v in row))
    assert got.logprob == pytest.approx(row[1] - norm, abs=1e-5)
    best = sorted((v - norm for v in row), reverse=True)[:top]
    assert [v for _, v in got.top] == pytest.approx(best, abs=1e-5)
    assert all(row[i] - norm == pytest.approx(v, abs=1e-5) for i, v in got.top)


def row_request(p: Sampling, tokens: list[int] | None = None, **more: object) -> Generate:
    return Generate(id="r", tokens=token_array(tokens or [0]), max_new=9, sampling=p, **more)


def sequence(request: Generate) -> Sequence:
    return Sequence(
        request=request,
        prompt=len(request.tokens),
        limit=request.max_new,
        arrived=0.0,
        arrived_at=0.0,
        sampler=Sampler(request),
        tokens=request.tokens[:],
    )


mixed = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.6, 1.0]),
    seed=st.integers(-5, 2**70),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.dictionaries(st.integers(0, 7), st.floats(-3, 3), max_size=3),
    banned=st.sampled_from([(), (1, 2)]),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(mixed, st.lists(st.floats(-4, 4, width=32), min_size=8, max_size=8)), min_size=1, max_size=6))
def test_a_token_does_not_depend_on_the_batch(rows) -> None:
    requests = [row_request(p, [3, 4], logprobs=2, min_new=1, stop_ids=(5,)) for p, _ in rows]
    together = sample(array([row for _, row in rows]), [sequence(r) for r in requests])
    one_by_one = [sample(array([row]), [sequence(r)])[0] for r, (_, row) in zip(requests, rows, strict=True)]
    assert together == one_by_one
    for (p, _), (token, logprob) in zip(rows, together, strict=True):
        assert token not in p.banned and token != 5 and logprob.token == token


def test_the_seed_fixes_the_text_and_positions_draw_differently() -> None:
    def text(seed: int | None) -> list[int]:
        seq = sequence(row_request(Sampling(seed=seed)))
        out = []
        for _ in range(12):
            ((token, _),) = sample(np.zeros((1, 1000), np.float32), [seq])
            seq.sampler.observe(token)
            out.append(token)
        return out

    assert text(5) == text(5) and text(5) != text(6) and text(None) != text(None)
    assert len(set(text(5))) > 6


def test_bans_and_bias_decide_greedily() -> None:
    row = array([[3.0, 2.0, 1.0, 0.0]])
    ((token, _),) = sample(row.copy(), [sequence(row_request(Sampling(temperature=0, banned=(0,), logit_bias={3: 9.0})))])
    assert token == 3
    ban(row[0], (0, 1))
    assert greedy(row) == [2]


class TestThinking:
    CLOSE = (90, 91)

    def run(self, thinking: Thinking, wants: list[int]) -> list[int]:
        """What is sampled when the model would say `wants`, token by token."""
        seq = sequence(row_request(Sampling(temperature=0), thinking=thinking))
        out = []
        for want in wants:
            row = np.zeros((1, 100), np.float32)
            row[0, want] = 5.0
            ((token, _),) = sample(row, [seq])
            seq.sampler.observe(token)
            out.append(token)
        return out

    def test_the_close_is_forced_when_the_budget_is_spent(self) -> None:
        thinking = Thinking(close=self.CLOSE, open_at_start=True, budget=3)
        assert self.run(thinking, [1] * 8) == [1, 1, 1, 90, 91, 1, 1, 1]

    def test_a_thought_that_ends_in_time_is_left_alone(self) -> None:
        thinking = Thinking(close=self.CLOSE, open_at_start=True, budget=4)
        assert self.run(thinking, [1, 90, 91, 2, 2, 2, 2]) == [1, 90, 91, 2, 2, 2, 2]

    def test_a_budget_of_nothing_closes_at_once(self) -> None:
        assert self.run(Thinking(close=self.CLOSE, open_at_start=True, budget=0), [1] * 4) == [90, 91, 1, 1]

    def test_every_thought_the_model_opens_is_bounded(self) -> None:
        thinking = Thinking(close=self.CLOSE, open=80, budget=1)
        assert self.run(thinking, [1, 80, 1, 1, 1, 80, 1, 1, 1]) == [1, 80, 1, 90, 91, 80, 1, 90, 91]

    def test_without_a_budget_nothing_is_forced(self) -> None:
        assert self.run(Thinking(close=self.CLOSE, open_at_start=True), [1] * 6) == [1] * 6
