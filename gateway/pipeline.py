"""The pipeline: what happens to a request, in order, as lists a reader can see.

    read -> BEFORE (each Turn -> Turn) -> exchange with the upstream, the answer passing FILTERS -> AFTER (whatever happened)

A stage is `(turn) -> turn`, awaitable or not; it refuses by raising Refusal. A filter factory is `(turn, answer) -> filter or
None`. An after-step is `(turn, answer) -> None`, awaitable or not; the record is written by the last one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache

from engine.protocol import log_line
from gateway import anchors, filters, sessions, toolcheck
from gateway.answer import Answer
from gateway.client import Client, Receive, Send, Watch
from gateway.config import Config
from gateway.counting import Counting
from gateway.dialects.base import Dialect, Writer
from gateway.dialects.chat import Chat, Completions, Embeddings
from gateway.dialects.messages import CountTokens, Messages
from gateway.dialects.responses import Responses
from gateway.errors import Refusal, UpstreamError
from gateway.exchange import Exchange
from gateway.filters import FilterFactory
from gateway.learning import Learning
from gateway.limits import Limits
from gateway.log_lines import say
from gateway.metrics import Metrics
from gateway.policy import clamp, thinking, thinking_watch
from gateway.policy.normalise import Normaliser
from gateway.records import RecordWriter, record
from gateway.routing import Balanced
from gateway.store import MemoryStore, Store
from gateway.toolcheck_watch import ToolCheck
from gateway.tools import KnownTools
from gateway.tracing import Tracer
from gateway.turn import Received, Turn, new_id
from gateway.upstream.base import Upstream
from gateway.upstream.engine import DirectUpstream
from gateway.upstream.provider import ProviderUpstream

log = logging.getLogger("moorage")

Stage = Callable[[Turn], Turn | Awaitable[Turn]]
After = Callable[[Turn, Answer], None | Awaitable[None]]

KEEP_POLICIES = 1024  # merged rules by model, key and route; model names are the clients' to choose

# Other streams get a turn between the stages of a request this large (all stages together may take 10 ms a MiB), as soon as
# those so far took so long. More often costs more than it gives: each turn of the loop lets the records thread compute.
LARGE = 128 << 10
STRETCH_S = 0.001

# Which path speaks which dialect.
DIALECTS: dict[str, Callable[[KnownTools], Dialect]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completions,
    "/v1/embeddings": Embeddings,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/messages/count_tokens": CountTokens,
}


class Stretch:
    """A large request's right to compute: one at a time has it, and after STRETCH_S whatever else is due runs first."""

    __slots__ = ("_held", "_lock", "_since")

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock, self._held, self._since = lock, False, time.perf_counter()

    async def rest(self) -> None:
        """Between two stages, and behind the last one."""
        over = time.perf_counter() - self._since >= STRETCH_S
        if over:
            await asyncio.sleep(0)  # with the lock held: what others do in this turn is nothing large
            self.give_back()
        if not self._held:
            await self._lock.acquire()
            self._held = True
        if over:
            self._since = time.perf_counter()

    def give_back(self) -> None:
        if self._held:
            self._lock.release()
            self._held = False


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Everything a gateway is made of. Built once by `build`, closed once."""

    config: Config
    dialects: dict[str, Dialect]  # by path
    before: tuple[Stage, ...]
    filters: tuple[FilterFactory, ...]
    after: tuple[After, ...]
    router: Balanced
    limits: Limits
    store: Store
    upstreams: dict[str, Upstream]
    metrics: Metrics
    records: RecordWriter | None
    large: asyncio.Lock  # held by the large request that computes
    tracer: Tracer | None = None

    async def answer(self, received: Received, dialect: Dialect, receive: Receive, send: Send) -> None:
        """Serve one request. Returns when the client has its answer, or has left and its request is cancelled and recorded."""
        turn = Turn(id=new_id(), received=received, dialect=dialect)
        answer, client = Answer(received.started), Client(send, turn.id)
        stretch = Stretch(self.large) if len(received.body) > LARGE else None
        self.metrics.running += 1
        exchange: Exchange | None = None
        writer: Writer | None = None
        watch = Watch(client, receive)
        try:
            for stage in (dialect.read, *self.before):
                if stretch is not None:
                    await stretch.rest()
                made = stage(turn)
                if type(made) is not Turn:
                    if stretch is not None:
                        stretch.give_back()  # it may wait in line
                    made = await made
                turn = made
                if writer is None:
                    writer = dialect.writer(turn)
                    if turn.stream:  # waiting in line is a silence too
                        client.keep_alive(turn, answer, writer, self.config.timeouts.keepalive, self.config.timeouts.idle)
            if stretch is not None:
                await stretch.rest()
                stretch.give_back()
            looks = [f for make in self.filters if (f := make(turn, answer)) is not None]
            kind = Counting if isinstance(dialect, CountTokens) else Exchange
            exchange = kind(turn, answer, client, looks, self.router, self.upstreams, self.config.timeouts, writer)
            await exchange.run()
        except Refusal as refusal:
            answer.end("error" if isinstance(refusal, UpstreamError) else "refused", refusal)
            if client.started:
                await client.end(writer.error(refusal))
            else:
                seen = exchange.turn.decisions if exchange else turn.decisions
                await client.whole(refusal.status, dialect.refusal(refusal), (*seen, *answer.decisions), refusal.headers)
        except asyncio.CancelledError:
            answer.end("cancelled")
            if not client.gone:
                raise  # the server stops
            asyncio.current_task().uncancel()
        except Exception:
            # Our own bug: the client gets one clean line, the log the traceback.
            log.exception("request %s failed inside the gateway", turn.id)
            refusal = Refusal(500, "The gateway failed", f"Look for {turn.id} in its log", code="internal_error")
            answer.end("error", refusal)
            await self._broken(client, dialect, writer or dialect.writer(turn), turn, refusal)
        finally:
            if stretch is not None:
                stretch.give_back()
            client.stop()
            watch.cancel()
            self.metrics.running -= 1
            answer.status = client.status
            await self._finish(exchange.turn if exchange else turn, answer)

    async def _broken(self, client: Client, dialect: Dialect, writer: Writer, turn: Turn, refusal: Refusal) -> None:
        if client.started:
            await client.end(writer.error(refusal))
        else:
            await client.whole(refusal.status, dialect.refusal(refusal), turn.decisions)

    async def _finish(self, turn: Turn, answer: Answer) -> None:
        answer.end("cancelled")  # only if nothing else ended it
        _say(turn, answer)
        for step in self.after:
            try:
                if (left := step(turn, answer)) is not None:
                    await left
            except Exception:
                log.exception("after-step %s of request %s failed", getattr(step, "__qualname__", step), turn.id)

    async def close(self) -> None:
        await self.router.close()
        await self.store.close()
        for upstream in set(self.upstreams.values()):
            await upstream.close()
        if self.records is not None:
            await asyncio.to_thread(self.records.close)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)


def build(config: Config) -> Pipeline:
    """The pipeline of a configuration. Must be called inside a running event loop (the connection pool belongs to one)."""
    records = RecordWriter(config.records) if config.records.path else None
    metrics = Metrics(config, records)
    known = KnownTools()
    store = _store(config)
    limits = Limits(config.keys, config.limits, store)
    metrics.waiting.set_function(lambda: limits.waiting)
    normalise, learning = Normaliser(store), Learning()
    tracer = Tracer(config.tracing) if config.tracing.enabled else None
    direct = DirectUpstream(config.timeouts)
    upstreams: dict[str, Upstream] = {"engine": direct, "openai": direct, "provider": ProviderUpstream(config.timeouts)}

    rules = lru_cache(KEEP_POLICIES)(config.policy)

    def policy(turn: Turn) -> Turn:
        return turn.but(policy=rules(turn.model, turn.caller.key, turn.received.route))

    def write_record(turn: Turn, answer: Answer) -> None:
        if records is not None and not records.put(record(turn, answer)):
            log.warning("records: queue full, the record of %s was dropped; raise records.queue or use a faster disk", turn.id)

    return Pipeline(
        config=config,
        dialects={path: make(known) for path, make in DIALECTS.items()},
        before=(
            limits.admit,
            policy,
            known.stage,
            sessions.stage,
            clamp.stage,
            thinking.stage,
            normalise.stage,
            toolcheck.history,
            anchors.stage,
            learning.stage,
        ),
        filters=(
            thinking_watch.watch,
            ToolCheck().watch,
            filters.usage,
        ),
        after=(
            limits.settle,
            learning.learn,
            metrics.observe,
            *((tracer.observe,) if tracer is not None else ()),
            write_record,
        ),
        router=Balanced(config, lambda deployment: upstreams[deployment.kind].health(deployment)),
        limits=limits,
        store=store,
        upstreams=upstreams,
        metrics=metrics,
        records=records,
        large=asyncio.Lock(),
        tracer=tracer,
    )


def _store(config: Config) -> Store:
    if not config.store.redis:
        return MemoryStore()
    from gateway.redis_store import RedisStore  # only who configures Redis needs its client

    return RedisStore(config.store.redis)


def _say(turn: Turn, answer: Answer) -> None:
    """One log line per request, more only when something went wrong."""
    level = logging.INFO if answer.outcome in ("ok", "cancelled") else logging.WARNING
    if log.isEnabledFor(level):
        say(
            log,
            level,
            log_line(
                "request",
                outcome=answer.outcome,
                status=answer.status,
                model=turn.model or None,
                ms=answer.ms(answer.ended),
                session=turn.session.id or None,
                decisions=",".join(f"{d.stage}.{d.rule}" for d in (*turn.decisions, *answer.decisions)) or None,
                error=answer.error.text if answer.error else None,
                req=turn.id,
            ),
        )
