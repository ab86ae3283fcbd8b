"""One request on its way through the engine: its tokens, what is computed of them, and what sampling must remember.

Mutable, owned by the scheduler; the runner updates `sampler` only.
"""

from __future__ import annotations

import logging
import re
import secrets
from array import array
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.grammar import GrammarState
from engine.ipc import BACKGROUND, Generate, Thinking, TokenLogprob
from engine.prefix.base import Lease
from engine.protocol import MoorageUsage, log_line

log = logging.getLogger(__name__)

ANSWER_ROOM = 1024  # tokens: a long tool call; a stored spelling is a few tokens longer than the prompt's own

_TOKEN = re.compile(r"token\[(\d+)\]")


class ThoughtLimit:
    """Follows a sequence in and out of thoughts and says which tokens must come next when the budget is spent.

    A thought ends when the sampled tokens end with `close`, be it sampled or forced.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._rule = thinking
        self._forced: deque[int] = deque()
        self._tail: deque[int] = deque(maxlen=max(1, len(thinking.close)))
        self._spent = 0
        self.inside = False
        if thinking.open_at_start:
            self._enter()

    def forced(self) -> int | None:
        """The token that must be next, or None for a free choice."""
        return self._forced[0] if self._forced else None

    def observe(self, token: int) -> None:
        if self._forced:
            self._forced.popleft()
        if not self.inside:
            if token == self._rule.open:
                self._enter()
            return
        self._spent += 1
        self._tail.append(token)
        if self._rule.close and tuple(self._tail) == self._rule.close:
            self.inside = False
            self._forced.clear()
        elif not self._forced:
            self._check_budget()

    def _enter(self) -> None:
        self.inside, self._spent = True, 0
        self._tail.clear()
        self._check_budget()

    def _check_budget(self) -> None:
        if self._rule.budget is not None and self._spent >= self._rule.budget:
            self._forced.extend(self._rule.close)


class Sampler:
    """Per-sequence sampling memory: the seed, counts of sampled tokens, the place in a thought and in a grammar."""

    def __init__(self, request: Generate, grammar: GrammarState | None = None) -> None:
        p = request.sampling
        self.seed = secrets.randbits(63) if p.seed is None else p.seed
        self.sampled = 0
        self.counts: dict[int, int] = {}
        self.thought = ThoughtLimit(request.thinking) if request.thinking else None
        self.grammar = grammar
        self.prompt_ids: NDArray[np.int64] | None = None  # distinct prompt tokens; only the repetition penalty needs them
        if p.repetition_penalty != 1.0:
            self.prompt_ids = np.unique(np.array(request.tokens, np.int64))
        self._stop_ids = request.stop_ids
        self.banned = p.banned
        self.banned_early = tuple({*p.banned, *request.stop_ids})  # while fewer than min_new tokens are sampled
        self.counting = p.repetition_penalty != 1.0 or bool(p.presence_penalty or p.frequency_penalty)
        edited = self.counting or p.logit_bias or self.banned or request.min_new or self.thought or grammar
        self.plain = not edited and request.logprobs is None  # nothing but the logits and one draw decides

    def observe(self, token: int) -> None:
        self.sampled += 1
        if self.counting:
            self.counts[token] = self.counts.get(token, 0) + 1
        if self.thought:
            self.thought.observe(token)
        if self.grammar and token not in self._stop_ids:
            self.grammar.observe(token)


def common_prefix(a: array, b: array) -> int:
    """Length of the longest common prefix. Bisects on slices, which compare at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt plus sampled tokens; `tokens[:computed]` have KV in the lease's pages and are in its state.

    The last sampled token has no KV yet: it is the row of the next decode step. A preempted sequence is the same sequence
    with `computed` 0 and no lease; it is prefilled again over everything it has.
    """

    request: Generate
    prompt: int  # of `tokens`, how many are prompt; the prefix cache may spell the request's text with other tokens
    limit: int  # most tokens to sample
    arrived: float  # seconds, monotonic clock
    arrived_at: float  # virtual time of engine.fairness
    sampler: Sampler
    tokens: array  # of ipc.token_array
    tag: float = 0.0  # fair-queueing order among admitted prefills, smaller is earlier
    computed: int = 0
    lease: Lease | None = None
    number: int = 0  # order of first admission, 0 before it; the youngest is preempted first
    admitted: float = 0.0
    answering: float = 0.0  # when `Started` was sent, 0 before
    usage: MoorageUsage | None = None
    echo: list[TokenLogprob] = field(default_factory=list)
    retry_after: int = -1  # the scheduler's `released` count when pages were found missing: trying before it moves is useless
    passed: int = 0  # times another was admitted while this one waited for pages
    shared_stops: set[int] = field(default_factory=set)  # checkpoints for sequences that wait to share this prompt
    _shared: dict[int, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def pending(self) -> int:
        """Tokens without KV: 1 while decoding, more in prefill."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.lease is not None and self.sampled > 0 and self.pending == 1

    @property
    def background(self) -> bool:
        return self.request.priority <= BACKGROUND

    @property
    def reuse(self) -> bool:
        """May tokens computed for others be used? Not when the logits of the prompt itself are wanted."""
        return self.request.cache and self.request.prompt_logprobs is None

    def most(self, max_context: int) -> int:
        """Tokens another spelling of `tokens` may have: the answer keeps the length asked for, or, where only the context ends
        it, enough of it."""
        left = self.limit - self.sampled
        return max_context - (left if len(self.tokens) + left < max_context else min(left, ANSWER_ROOM))

    def adopt(self, lease: Lease, max_context: int) -> None:
        """Take a lease, its spelling of the tokens and what it found computed."""
        self.lease, self.computed = lease, lease.match.common
        grown = len(lease.tokens) - len(self.tokens)
        if grown or lease.tokens != self.tokens:
            self.tokens = lease.tokens[:]
            self.prompt += grown
            self.limit = min(self.limit, max(0, max_context - self.prompt))

    def echo_rows(self, start: int, end: int) -> range:
        """Rows in tokens[start:end] whose logits give prompt log probabilities not yet known (row i predicts token i + 1)."""
        if self.request.prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self.echo)), min(end, self.prompt - 1))

    def shared_with(self, other: Sequence) -> int:
        """Tokens of this prompt that `other`, which is in prefill, computes as well; at most all but the last one."""
        if other.number not in self._shared:
            self._shared[other.number] = min(common_prefix(self.tokens, other.tokens), len(self.tokens) - 1)
        return self._shared[other.number]

    def note_lookup(self, now: float) -> None:
        """First admission: fix the usage and log what the prefix cache found."""
        self.admitted = now
        m = self.lease.match
        self.usage = MoorageUsage(
            prompt=self.prompt,
            common=m.common,
            new=self.prompt - m.common,
            source=m.source,
            reason=m.reason,
            anchor=m.anchor,
            lost=m.lost,
            queue_ms=(now - self.arrived) * 1e3,
            restore_ms=m.restore_ms,
        )
        hit = m.common > 0 and m.common >= m.lost  # reusing less than was thrown away is a miss
        event = "kv cache hit" if hit else "kv cache miss"
        short = not hit or m.lost > 0  # only then is there something to explain
        log.info(
            log_line(
                "background prefill" if self.background else event,  # nobody waits for it: neither hit nor miss
                prompt=self.prompt,
                common=m.common,
                new=self.prompt - m.common,
                lost=m.lost,
                source=m.source if hit else None,
                reason=(m.reason or None) if short else None,
                at=(self._place(m.at) or None) if short else None,
                anchor=m.anchor or None,
                session=self.request.session or None,
                req=self.id,
            )
        )

    def _place(self, at: str) -> str:
        """`token[n]` as `message[i]+k`, k tokens behind the beginning of message i, where the request says where that is."""
        found = _TOKEN.fullmatch(at)
        before = [(start, i) for i, start in enumerate(self.request.starts) if found and 0 <= start <= int(found[1])]
        if not before:
            return at
        start, i = max(before)
        return f"message[{i}]+{int(found[1]) - start}"

    def farewell(self, reason: str, now: float) -> str:
        """The log line of a request that ended."""
        seconds = now - self.answering if self.answering else 0.0
        rate = (self.sampled - 1) / seconds if self.sampled > 1 and seconds > 0 else None  # the first token is prefill's
        return log_line("request done", req=self.id, reason=reason, prompt=self.prompt, sampled=self.sampled, decode_tok_s=rate)

    def describe(self, now: float) -> dict[str, object]:
        """What a user sees of a live request."""
        phase = "queued" if self.lease is None else "decode" if self.decoding else "prefill"
        return {
            "id": self.id,
            "session": self.request.session,
            "priority": self.request.priority,
            "phase": phase,
            "prompt": self.prompt,
            "computed": self.computed,
            "sampled": self.sampled,
            "age_s": round(now - self.arrived, 3),
        }
