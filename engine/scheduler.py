"""What runs in the next step: admission, chunked prefill, decode, preemption, endings. Decides; computes nothing.

Owns every request from `submit` until its one `Done` or `RequestError`. The worker calls `plan`, has the step computed, and
hands the outcome to `commit` or `fail`; messages for the API collect in `outbox`. Policy:

- Decode rows of all running sequences ride in every step; prompt tokens fill a budget beside them, in fair order.
- A prompt gets its pages when it is admitted, a decoding sequence page by page. When pages run out the youngest sequence of
  the lowest priority gives its pages back and is computed again later; the oldest always advances, so everything ends.
- Tokens reach the prefix cache only after the forward pass that computed them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import msgspec

from engine.fairness import DECODE_COST, FairClock
from engine.grammar import GrammarError, Grammars, GrammarState
from engine.ipc import BACKGROUND, Done, FromWorker, Generate, RequestError, Started, Tokens
from engine.limits import Limits, refuse
from engine.nn.batch import PAGE
from engine.pace import Pace
from engine.prefix.base import Lease, OutOfPages, PrefixCache
from engine.protocol import MoorageUsage, log_line
from engine.sequence import Sampler, Sequence
from engine.step import Chunk, Kept, Outcome, Step

log = logging.getLogger(__name__)

ECHO_ROWS = 64  # prompt rows a step gives logits for: at a vocabulary of 150K that is 40 MB
BYPASSES = 8  # smaller requests that may pass one that waits for pages, before the running ones must drain for it
BACKGROUND_ROWS = 64  # prompt tokens of background work beside running streams: a step then stays near a decode step
SHARED_WORTH = 4 * PAGE  # tokens in common with a prompt being computed that are worth waiting for


class Scheduler:
    def __init__(self, prefix: PrefixCache, limits: Limits, clock: Callable[[], float], grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._prefix = prefix
        self.limits = limits
        self._clock = clock
        self._fair = FairClock()
        self._pace = Pace(limits.prefill_chunk)
        self._planned = 0.0  # when the step being computed was planned
        self._admissions = 0
        self._crowd = 1  # live requests without a session
        self._hold = False  # after a preemption: admit nobody until a sequence ends
        self.released = 0  # times pages came back
        self.queue: list[Sequence] = []
        self.running: list[Sequence] = []  # in order of admission
        self.outbox: list[FromWorker] = []
        self.counters: Counter[str] = Counter()

    # --- requests in

    def submit(self, request: Generate) -> None:
        """Queue a request, or refuse it with one RequestError."""
        if any(s.id == request.id for s in self._all()):
            log.error(log_line("request ignored: its id is in use", req=request.id))
            return
        # background work is counted apart: it must not use up the places of real requests
        background = request.priority <= BACKGROUND
        refusal = refuse(request, self.limits, sum(s.background == background for s in self.queue))
        if refusal:
            self._refuse(refusal)
            return
        room = self.limits.max_context - len(request.tokens)
        if request.max_new > room:
            log.info(log_line("max_new clipped to the context", req=request.id, asked=request.max_new, given=room))
        try:
            sampler = Sampler(request, self._grammar(request))
        except GrammarError as problem:
            self._refuse(RequestError(id=request.id, status=400, code="bad_grammar", message=str(problem)))
            return
        self.counters["requests"] += 1
        self.queue.append(
            Sequence(
                request=request,
                prompt=len(request.tokens),
                limit=min(request.max_new, room),
                arrived=self._clock(),
                arrived_at=self._fair.now,
                sampler=sampler,
                tokens=request.tokens[:],
            )
        )

    def _refuse(self, refusal: RequestError) -> None:
        self.counters["refused"] += 1
        log.warning(log_line("request refused", req=refusal.id, status=refusal.status, why=refusal.message))
        self.outbox.append(refusal)

    def _grammar(self, request: Generate) -> GrammarState | None:
        if request.grammar is None:
            return None
        if self._grammars is None:
            raise GrammarError("this engine has no tokenizer to follow a grammar with: leave it out")
        return self._grammars.start(request.grammar)

    def cancel(self, request_id: str, reason: str) -> None:
        """End a request now; takes effect before the next step. Unknown ids are requests that just ended."""
        for seq in self._all():
            if seq.id == request_id:
                log.info(log_line("request cancelled", req=request_id, why=reason, sampled=seq.sampled))
                self._finish(seq, "cancelled")
                return

    # --- the next step

    def plan(self) -> Step | None:
        """The chunks of the next step, pages in place, or None when nothing can run."""
        if self.queue or not self.running:
            self._admit()
        answering = [seq for seq in self.running if seq.decoding]
        filling = len(answering) < len(self.running)
        chunks = []
        for seq in answering:
            if seq.lease is not None and self._make_room(seq):
                chunks.append(Chunk(seq, seq.computed, len(seq.tokens), True))
        if filling:
            chunks += self._prefill_chunks()
        self._planned = self._clock()
        return tuple(c for c in chunks if c.seq.lease is not None) or None

    def _prefill_chunks(self) -> Iterator[Chunk]:
        streams = any(s.decoding for s in self.running)
        budget = self._pace.budget(streams)
        waiting = sorted((s for s in self.running if not s.decoding), key=lambda s: (s.background, s.tag))
        for seq in waiting:
            if seq.background:
                if seq is not waiting[0]:
                    return
                budget = min(budget, BACKGROUND_ROWS) if streams else budget
            if budget <= 0:
                return
            end, kept = self._chunk_end(seq, budget)
            budget -= end - seq.computed
            yield Chunk(seq, seq.computed, end, end == len(seq.tokens) and seq.sampled < seq.limit, kept)

    def _chunk_end(self, seq: Sequence, budget: int) -> tuple[int, Kept | None]:
        """Where the chunk ends, and where the state on its way is left: a pause there would be a step for a few tokens more."""
        end = min(seq.computed + budget, len(seq.tokens))
        rows = seq.echo_rows(seq.computed, end)
        if len(rows) > ECHO_ROWS:
            end = rows[ECHO_ROWS - 1] + 1
        end = min([end, *(stop for stop in seq.shared_stops if stop > seq.computed)])
        stop = seq.lease.next_stop(seq.computed, end)
        spare = seq.lease.spare_slot() if stop < end else None
        return (stop, None) if spare is None else (seq.lease.next_stop(stop, end), Kept(stop, spare))

    def _make_room(self, seq: Sequence) -> bool:
        """Pages for the next token of a decoding sequence; False when it gave up its own place for older ones."""
        while True:
            try:
                seq.lease.grow(len(seq.tokens))
                return True
            except OutOfPages:
                victim = self._youngest()
                self._preempt(victim, logging.WARNING, "KV pages ran out; if frequent: raise --kv-memory or lower --max-running")
                self._hold = True
                if victim is seq:
                    return False

    def _youngest(self) -> Sequence:
        return min(self.running, key=lambda s: (s.request.priority, -s.number))

    def _preempt(self, seq: Sequence, level: int, why: str) -> None:
        """Take back what `seq` holds; it is queued and computed again later."""
        self.counters["displaced" if seq.background else "preempted"] += 1
        log.log(level, log_line("preempted", req=seq.id, tokens=seq.computed, running=len(self.running), why=why))
        self._release(seq, "preempted")
        self.queue.insert(0, seq)

    # --- when memory moves

    @property
    def longest(self) -> int:
        """Tokens the longest live request may come to; 0 without any."""
        return max((s.prompt + s.limit for s in self._all()), default=0)

    def give_way(self, why: str) -> bool:
        """The youngest running request of the lowest priority waits again; False when none runs."""
        if not self.running:
            return False
        self._preempt(self._youngest(), logging.INFO, why)
        return True

    def resized(self, **changes: int) -> None:
        """Other limits from the next request on; who waits for pages looks again."""
        self.limits = dataclasses.replace(self.limits, **changes)
        self.released += 1

    # --- admission

    def _admit(self) -> None:
        if not self.running:
            self._hold = False
        while self.queue and not self._hold:
            self._displace_background()
            if len(self.running) >= self.limits.max_running:
                return
            seq = self._next_waiting()
            if seq is None:
                return
            self._start(seq)

    def _displace_background(self) -> None:
        """A real request takes the place of background work when places or pages are short."""
        real = [s for s in self.queue if not s.background]
        if not real:
            return
        for seq in [s for s in self.running if s.background]:
            if len(self.running) >= self.limits.max_running or any(map(self._waits_for_pages, real)):
                self._preempt(seq, logging.INFO, "a real request takes its place")

    def _next_waiting(self) -> Sequence | None:
        """The queued sequence to try, in fair order. One that waits for pages is passed by others a bounded number of times."""
        real_ones_wait = any(not s.background for s in self.queue)
        self._crowd = sum(not s.request.session for s in self._all())
        for seq in sorted(self.queue, key=self._order):
            if seq.background and real_ones_wait:  # it would take the pages they wait for
                continue
            if self._waits_for_pages(seq):
                if seq.passed >= BYPASSES:
                    return None
            elif not self._waits_for_shared_prompt(seq):
                return seq
        return None

    def _waits_for_pages(self, seq: Sequence) -> bool:
        return seq.retry_after == self.released and bool(self.running)

    def _order(self, seq: Sequence) -> tuple[float, float]:
        if seq.number and not seq.background:  # preempted: back first, in its old order
            return -1.0, seq.number
        r = seq.request
        return self._fair.key(r.session, seq.arrived_at, r.priority, self._crowd), seq.arrived

    def _waits_for_shared_prompt(self, seq: Sequence) -> bool:
        """True while another sequence computes a prompt this one starts with: it can be read from the cache a moment later."""
        if not seq.reuse:
            return False
        for other in self.running:
            if other.decoding or not other.request.cache or other.request.priority < seq.request.priority:
                continue
            shared = seq.shared_with(other)
            if shared >= SHARED_WORTH and other.computed < shared:
                other.shared_stops.add(shared)
                return True
        return False

    def _start(self, seq: Sequence) -> None:
        """Take a lease and pages for everything known of `seq`; when pages are short it stays queued."""
        r = seq.request
        try:
            lease = self._open(seq)
        except OutOfPages as problem:
            if self.running:
                seq.retry_after = self.released
            else:
                self._error(seq, 507, "kv_full", f"not enough KV pages for {len(seq.tokens)} tokens ({problem})")
            return
        self.queue.remove(seq)
        order = self._order(seq)
        for other in self.queue:
            other.passed += not other.background and self._waits_for_pages(other) and self._order(other) < order
        seq.adopt(lease, self.limits.max_context)
        self.running.append(seq)
        seq.tag = self._fair.admit(r.session, seq.arrived_at, r.priority, seq.pending, self._crowd)
        if not seq.number:
            self._admissions += 1
            seq.number = self._admissions
            seq.note_lookup(self._clock())
            if seq.background:
                self.counters["background_tokens"] += seq.usage.new
            else:
                self.counters.update(prompt_tokens=seq.prompt, cached_tokens=seq.usage.common, lost_tokens=seq.usage.lost)

    def _open(self, seq: Sequence) -> Lease:
        """Raises OutOfPages, holding nothing."""
        r = seq.request
        options = {"reuse": seq.reuse, "background": seq.background, "most": seq.most(self.limits.max_context)}
        lease = self._prefix.open(seq.tokens, session=r.session, anchors=r.anchors, **options)
        try:
            lease.grow(len(lease.tokens))  # a stored spelling may be longer than the prompt's own
        except OutOfPages:
            lease.close((), "error")
            raise
        return lease

    # --- after the step

    def commit(self, step: Step, outcomes: Seq[Outcome]) -> None:
        """Take in what was computed: `outcomes[i]` belongs to `step[i]`."""
        active = {(s.request.session, s.request.priority) for s in self._all()}
        filled = sum(c.end - c.start for c in step if not c.seq.decoding)
        rows = sum(c.end - c.start for c in step) - filled  # a decoding sequence has one
        self._fair.advance(DECODE_COST * rows + filled, active)
        self._pace.observe(filled, self._clock() - self._planned)
        for chunk, outcome in zip(step, outcomes, strict=True):
            if outcome.error is not None:
                self._error(chunk.seq, outcome.error.status, outcome.error.code, outcome.error.message)
            else:
                self._advance(chunk, outcome)

    def _advance(self, chunk: Chunk, outcome: Outcome) -> None:
        seq = chunk.seq
        decoding = seq.decoding
        seq.computed = chunk.end
        seq.echo.extend(outcome.echo)
        if chunk.kept is not None:
            seq.lease.checkpoint(seq.tokens[: chunk.kept.offset], slot=chunk.kept.slot)
        if not decoding:
            seq.lease.checkpoint(seq.tokens[: seq.computed], "shared" if seq.computed in seq.shared_stops else "")
        if seq.computed < len(seq.tokens):
            return
        if not seq.answering:
            self._send_started(seq)
        if not chunk.sample:  # prefill only
            self._finish(seq, "length")
            return
        self._append(seq, outcome)

    def _append(self, seq: Sequence, outcome: Outcome) -> None:
        token = outcome.token
        seq.tokens.append(token)
        seq.sampler.observe(token)
        self.counters["sampled_tokens"] += 1
        self._fair.charge(seq.request.session, seq.request.priority, 1)
        if token in seq.request.stop_ids:
            self._finish(seq, "stop", stop_id=token)
            return
        self.outbox.append(Tokens(id=seq.id, tokens=[token], logprobs=[outcome.logprob] if outcome.logprob else None))
        if seq.sampler.grammar and seq.sampler.grammar.complete:
            self._finish(seq, "stop")
        elif seq.sampled >= seq.limit:
            self._finish(seq, "length")

    def _send_started(self, seq: Sequence) -> None:
        seq.answering = self._clock()
        seq.usage = msgspec.structs.replace(seq.usage, prefill_ms=(seq.answering - seq.admitted) * 1e3)
        echo = seq.echo if seq.request.prompt_logprobs is not None else None
        self.outbox.append(Started(id=seq.id, usage=seq.usage, prompt_logprobs=echo))
        u = seq.usage
        rate = u.new / u.prefill_ms * 1e3 if u.prefill_ms > 0 else None
        log.info(log_line("prefill done", req=seq.id, new=u.new, ms=u.prefill_ms, tok_s=rate))

    # --- endings

    def fail(self, step: Step, status: int, code: str, message: str) -> None:
        """The step broke: what its sequences have in pages and state is not to be trusted, so they end here and keep nothing."""
        for chunk in step:
            self._error(chunk.seq, status, code, message)

    def shutdown(self) -> None:
        """End everything with an error; what was computed is left to the prefix cache."""
        for seq in self._all():
            self._error(seq, 503, "shutting_down", "the engine is shutting down: retry when it is back", release="shutdown")

    def _finish(self, seq: Sequence, reason: str, stop_id: int | None = None) -> None:
        self._release(seq, reason)
        self.counters[f"done_{reason}"] += 1
        log.info(seq.farewell(reason, self._clock()))
        usage = seq.usage or MoorageUsage(prompt=seq.prompt, common=0, new=0, reason="not-started")
        self.outbox.append(Done(id=seq.id, reason=reason, usage=usage, completion=seq.sampled, stop_id=stop_id))

    def _error(self, seq: Sequence, status: int, code: str, message: str, release: str = "error") -> None:
        self._release(seq, release)
        self.counters["errors"] += 1
        log.error(log_line("request failed", req=seq.id, status=status, code=code, why=message))
        self.outbox.append(RequestError(id=seq.id, status=status, code=code, message=message))

    def _release(self, seq: Sequence, reason: str) -> None:
        """Give back what `seq` holds and take it off the lists. The prefix cache keeps nothing when `reason` is "error"."""
        if seq.lease is None:
            self.queue.remove(seq)
            return
        self.running.remove(seq)
        seq.lease.close(seq.tokens[: seq.computed], reason)
        seq.lease, seq.computed = None, 0
        self.released += 1
        self._hold = False

    # --- views

    @property
    def busy(self) -> bool:
        return bool(self.running or self.queue)

    @property
    def serving(self) -> bool:
        """Does a client wait for any of it?"""
        return any(not s.background for s in self._all())

    def _all(self) -> list[Sequence]:
        return [*self.running, *self.queue]

    def requests(self) -> list[dict[str, object]]:
        """One row per live request, for `/v1/requests`."""
        now = self._clock()
        return [s.describe(now) for s in self._all()]
