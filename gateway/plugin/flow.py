"""An answer on its way through a LiteLLM proxy: watched by the gateway's filters, written again in the client's dialect.

`streamed` takes LiteLLM's stream and gives back what the client gets; `whole` does the same with a complete answer. Neither
knows litellm: asking once more is a function that the plugin brings.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from gateway.errors import Refusal, UpstreamError
from gateway.filters import Again, AnswerFilter
from gateway.plugin.calls import Call, Calls
from gateway.plugin.read_answers import READERS, AnswerReader, ChatReader
from gateway.sse import Chunk
from gateway.turn import Decision

# Filters bound their own retries; this bounds all of them together, as in the gateway.
MAX_AGAIN = 3

# Asks LiteLLM with these keyword arguments: an async iterator of chunks when they say stream, else a chat completion.
AskAgain = Callable[[dict[str, Any]], Awaitable[Any]]
# Makes LiteLLM's own chunk of a chat completion chunk that was changed here.
MakeChunk = Callable[[dict[str, Any]], Any]


class Flow:
    """One answer. Raises Refusal from `streamed` and `whole` when the client must be told."""

    def __init__(self, calls: Calls, call: Call, ask_again: AskAgain, make_chunk: MakeChunk) -> None:
        self._calls, self._call, self._ask_again = calls, call, ask_again
        self._answer = call.answer
        self._reader: AnswerReader = READERS[call.turn.dialect.name]()
        self._filters: list[AnswerFilter] = calls.filters(call)
        self._chat = call.turn.dialect.name == "chat"
        self._make_chunk = make_chunk
        self._items: dict[int, Any] = {}  # id of a chunk -> LiteLLM's item that it was, for those that pass unchanged
        self._writer = None

    # --- streamed

    async def streamed(self, response: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """What goes to the client. An answer that is not watched passes as it is and is only observed."""
        source = response
        for left in range(MAX_AGAIN, -1, -1):
            try:
                async for item in source:
                    for out in self._item(item):
                        yield out
                if not self._answer.complete:
                    raise _cut_off()
                for out in self._last():
                    yield out
                return
            except Again as again:
                if not left:
                    raise again.otherwise from None
                await _close(source)
                source = await self._once_more(again.decisions)

    def _item(self, item: Any) -> list[Any]:
        chunks = self._reader.item(item)
        now = time.perf_counter()
        if chunks and not self._answer.first_byte:
            self._answer.first_byte = now
        self._answer.observe(chunks, now)
        if not self._call.watched:
            return [item]
        self._items = {id(chunk): item for chunk in chunks} if len(chunks) == 1 else {}
        for f in self._filters:
            chunks = f.feed(chunks) if chunks else chunks
        return self._out(chunks)

    def _last(self) -> list[Any]:
        """What the filters let go at the end, each one's last chunks passing those behind it."""
        if not self._call.watched:
            return []
        chunks: Sequence[Chunk] = ()
        for f in self._filters:
            chunks = [*(f.feed(chunks) if chunks else ()), *f.finish()]
        out = self._out(chunks)
        return out if self._chat else [*out, self._write().finish()]

    def _out(self, chunks: Sequence[Chunk]) -> list[Any]:
        if self._chat:
            return [self._items.get(id(c)) or self._make_chunk(c.data) for c in chunks if c.data is not None]
        data = self._write().feed(chunks) if chunks else b""
        return [data] if data else []

    def _write(self) -> Any:
        """The dialect's own writer. A Responses answer keeps the id by which LiteLLM knows it."""
        if self._writer is None:
            turn = self._call.turn
            if turn.wire is not None and getattr(self._reader, "id", ""):
                turn = turn.but(wire=replace(turn.wire, response_id=self._reader.id))
            self._writer = turn.dialect.writer(turn)
        return self._writer

    # --- whole

    async def whole(self, response: Any) -> Any | None:
        """The answer that goes out instead, as plain data of the client's dialect; None when nothing was changed."""
        data = first = self._reader.whole(response)
        for left in range(MAX_AGAIN, -1, -1):
            try:
                now = time.perf_counter()
                self._answer.first_byte = self._answer.first_byte or now
                self._answer.observe_whole(data, now)
                fresh = data
                for f in self._filters:
                    fresh = f.whole(fresh)
                if fresh is first:
                    return None
                return fresh if self._chat else orjson.loads(self._write().whole(fresh))
            except Again as again:
                if not left:
                    raise again.otherwise from None
                data = ChatReader().whole(await self._once_more(again.decisions))
        return None

    # --- asking once more

    async def _once_more(self, decisions: tuple[Decision, ...]) -> Any:
        """The answer to the changed request; it comes as a chat completion in every dialect."""
        arguments = self._calls.again(self._call, *decisions)
        self._answer.forget()
        for f in self._filters:
            f.restart()
        answer = await self._ask_again(arguments)
        id = getattr(self._reader, "id", "")
        self._reader = ChatReader()
        if id and not self._chat:
            self._write_id(id)
        return answer

    def _write_id(self, id: str) -> None:
        if self._writer is None and self._call.turn.wire is not None:
            self._call.turn = self._call.turn.but(wire=replace(self._call.turn.wire, response_id=id))


async def _close(source: Any) -> None:
    """Stop an upstream whose answer is not wanted any more."""
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


def _cut_off() -> Refusal:
    remedy = "Send the request again; if it stays so, look at the upstream's log"
    return UpstreamError(502, "The upstream ended its answer in the middle", remedy, kind="died", retryable=False)
