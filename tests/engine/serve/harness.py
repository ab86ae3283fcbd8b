"""Scheduler + runner + fake decoder in one process with a clock that ticks once a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine import tensors
from engine.build import Parts
from engine.grammar import Grammars
from engine.ipc import Done, FromWorker, Generate, RequestError, Sampling, Started, Tokens, token_array
from engine.limits import Limits
from engine.nn.batch import PAGE, Cache
from engine.prefix.base import PrefixCache
from engine.prefix.naive import NaivePrefixCache
from engine.runner import Runner
from engine.scheduler import Scheduler
from tests.engine.serve.fake import VOCAB, FakeDecoder, fake_cache

GREEDY = Sampling(temperature=0.0)


def generate(id: str, tokens: list[int], max_new: int = 8, **more: object) -> Generate:
    return Generate(id=id, tokens=token_array(tokens), max_new=max_new, **{"sampling": GREEDY, **more})


class Engine:
    """`step()` is one turn of the worker's loop; `messages` is everything sent to the API so far."""

    def __init__(self, parts: Parts) -> None:
        self.now = 0.0
        self.prefix = parts.prefix
        self.scheduler = Scheduler(parts.prefix, parts.limits, lambda: self.now, parts.grammars)
        self.runner = Runner(parts.forward, parts.library)
        self.messages: list[FromWorker] = []

    def submit(self, *requests: Generate) -> None:
        for request in requests:
            self.scheduler.submit(request)

    def step(self) -> bool:
        """False when there was nothing to run."""
        self.now += 1.0
        step = self.scheduler.plan()
        if step:
            try:
                outcomes = self.runner.run(step)
            except RuntimeError as problem:
                self.scheduler.fail(step, 500, "step_failed", str(problem))
            else:
                self.scheduler.commit(step, outcomes)
        self.messages += self.scheduler.outbox
        self.scheduler.outbox.clear()
        return step is not None

    def drain(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.step() and not self.scheduler.queue and not self.scheduler.running:
                return
        raise AssertionError("the engine never became idle")

    def run(self, *requests: Generate) -> None:
        self.submit(*requests)
        self.drain()

    def of(self, id: str) -> list[FromWorker]:
        return [m for m in self.messages if m.id == id]

    def tokens(self, id: str) -> list[int]:
        return [t for m in self.of(id) if isinstance(m, Tokens) for t in m.tokens]

    def end(self, id: str) -> Done | RequestError:
        (end,) = (m for m in self.of(id) if isinstance(m, (Done, RequestError)))
        assert self.of(id)[-1] is end, "a message after the end"
        return end

    def started(self, id: str) -> Started:
        (message,) = (m for m in self.of(id) if isinstance(m, Started))
        return message


class FakeEngine(Engine):
    """Over the fake decoder; `make_prefix` chooses the prefix cache."""

    def __init__(
        self,
        pages: int = 16,
        slots: int = 4,
        max_queue: int = 64,
        prefill_chunk: int = 32,
        decoder: FakeDecoder | None = None,
        make_prefix: Callable[[Cache, int, int], PrefixCache] = NaivePrefixCache,
        grammars: Grammars | None = None,
    ) -> None:
        cache = fake_cache(pages, slots)
        self.decoder = decoder or FakeDecoder()
        limits = Limits(
            max_context=pages * PAGE, vocab=VOCAB, max_running=slots, max_queue=max_queue, prefill_chunk=prefill_chunk
        )
        prefix = make_prefix(cache, pages, slots)
        forward = partial(self.decoder.forward, cache=cache)
        super().__init__(Parts(forward, prefix, limits, {}, grammars, library=tensors))
