"""Runs one step: the scheduler's chunks become a `Flat` batch, the logits become sampled tokens and log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.ipc import RequestError, TokenLogprob
from engine.lean import torch
from engine.nn.batch import Flat
from engine.sampling import NoToken, Row, apply_bias, ban, draw, greedy, logprobs, no_token, penalize, uniform
from engine.sequence import Sequence
from engine.step import Chunk, Outcome, Step
from engine.tensors import Library

try:
    from engine import _native

    SAMPLING = hasattr(_native, "sample_row")  # of a module built from other sources the kernels say what to do
except ImportError:
    SAMPLING = False  # numpy does it

# logits float32 [R, V] of the rows that want them; an array holds them until the next step only
Forward = Callable[[Flat], Any]


class Runner:
    def __init__(self, forward: Forward, library: Library = torch) -> None:
        self._forward, self._library = forward, library

    def run(self, step: Step) -> list[Outcome]:
        """One `Outcome` per chunk. Raises whatever the forward pass raises; a failure to sample stays with its sequence."""
        logits = self._forward(make_batch(step, self._library))
        return read_logits(step, logits if isinstance(logits, np.ndarray) else logits.cpu().numpy())


def make_batch(step: Step, library: Library = torch) -> Flat:
    """Wanted are the logits of each chunk's echo rows, then of its last row when it samples; its tensors are of `library`."""
    pieces = []
    for chunk in step:
        seq, end, kept = chunk.seq, chunk.end, chunk.kept
        wanted = (*chunk.echo, end - 1) if chunk.sample else tuple(chunk.echo)
        pieces.append((seq.tokens, chunk.start, end, seq.lease.slot, seq.lease.pages, wanted, kept and (kept.offset, kept.slot)))
    return Flat(pieces, library)


def read_logits(step: Step, logits: NDArray[np.float32]) -> list[Outcome]:
    """Split `logits` [R, V] over the chunks in the order `make_batch` asked for them, and sample."""
    if SAMPLING and len(step) == len(logits) and all(c.sample and c.seq.sampler.plain for c in step):
        return [_sample_plain(chunk, row) for chunk, row in zip(step, logits, strict=True)]
    echoes: list[list[TokenLogprob]] = []
    last: list[int] = []  # logits row of each sampling chunk
    at = 0
    for chunk in step:
        echo = chunk.echo
        echoes.append(_echoed(chunk, logits[at : at + len(echo)]) if echo else [])
        at += len(echo) + chunk.sample
        if chunk.sample:
            last.append(at - 1)
    samplers = [c.seq for c in step if c.sample]
    sampled = iter(sample(logits if len(last) == len(logits) else logits[last], samplers))
    return [_outcome(chunk, echo, next(sampled) if chunk.sample else None) for chunk, echo in zip(step, echoes, strict=True)]


def _echoed(chunk: Chunk, logits: NDArray[np.float32]) -> list[TokenLogprob]:
    tokens, top = chunk.seq.tokens, chunk.seq.request.prompt_logprobs or 0
    return [_logprob(row, tokens[r + 1], top) for row, r in zip(logits, chunk.echo, strict=True)]


def _sample_plain(chunk: Chunk, row: Row) -> Outcome:
    """What most steps need, in few steps of its own: their code is cold behind a forward pass."""
    sampler, p = chunk.seq.sampler, chunk.seq.request.sampling
    u = uniform(sampler.seed, sampler.sampled) if p.temperature > 0 else 0.0
    token = _native.sample_row(row, None, p.temperature, p.top_k, p.top_p, p.min_p, u, -1)
    return Outcome(token) if token >= 0 else _outcome(chunk, [], _none(token))


def _outcome(chunk: Chunk, echo: list[TokenLogprob], drawn: tuple[int, TokenLogprob | None] | NoToken | None) -> Outcome:
    if drawn is None:
        return Outcome(echo=echo)
    if isinstance(drawn, NoToken):
        error = RequestError(id=chunk.seq.id, status=drawn.status, code=drawn.code, message=str(drawn))
        return Outcome(echo=echo, error=error)
    token, logprob = drawn
    return Outcome(token, logprob, echo)


