"""Runs the choices of one request on the engine: sends, merges their messages, ends them together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass

from engine.api.answer import Choice, Piece
from engine.api.errors import ApiError
from engine.api.metrics import Metrics
from engine.api.service import Engine, EngineStream
from engine.ipc import Done, Generate, RequestError, Started, TokenLogprob, Tokens

log = logging.getLogger("moorage.api")


@dataclass(slots=True)
class Update:
    """One step of one choice. `started` marks the end of prefill, `ended` the last update of the choice."""

    choice: Choice
    piece: Piece
    started: bool = False
    ended: bool = False
    prompt_logprobs: list[TokenLogprob] | None = None


def failed(message: RequestError) -> ApiError:
    return ApiError(message.status, message.message, message.code)


async def run(engine: Engine, work: list[tuple[Generate, Choice]], metrics: Metrics) -> AsyncGenerator[Update, None]:
    """Yield updates of all choices as they come. Raises ApiError when the engine refuses or dies; leaving early cancels.

    A choice that is complete before the engine says so is cancelled in the engine and ends as soon as the engine says so.
    """
    begun, first = time.monotonic(), True
    with ExitStack() as stack:
        streams = [stack.enter_context(engine.generate(request)) for request, _ in work]
        async for i, message in _merged(streams):
            choice = work[i][1]
            match message:
                case Started():
                    choice.started(message)
                    yield Update(choice, Piece(), started=True, prompt_logprobs=message.prompt_logprobs)
                case Tokens():
                    if first:
                        metrics.first_token.observe(time.monotonic() - begun)
                        first = False
                    if choice.over:
                        continue  # sampled before the cancellation arrived
                    yield Update(choice, choice.tokens(message))
                    if choice.over:
                        streams[i].cancel("second tool call" if choice.cut else "stop string")
                case Done(reason="cancelled") if not choice.over:
                    raise ApiError(503, "the engine ended this request before it was complete: retry", "cancelled")
                case Done():
                    yield Update(choice, choice.done(message), ended=True)
                case RequestError():
                    raise failed(message)


async def _merged(streams: list[EngineStream]) -> AsyncGenerator[tuple[int, Started | Tokens | Done | RequestError], None]:
    if len(streams) == 1:
        async for message in streams[0]:
            yield 0, message
        return
    queue: asyncio.Queue[tuple[int, Started | Tokens | Done | RequestError] | None] = asyncio.Queue()

    async def pump(i: int) -> None:
        async for message in streams[i]:
            queue.put_nowait((i, message))
        queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(i)) for i in range(len(streams))]
    try:
        open_streams = len(streams)
        while open_streams:
            item = await queue.get()
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
