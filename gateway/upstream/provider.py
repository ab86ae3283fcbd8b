"""Any provider, through litellm. litellm costs seconds and hundreds of megabytes to import, so it is imported by the first
request that needs it, in a thread, and never on the direct path.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import orjson

from gateway import sse
from gateway.config import Deployment, Timeouts
from gateway.errors import UpstreamError
from gateway.turn import Turn
from gateway.upstream.base import ELSEWHERE, RETRYABLE, Health

DONE = b"data: [DONE]\n\n"


class ProviderReply:
    """litellm's answer object as the bytes every other upstream sends."""

    def __init__(self, answer: Any, streamed: bool, deployment: Deployment) -> None:
        self._answer = answer
        self._deployment = deployment
        self._items = aiter(answer) if streamed else None
        self._where = _where(deployment)
        self._next: asyncio.Task[Any] | None = None
        self.ended = False
        self.status = 200
        self.headers: Mapping[str, str] = {}
        self.streamed = streamed

    async def read(self, timeout: float) -> bytes:
        if self.ended:
            return b""
        # A task, because cancelling an async generator in its `anext` would end it.
        self._next = self._next or asyncio.ensure_future(anext(self._items, None))
        done, _ = await asyncio.wait({self._next}, timeout=timeout)
        if not done:
            message = f"{self._where} sent nothing for {timeout:g} s"
            raise UpstreamError(504, message, "Raise timeouts.idle", kind="timeout", retryable=False)
        task, self._next = self._next, None
        try:
            item = task.result()
        except Exception as e:  # litellm raises provider classes without a common base
            raise _error(e, self._deployment, died=True) from None
        if item is None:
            self.ended = True
            return DONE
        data = _plain(item)
        if _closes(data) and self._made_up():
            message = f"{self._where} ended its answer in the middle"
            raise UpstreamError(502, message, "Send the request again", kind="died", retryable=False)
        return sse.event(data)

    def _made_up(self) -> bool:
        """litellm ends a stream that just stops with a `stop` of its own. Its wrapper knows whether the provider said one."""
        names = ("received_finish_reason", "intermittent_finish_reason")
        return hasattr(self._answer, names[0]) and not any(getattr(self._answer, n, None) for n in names)

    async def whole(self, timeout: float) -> bytes:
        return orjson.dumps(_plain(self._answer))

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._items is not None and not self.ended and hasattr(self._answer, "aclose"):
            closing = asyncio.ensure_future(self._answer.aclose())
            closing.add_done_callback(lambda t: t.cancelled() or t.exception())


class ProviderUpstream:
    """Deployments of kind `provider`."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._importing: asyncio.Future[ModuleType] | None = None

    async def send(self, turn: Turn, deployment: Deployment, body: bytes) -> ProviderReply:
        litellm = await self._litellm(_where(deployment))
        settings = {"model": deployment.model, "timeout": self._timeouts.prefill, "num_retries": 0}
        call: dict[str, Any] = orjson.loads(body) | settings
        call |= {k: v for k, v in deployment.control.items() if k in ("mock_response", "custom_llm_provider", "organization")}
        if deployment.api_base:
            call["api_base"] = deployment.api_base
        if deployment.api_key:
            call["api_key"] = deployment.api_key.reveal()
        if deployment.headers:
            call["extra_headers"] = deployment.headers
        name = "acompletion" if "messages" in call else "aembedding" if "input" in call else "atext_completion"
        function = getattr(litellm, name)
        try:
            answer = await function(**call)
        except Exception as e:  # as above
            raise _error(e, deployment, died=False) from None
        return ProviderReply(answer, turn.stream, deployment)

    async def _litellm(self, where: str) -> ModuleType:
        if self._importing is None:
            self._importing = asyncio.ensure_future(asyncio.to_thread(importlib.import_module, "litellm"))
        try:
            return await asyncio.shield(self._importing)
        except ImportError:
            self._importing = None
            remedy = "Install it with `pip install moorage[provider]`, or point the model at an OpenAI-compatible api_base"
            raise UpstreamError(501, f"{where} needs litellm", remedy, kind="connect", retryable=False, elsewhere=True) from None

    async def tokenize(self, deployment: Deployment, body: bytes) -> int | None:
        return None

    async def health(self, deployment: Deployment) -> Health:
        return Health("ready", "hosted; not probed, a probe would cost tokens")

    async def models(self, deployment: Deployment) -> list[dict[str, Any]]:
        return []

    async def close(self) -> None:
        if self._importing is not None and not self._importing.done():
            self._importing.cancel()


def _plain(item: Any) -> dict[str, Any]:
    """A litellm object as plain data. Fields it left unset stay out, but for the two that are null on OpenAI's own wire."""
    if isinstance(item, dict):
        return item
    data = item.model_dump(mode="json", exclude_none=True)
    for choice in data.get("choices") or ():
        choice.setdefault("finish_reason", None)
        if "message" in choice:
            choice["message"].setdefault("content", None)
    return data


def _closes(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices")
    return isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") for c in choices)


def _where(deployment: Deployment) -> str:
    return f"{deployment.name} ({deployment.model} through litellm)"


def _retry_after(error: Exception) -> str:
    """litellm keeps the provider's headers beside the exception; its `response` is often one it made up."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("litellm_response_headers", "headers"):
            headers = getattr(holder, name, None)
            if hasattr(headers, "get") and (wait := headers.get("retry-after")):
                return str(wait)
    return ""


def _error(error: Exception, deployment: Deployment, died: bool) -> UpstreamError:
    """litellm's exception as ours: first line only."""
    status = getattr(error, "status_code", None)
    status = status if isinstance(status, int) and 400 <= status < 600 else 502
    wait = _retry_after(error)
    text = next(iter(str(getattr(error, "message", "") or error).splitlines()), type(error).__name__)
    kind, retryable, elsewhere = "died" if died else "status", status in RETRYABLE, status in ELSEWHERE
    if status in (401, 403):
        # The client's own key was fine; it is the gateway's key that this provider did not take.
        status, text = 502, f"it refused the gateway's key: {text}"
    headers = {"retry-after": wait} if wait else {}
    text = f"{_where(deployment)}: {text}"
    return UpstreamError(status, text, kind=kind, retryable=retryable, elsewhere=elsewhere, headers=headers)
