"""What the API process sees of the engine: its state, and the messages of one request."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.ipc import Done, FromWorker, RequestError, Started, Tokens

Phase = Literal["loading", "ready", "restarting", "failed", "stopped"]


@dataclass(frozen=True)
class EngineState:
    """For `/health`. `message` says why it is not ready, or that it does not answer.

    `model`, `max_context`, `vocab` are those of the last Ready.
    """

    phase: Phase = "loading"
    fraction: float = 0.0
    stage: str = "starting"
    message: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    max_context: int = 0
    vocab: int = 0
    restarts: int = 0
    pid: int | None = None

    @property
    def ready(self) -> bool:
        return self.phase == "ready"


class Owner(Protocol):
    def cancel(self, id: str, reason: str) -> None: ...


class Stream:
    """The messages of one request: `Started`, `Tokens`..., then one `Done` or `RequestError`. Leaving the `with` cancels it."""

    def __init__(self, owner: Owner, id: str) -> None:
        self.id = id
        self._owner = owner
        self._messages: deque[FromWorker] = deque()  # bounded by the request's max_new
        self._reader: asyncio.Future[None] | None = None  # of the one who waits for the next message
        self._ended = False

    def put(self, message: FromWorker) -> None:
        self._messages.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Started | Tokens | Done | RequestError:
        if self._ended:
            raise StopAsyncIteration
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        message = self._messages.popleft()
        self._ended = isinstance(message, (Done, RequestError))
        return message

    def cancel(self, reason: str = "client gone") -> None:
        """Ask the engine to stop; `Done("cancelled")` still follows. Does nothing after the end."""
        if not self._ended:
            self._owner.cancel(self.id, reason)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
