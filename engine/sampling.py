"""Choosing the next token from one row of logits. Pure functions; what a sequence must remember is in `engine.sequence`.

The order is: repetition, presence and frequency penalties, bias, bans, then temperature, top-k, top-p, min-p, and one draw.
A row's token depends on its own logits, parameters, seed and position only, never on the batch it was computed in. Ties go to
the lower token id everywhere.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.ipc import Sampling, TokenLogprob

Row = NDArray[np.float32]  # [V]
Ids = NDArray[np.int64]

NUCLEUS_FIRST = 1024  # tokens tried before a full sort for top-p: a language model's nucleus is nearly always smaller


class NoToken(Exception):
    """Nothing can be sampled: every token is banned, or the logits are not numbers. The message is for the user."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def uniform(seed: int, index: int) -> float:
    """The `index`-th random number in [0, 1) of `seed`: counter-based, so recomputing a sequence redraws the same numbers."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def penalize(row: Row, p: Sampling, prompt_ids: Ids | None, counts: Mapping[int, int]) -> None:
    """Apply the three penalties to `row` in place.

    Repetition (Keskar et al. 2019, arXiv 1909.05858) covers prompt and sampled tokens; presence and frequency cover
    sampled tokens only. `prompt_ids` are distinct; `counts` is sampled token -> times.
    """
    sampled = np.fromiter(counts, np.int64, len(counts))
    if p.repetition_penalty != 1.0:
        ids = sampled if prompt_ids is None else np.union1d(sampled, prompt_ids)
        values = row[ids]
        row[ids] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        times = np.fromiter(counts.values(), np.float32, len(counts))
        row[sampled] -= p.presence_penalty + p.frequency_penalty * times


def apply_bias(row: Row, bias: Mapping[int, float]) -> None:
    """Add `bias` (token id -> additive) to `row` in place."""
    if bias:
        row[list(bias)] += np.fromiter(bias.values(), np.float32, len(bias))


def ban(row: Row, ids: Sequence[int]) -> None:
    """Make `ids` impossible in `row`, in place."""
    if ids:
        row[list(ids)] = -math.inf


def greedy(rows: NDArray[np.float32]) -> list[int | NoToken]:
    """The highest logit of each row of [R, V], or why there is none."""
    out: list[int | NoToken] = rows.argmax(axis=-1).tolist()  # the first not-a-number wins, so none goes unseen
    for i, token in enumerate(out):
        if not math.isfinite(rows[i, token]):
            out[i] = no_token(rows[i, token])
    return out


def no_token(best: float) -> NoToken:
    if best == -math.inf:
        return NoToken(400, "all_banned", "every token is banned: loosen logit_bias, banned tokens or min_tokens")
    text = "the model produced logits that are not numbers: the checkpoint is damaged or its type is not supported"
    return NoToken(500, "bad_logits", text)


def top_ids(x: NDArray[np.floating], k: int) -> Ids:
    """Ids of the k largest of `x` [V] in ascending id order; ties at the border go to the lower id."""
    border = np.partition(x, len(x) - k)[len(x) - k]
    ids = np.flatnonzero(x >= border)
    if len(ids) > k:
        ties = x[ids] == border
        keep_ties = k - int((~ties).sum())
        ids = ids[~ties | (ties.cumsum() <= keep_ties)]
    return ids


def nucleus(x: NDArray[np.float64], top_p: float) -> Ids:
    """Positions of the smallest set of the most likely entries of softmax(`x`) whose mass reaches `top_p` (never empty)."""
    total = np.exp(x).sum() * top_p
    for k in (min(NUCLEUS_FIRST, len(x)), len(x)):
        ids = top_ids(x, k) if k < len(x) else np.arange(len(x))
        ids = ids[np.argsort(-x[ids], kind="stable")]
        mass = np.exp(x[ids]).cumsum()
        if mass[-1] >= total:
            break
    inside = int(np.searchsorted(mass, total)) + 1  # first position where the mass reaches the total
    return ids[:inside]


def support(row: Row, p: Sampling) -> tuple[Ids | None, NDArray[np.float64]]:
    """The tokens that may be drawn and their unnormalised log probabilities (maximum 0).

    Ids are ascending; None stands for the whole vocabulary. Raises NoToken.
    """
    best = float(row.max())
    if not math.isfinite(best):
        raise no_token(best)
    ids = None
    if 0 < p.top_k < len(row):
        ids = top_ids(row, p.top_k)
        row = row[ids]
    x = (row.astype(np.float64) - best) / p.temperature
    if p.top_p < 1.0:
        keep = np.sort(nucleus(x, p.top_p))
        ids, x = keep if ids is None else ids[keep], x[keep]
    if p.min_p > 0.0:
        keep = np.flatnonzero(x >= math.log(p.min_p))
        ids, x = keep if ids is None else ids[keep], x[keep]
    return ids, x


def draw(row: Row, p: Sampling, u: float) -> int:
    """One token from `row` at temperature > 0 with the random number `u` in [0, 1). Raises NoToken."""
    ids, x = support(row, p)
    mass = np.exp(x).cumsum()
    last = np.searchsorted(mass, mass[-1])  # rounding may carry u to the very end; never past what has mass
    at = min(np.searchsorted(mass, u * mass[-1], side="right"), last)
    return int(at if ids is None else ids[at])


def logprobs(rows: NDArray[np.float32], chosen: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log probabilities under the unmodified `rows` [R, V]: of `chosen` [R], and of each row's `top` best tokens."""
    out = []
    for row, token in zip(rows, chosen, strict=True):
        best = row.max()
        norm = float(best) + math.log(np.exp(row - best).sum(dtype=np.float64))
        ids = top_ids(row, min(top, len(row))) if top else np.empty(0, np.int64)
        ids = ids[np.argsort(-row[ids], kind="stable")]
        out.append(TokenLogprob(token, float(row[token]) - norm, [(int(i), float(row[i]) - norm) for i in ids]))
    return out
