"""What one request may ask of this engine, and the error it gets when it asks more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.ipc import Generate, RequestError


@dataclass(frozen=True)
class Limits:
    max_context: int  # tokens one sequence may hold
    vocab: int
    max_running: int
    max_queue: int
    prefill_chunk: int


def refuse(request: Generate, limits: Limits, waiting: int) -> RequestError | None:
    """The error for a request that cannot be queued behind `waiting` others, naming the limit; None when it can."""
    tokens, outside = request.tokens, _outside(request, limits.vocab)
    if not tokens:
        return _error(request, 400, "empty_prompt", "the prompt is empty: send at least one token")
    if len(tokens) >= limits.max_context:
        text = f"the prompt has {len(tokens)} tokens; the context holds {limits.max_context} including the answer: shorten it"
        return _error(request, 400, "context_length_exceeded", text)
    if outside is not None:
        return _error(request, 400, "bad_token", f"token id {outside} is outside the vocabulary of {limits.vocab}")
    if waiting >= limits.max_queue:
        text = f"{waiting} requests are waiting, the limit is {limits.max_queue}: retry later"
        return _error(request, 429, "queue_full", text)
    return None


def _outside(request: Generate, vocab: int) -> int | None:
    """The first token id named anywhere in the request that the model does not have."""
    ids = np.frombuffer(request.tokens, np.int32) if request.tokens else np.zeros(1, np.int32)
    if ids.min() < 0 or ids.max() >= vocab:
        return next(t for t in request.tokens if not 0 <= t < vocab)
    p, thinking = request.sampling, request.thinking
    named = [*p.logit_bias, *p.banned, *request.stop_ids, *(thinking.close if thinking else ())]
    return next((t for t in named if not 0 <= t < vocab), None)


def _error(request: Generate, status: int, code: str, message: str) -> RequestError:
    return RequestError(id=request.id, status=status, code=code, message=message)