Drawn = tuple[int, TokenLogprob | None] | NoToken


def sample(logits: NDArray[np.float32], sequences: list[Sequence]) -> list[Drawn]:
    """The next token of each sequence from its row of `logits` [R, V], which is overwritten."""
    return (
        [sample_row(row, s) for row, s in zip(logits, sequences, strict=True)] if SAMPLING else sample_plainly(logits, sequences)
    )


def sample_row(row: Row, seq: Sequence) -> Drawn:
    """As `sample_plainly`, by the native module."""
    p, sampler, request = seq.request.sampling, seq.sampler, seq.request
    raw = row.copy() if request.logprobs is not None else None
    try:
        edits = _edits(seq)
    except NoToken as problem:
        return problem
    forced = sampler.thought.forced() if sampler.thought else None
    u = uniform(sampler.seed, sampler.sampled) if p.temperature > 0 else 0.0
    token = _native.sample_row(row, edits, p.temperature, p.top_k, p.top_p, p.min_p, u, -1 if forced is None else forced)
    if token < 0:
        return _none(token)
    return token, None if raw is None else _logprob(raw, token, request.logprobs)


def _none(token: int) -> NoToken:
    """Why the native module found none."""
    return no_token(-math.inf if token == _native.ALL_BANNED else math.nan)


def _logprob(row: Row, token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, *_native.log_probabilities(row, token, top)) if SAMPLING else logprobs(row[None], [token], top)[0]


def _edits(seq: Sequence) -> tuple | None:
    """What `edit` does, for the native module; None when that is nothing. Raises NoToken."""
    p, sampler, request = seq.request.sampling, seq.sampler, seq.request
    banned = sampler.banned_early if sampler.sampled < request.min_new else sampler.banned
    mask = sampler.grammar.mask() if sampler.grammar else None
    if not (sampler.counting or p.logit_bias or banned or mask):
        return None
    may_stop = mask is not None and sampler.grammar.may_end
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    return (*penalties, sampler.prompt_ids, sampler.counts, p.logit_bias, banned, mask, request.stop_ids, may_stop)


def sample_plainly(logits: NDArray[np.float32], sequences: list[Sequence]) -> list[Drawn]:
    """As `sample`, in numpy: what the native sampling is compared with."""
    raw = {i: logits[i].copy() for i, s in enumerate(sequences) if s.request.logprobs is not None}
    broken = {}
    for i, seq in enumerate(sequences):
        try:
            edit(logits[i], seq)
        except NoToken as problem:
            broken[i] = problem
    tokens: list[int | NoToken] = greedy(logits)
    for i, seq in enumerate(sequences):
        tokens[i] = broken.get(i, tokens[i])
        forced = seq.sampler.thought.forced() if seq.sampler.thought else None
        if isinstance(tokens[i], NoToken):
            continue
        if forced is not None:
            tokens[i] = forced
        elif seq.request.sampling.temperature > 0:
            tokens[i] = draw(logits[i], seq.request.sampling, uniform(seq.sampler.seed, seq.sampler.sampled))
    return [
        t if isinstance(t, NoToken) else (t, logprobs(raw[i][None], [t], seq.request.logprobs or 0)[0] if i in raw else None)
        for i, (t, seq) in enumerate(zip(tokens, sequences, strict=True))
    ]


def edit(row: Row, seq: Sequence) -> None:
    """Penalties, bias, bans and grammar of one sequence on its row [V], in place. Raises NoToken when the grammar broke."""
    p, sampler = seq.request.sampling, seq.sampler
    if sampler.counting:
        penalize(row, p, sampler.prompt_ids, sampler.counts)
    apply_bias(row, p.logit_bias)
    ban(row, sampler.banned_early if sampler.sampled < seq.request.min_new else sampler.banned)
    if sampler.grammar:
        sampler.grammar.restrict(row, seq.request.stop_ids)
