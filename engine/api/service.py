"""What the HTTP handlers share: the engine, the model's text side, metrics, and what happens to every request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.api.errors import ApiError
from engine.api.metrics import Metrics
from engine.api.transport import KEEP_ALIVE_S
from engine.ipc import ControlReply, Done, Generate, RequestError, Started, Tokens
from engine.protocol import log_line
from engine.text.history import CallMemory
from engine.text.text_model import TextModel, load_text_model

log = logging.getLogger("moorage.api")

# Refusals of the engine come within milliseconds; a stream waits this long for them, so that they get an HTTP status.
REFUSAL_S = 0.5
MAX_LABELS = 100


class EngineStream(AbstractContextManager["EngineStream"], Protocol):
    """The messages of one request; leaving the `with` cancels it."""

    def __aiter__(self) -> AsyncIterator[Started | Tokens | Done | RequestError]: ...

    def cancel(self, reason: str) -> None: ...


class Engine(Protocol):
    """What the API needs of `engine.supervisor.Supervisor`."""

    state: Any

    def generate(self, request: Generate) -> EngineStream: ...

    async def control(self, verb: str, timeout: float = 30.0, **args: Any) -> ControlReply: ...

    def not_ready(self) -> str: ...


@dataclass
class Service:
    """State of one server. `text` is None until the tokenizer is read; `text_error` says why it never will be."""

    engine: Engine
    model: str  # the name clients use
    path: str
    text: TextModel | None = None
    text_error: str = ""
    keep_alive_s: float = KEEP_ALIVE_S
    refusal_s: float = REFUSAL_S
    metrics: Metrics = field(default_factory=Metrics)
    calls: CallMemory = field(default_factory=CallMemory)
    # Rendering and tokenizing a long prompt takes tens of milliseconds: one thread, so that caches need no locks.
    text_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "text"))
    text_failed: asyncio.Event = field(default_factory=asyncio.Event)
    continuations: Any = None  # engine.api.continuation.Continuations, set by the app
    _told: set[str] = field(default_factory=set)
    _labels: set[str] = field(default_factory=set)

    async def load_text(self) -> None:
        """Read tokenizer and template beside the engine's own loading."""
        loop = asyncio.get_running_loop()
        try:
            self.text = await loop.run_in_executor(self.text_thread, load_text_model, self.path)
        except ValueError as e:  # TokenizerError and TemplateError
            self.text_error = str(e)
            self.text_failed.set()
        except Exception as e:  # unsaid, the server would be loading for ever
            log.exception("reading the tokenizer failed")
            self.text_error = f"{self.path}: its tokenizer or chat template cannot be used ({type(e).__name__}: {e})"
            self.text_failed.set()

    def ready_text(self) -> TextModel:
        """Raises ApiError 503 while loading, or for good when the tokenizer cannot be used."""
        if self.text_error:
            raise ApiError(503, f"the model cannot be served: {self.text_error}", "tokenizer_failed")
        if self.text is None:
            raise ApiError(503, "the model is loading (tokenizer): retry in a moment", "model_loading")
        return self.text

    def ready(self) -> TextModel:
        state = self.engine.state
        if not state.ready:
            code = {"failed": "engine_failed", "loading": "model_loading"}.get(state.phase, "engine_restarting")
            raise ApiError(503, self.engine.not_ready(), code)
        return self.ready_text()

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(404, f"the model `{name}` does not exist here; `{self.model}` is served", "model_not_found", "model")

    def label(self, field_name: str) -> str:
        """A metric label for a name that comes from clients: past a hundred different ones, all are `other`."""
        if field_name not in self._labels and (len(self._labels) >= MAX_LABELS or len(field_name) > 64):
            return "other"
        self._labels.add(field_name)
        return field_name

    def tell_once(self, event: str, fields: list[str]) -> None:
        """Log the first time each field is met; the counter has them all."""
        new = [f for f in fields if f"{event}:{f}" not in self._told]
        if new and len(self._told) < 1000:  # field names come from clients
            self._told.update(f"{event}:{f}" for f in new)
            log.warning("%s", log_line(event, fields=",".join(new)))
