"""Runs one step: the scheduler's chunks become a `Batch`, the logits become sampled tokens and log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from engine.ipc import RequestError, TokenLogprob
from engine.kernels.ops import Segments
from engine.nn.batch import PAGE, Batch
from engine.sampling import NoToken, Row, apply_bias, ban, draw, greedy, logprobs, no_token, penalize, uniform
from engine.sequence import Sequence
from engine.step import Chunk, Outcome, Step

try:
    from engine import _native

    SAMPLING = hasattr(_native, "sample_row")  # of a module built from other sources the kernels say what to do
except ImportError:
    SAMPLING = False  # numpy does it

Forward = Callable[[Batch], torch.Tensor]  # logits float32 [R, V] of the batch's `logit_rows`


class Runner:
    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def run(self, step: Step) -> list[Outcome]:
        """One `Outcome` per chunk. Raises whatever the forward pass raises; a failure to sample stays with its sequence."""
        with torch.inference_mode():
            logits = self._forward(make_batch(step))
        return read_logits(step, logits.cpu().numpy())


def make_batch(step: Step) -> Batch:
    """Flatten the chunks; logit rows are each chunk's echo rows, then its last row when it samples.

    All numbers but the page table travel in one array: a decode step has a handful, and each array of its own costs microseconds.
    """
    tokens: list[int] = []
    positions: list[int] = []
    borders = [0]
    rows: list[int] = []
    for chunk in step:
        base = borders[-1] - chunk.start
        tokens += chunk.seq.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        rows += [base + r for r in chunk.echo]
        if chunk.sample:
            rows.append(base + chunk.end - 1)
        borders.append(base + chunk.end)
    starts, slots = [c.start for c in step], [c.seq.lease.slot for c in step]
    kept = _kept(step)
    parts = (tokens, positions, borders, starts, slots, rows, kept)
    flat = torch.from_numpy(np.array([number for part in parts for number in part], np.int32))
    tokens_, positions_, cu, start, slot, rows_, kept_ = flat.split_with_sizes([len(part) for part in parts])
    segments = Segments(cu, start, page_table(step), slot, kept_.view(-1, 2) if kept else None)
    return Batch(tokens_, positions_, segments, rows_)


def _kept(step: Step) -> list[int]:
    """Rows and slot of every chunk, as `Segments.kept` has them; nothing when no chunk keeps a state on its way."""
    if all(c.kept is None for c in step):
        return []
    return [number for c in step for number in ((c.kept.offset - c.start, c.kept.slot) if c.kept else (0, -1))]


def page_table(step: Step) -> torch.Tensor:
    """Pages in use by each chunk's sequence, int32 [S, P], -1 behind them."""
    used = [-(-c.end // PAGE) for c in step]
    table = np.full((len(step), max(used)), -1, np.int32)
    for row, count, chunk in zip(table, used, step, strict=True):
        row[:count] = chunk.seq.lease.pages[:count]
    return torch.from_numpy(table)


def read_logits(step: Step, logits: NDArray[np.float32]) -> list[Outcome]:
    """Split `logits` [R, V] over the chunks in the order `make_batch` asked for them, and sample."""
    echoes: list[list[TokenLogprob]] = []
    last: list[int] = []  # logits row of each sampling chunk
    at = 0
    for chunk in step:
        echo = chunk.echo
        tokens = [chunk.seq.tokens[r + 1] for r in echo]
        top = chunk.seq.request.prompt_logprobs or 0
        echoes.append([_logprob(row, token, top) for row, token in zip(logits[at:], tokens, strict=False)])
        at += len(echo) + chunk.sample
        if chunk.sample:
            last.append(at - 1)
    samplers = [c.seq for c in step if c.sample]
    sampled = iter(sample(logits if len(last) == len(logits) else logits[last], samplers))
    return [_outcome(chunk, echo, next(sampled) if chunk.sample else None) for chunk, echo in zip(step, echoes, strict=True)]


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
        return no_token(-math.inf if token == _native.ALL_BANNED else math.nan)
    return token, None if raw is None else _logprob(raw, token, request.logprobs)


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
