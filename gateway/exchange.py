"""One turn's conversation between its upstream and its client: attempts, the pump, retries, errors.

The order of things for a stream is: read a block, let it through, then look at it. Looking (parsing for the record) comes first
only when a filter wants the block anyway. Whatever ends the exchange, the upstream's reply is closed, which cancels its work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import orjson

from gateway.answer import Answer, Attempt
from gateway.client import Client
from gateway.config import Timeouts
from gateway.dialects.base import Writer
from gateway.errors import Refusal, UpstreamError
from gateway.filters import Again, AnswerFilter
from gateway.glance import without_done
from gateway.routing import Router
from gateway.sse import Chunk, Splitter, parse
from gateway.turn import Turn
from gateway.upstream.base import Reply, Upstream, prepare

# Filters bound their own retries; this bounds all of them together.
MAX_AGAIN = 3


class Exchange:
    """Built per turn; `run` returns when the client has everything. `turn` is the newest state, also after an error."""

    def __init__(
        self,
        turn: Turn,
        answer: Answer,
        client: Client,
        filters: Sequence[AnswerFilter],
        router: Router,
        upstreams: dict[str, Upstream],
        timeouts: Timeouts,
        writer: Writer,
    ) -> None:
        self.turn = self._base = turn  # `_base` is without the decisions that only the current deployment needed
        self._answer = answer
        self._client = client
        self._filters = filters
        self._router = router
        self._upstreams = upstreams
        self._timeouts = timeouts
        self._writer = writer

    async def run(self) -> None:
        """Raises Refusal when there is no answer and nothing was sent yet."""
        if self.turn.stream and not self._client.started:
            self._client.stream_headers(self.turn.decisions)
        try:
            for left in range(MAX_AGAIN, -1, -1):
                try:
                    await self._attempts()
                    return
                except Again as again:
                    if not left:
                        raise again.otherwise from None
                    self.turn = self._base.decide(*again.decisions)
                    self._answer.forget()
                    for f in self._filters:
                        f.restart()
        except Refusal as refusal:
            if not self._client.started:
                raise
            self._answer.end("died" if isinstance(refusal, UpstreamError) and refusal.kind == "died" else "error", refusal)
            await self._client.end(self._writer.error(refusal))

    async def _attempts(self) -> None:
        """Try deployments until one answers; only failures before its first byte lead to another one."""
        failure: UpstreamError | None = None
        base = self._base = self.turn
        async with aclosing(self._router.attempts(base, self._answer.attempts)) as deployments:
            async for deployment in deployments:
                self.turn, body = prepare(base, deployment)
                attempt = Attempt(deployment, body, time.perf_counter())
                self._answer.attempts.append(attempt)
                try:
                    await self._attempt(attempt)
                    return
                except UpstreamError as error:
                    failure = error
                    if not (error.retryable or error.elsewhere) or self._answer.first_byte:
                        raise
        raise failure or Refusal(503, f"No deployment of {base.model} can take the request", code="no_deployment")

    async def _attempt(self, attempt: Attempt) -> None:
        self._router.began(self.turn, attempt)
        try:
            upstream = self._upstreams[attempt.deployment.kind]
            reply = await upstream.send(self.turn, attempt.deployment, attempt.sent)
            attempt.status = reply.status
            try:
                await self._pass_on(reply)
            finally:
                reply.close()
        except UpstreamError as error:
            error.hide(attempt.deployment.secrets)
            attempt.error = error
            attempt.status = attempt.status or (error.status if error.kind == "status" else 0)
            raise
        finally:
            attempt.seconds = time.perf_counter() - attempt.at
            self._router.ended(self.turn, attempt)

    async def _pass_on(self, reply: Reply) -> None:
        if not self.turn.stream:
            await self._whole(reply)
        elif reply.streamed:
            await self._stream(reply)
        else:
            _raise_if_error(_object(await reply.whole(self._timeouts.idle)))
            raise UpstreamError(
                502, "The upstream answered a streaming request without a stream", kind="protocol", retryable=False
            )

    # --- streamed

    async def _stream(self, reply: Reply) -> None:
        answer, client, splitter = self._answer, self._client, Splitter()
        client.stream_headers((*self.turn.decisions, *answer.decisions))
        timeout = self._timeouts.prefill
        while data := await reply.read(timeout):
            now = time.perf_counter()
            if not answer.first_byte:
                answer.first_byte = now
                timeout = self._timeouts.idle
            answer.upstream_bytes += len(data)
            await self._block(_whole_events(splitter, data), now, reply.ended)
        await self._block(splitter.rest(), time.perf_counter())
        if not answer.complete:
            raise UpstreamError(
                502,
                "The upstream ended its answer in the middle",
                "Send the request again; if it stays so, look at the upstream's log",
                kind="died",
                retryable=False,
            )
        await client.end(self._through(()) + self._writer.finish())
        answer.end("ok")

    async def _block(self, raw: bytes, at: float, last: bool = False) -> None:
        if not raw:
            return
        wanted = [f.wants(raw) for f in self._filters]  # all are asked, so that each sees every block go by
        bare = without_done(raw)
        if bare and self._writer.passthrough and True not in wanted and b'"error"' not in raw:
            if last:
                self._client.hold(bare[0])
            elif bare[0]:
                await self._client.write(bare[0])
            self._answer.glance(raw, at, bare)
            return
        chunks: Sequence[Chunk] = parse(bare[0] if bare else raw)
        if self._writer.passthrough:
            # Most of the chunks are passed on unparsed.
            for chunk, seen in zip(chunks, self._answer.glance(raw, at, bare) or (), strict=False):
                chunk.seen = seen
        else:
            self._answer.observe(chunks, at)
        if bare:
            self._answer.done = self._answer.done or bare[1]
        else:
            chunks = [c for c in chunks if not c.done]
        fed = False
        for f, wants in zip(self._filters, wanted, strict=True):
            fed = fed or wants  # what one filter lets go may concern those behind it
            if fed and chunks:
                chunks = f.feed(chunks)
        if b'"error"' in raw:
            for chunk in chunks:
                _raise_if_error(chunk.data)
        if out := self._writer.feed(chunks) if chunks else b"":
            if last:
                self._client.hold(out)
            else:
                await self._client.write(out)

    def _through(self, chunks: Sequence[Chunk]) -> bytes:
        """What the filters let go at the end, each one's last chunks passing those behind it."""
        for f in self._filters:
            chunks = [*(f.feed(chunks) if chunks else ()), *f.finish()]
        return self._writer.feed(chunks) if chunks else b""

    # --- whole

    async def _whole(self, reply: Reply) -> None:
        raw = await reply.whole(self._timeouts.prefill)
        now = time.perf_counter()
        self._answer.first_byte, self._answer.upstream_bytes = now, len(raw)
        data = _object(raw)
        if data is None:
            raise UpstreamError(502, "The upstream's answer is not a JSON object", kind="protocol", retryable=False)
        _raise_if_error(data)
        if self.turn.dialect.upstream_path.endswith("completions"):
            _must_choose(data)
        self._answer.observe_whole(data, now)
        fresh = data
        for f in self._filters:
            fresh = f.whole(fresh)
        body = raw if fresh is data and self._writer.passthrough else self._writer.whole(fresh)
        self._answer.end("ok")
        await self._client.whole(200, body, (*self.turn.decisions, *self._answer.decisions))


def _whole_events(splitter: Splitter, data: bytes) -> bytes:
    try:
        return splitter.feed(data)
    except ValueError as e:
        raise UpstreamError(502, f"The upstream's stream is broken: {e}", kind="protocol", retryable=False) from None


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return data if isinstance(data, dict) else None


def _raise_if_error(data: dict[str, Any] | None) -> None:
    """An error that an upstream reports under a good status, in a stream or whole, ends the answer as an error."""
    if data is None:
        return
    error = data if data.get("object") == "error" else data.get("error")  # vLLM before 0.11 has its error at the top
    if not error:
        return
    error = error if isinstance(error, dict) else {"message": str(error)}
    message, code = str(error.get("message") or "The upstream reported an error"), str(error.get("code") or "upstream_error")
    raise UpstreamError(502, message, str(error.get("remedy") or ""), kind="status", retryable=False, code=code)


def _must_choose(data: dict[str, Any]) -> None:
    """An answer without a choice would go on as one that says nothing, and look finished."""
    choices = data.get("choices")
    if not isinstance(choices, list) or not any(isinstance(c, dict) for c in choices):
        raise UpstreamError(502, "The upstream's answer has no choices", kind="protocol", retryable=False)
