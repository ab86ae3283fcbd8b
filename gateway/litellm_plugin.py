"""The gateway's policies, tool checks, anchors and records as a callback of a LiteLLM proxy.

    litellm_settings: {callbacks: gateway.litellm_plugin.moorage}       # in LiteLLM's config.yaml
    MOORAGE_CONFIG=moorage.yaml litellm --config config.yaml            # `policies` and `records` are read from it

This file only knows when LiteLLM calls what; the work is done in `gateway.plugin`, with the gateway's own functions. It is the
one file of the gateway that imports litellm on top, and only a LiteLLM proxy imports it.

LiteLLM 1.108 runs `async_pre_call_hook` only when it is defined on the callback's own class, calls the deployment hook once per
attempt and once per translation, and logs a stream whose client left as a success: nothing here relies on its log events.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import litellm
from litellm.integrations.custom_logger import CustomLogger
from litellm.types.llms.openai import ResponsesAPIResponse
from litellm.types.utils import ModelResponse, ModelResponseStream

from gateway import config_file
from gateway.config import Config
from gateway.errors import Refusal
from gateway.plugin.calls import Call, Calls, refusal_of
from gateway.plugin.flow import Flow

log = logging.getLogger("moorage")

CONFIG_VARIABLE = "MOORAGE_CONFIG"
# LiteLLM's exception for a status, so that its router knows what may be tried elsewhere.
EXCEPTIONS = {
    400: litellm.BadRequestError,
    401: litellm.AuthenticationError,
    404: litellm.NotFoundError,
    422: litellm.UnprocessableEntityError,
    429: litellm.RateLimitError,
}


class Moorage(CustomLogger):
    """Every hook is defined here and not inherited: LiteLLM looks for some of them on the class itself."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._calls = Calls(config)

    async def async_pre_call_hook(self, user_api_key_dict: Any, cache: Any, data: dict, call_type: str) -> dict:
        call = self._calls.begin(call_type, data, getattr(user_api_key_dict, "key_alias", None) or "")
        if call is not None:
            # The request's own task ends with its response, whichever of the hooks below LiteLLM called or left out.
            asyncio.current_task().add_done_callback(lambda _: self._calls.end(call))
        return data

    async def async_pre_call_deployment_hook(self, kwargs: dict, call_type: Any) -> dict | None:
        call = self._calls.find(kwargs)
        if call is None:
            return None
        try:
            return await self._calls.ask(call, getattr(call_type, "value", None) or str(call_type), kwargs)
        except Refusal as refusal:
            call.answer.end("refused", refusal)
            raise _exception(refusal, call) from None

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict
    ) -> AsyncIterator[Any]:
        call = self._calls.find(request_data)
        if call is None:
            async for item in response:
                yield item
            return
        try:
            async for item in self._flow(call).streamed(response):
                yield item
            self._calls.finish(call, "ok")
        except Refusal as refusal:
            died = getattr(refusal, "kind", "") == "died"
            self._calls.finish(call, "died" if died else "error", refusal)
            raise _exception(refusal, call) from None
        except (asyncio.CancelledError, GeneratorExit):
            self._calls.finish(call, "cancelled")
            raise
        except Exception as error:
            self._calls.finish(call, "died" if call.answer.first_byte else "error", refusal_of(error))
            raise

    async def async_post_call_success_hook(self, data: dict, user_api_key_dict: Any, response: Any) -> Any:
        call = self._calls.find(data)
        if call is None:
            return None
        try:
            fresh = await self._flow(call).whole(response)
        except Refusal as refusal:
            self._calls.finish(call, "error", refusal)
            raise _exception(refusal, call) from None
        self._calls.finish(call, "ok")
        return None if fresh is None else _like(response, fresh)

    async def async_post_call_failure_deployment_hook(
        self, request_data: Any, exception: Exception, call_type: Any, fallback_depth: int | None = None
    ) -> None:
        call = self._calls.find(request_data)
        if call is not None:
            self._calls.failed(call, refusal_of(exception))

    async def async_post_call_failure_hook(
        self, request_data: dict, original_exception: Exception, user_api_key_dict: Any, traceback_str: str | None = None
    ) -> None:
        call = self._calls.find(request_data)
        if call is not None:
            self._calls.finish(call, call.answer.outcome or "error", call.answer.error or refusal_of(original_exception))

    async def async_post_call_response_headers_hook(
        self,
        data: dict,
        user_api_key_dict: Any,
        response: Any,
        request_headers: dict | None = None,
        litellm_call_info: dict | None = None,
    ) -> dict[str, str] | None:
        call = self._calls.find(data)
        return None if call is None else headers(call)

    def _flow(self, call: Call) -> Flow:
        return Flow(self._calls, call, _ask_again, lambda data: ModelResponseStream(**data))


async def _ask_again(arguments: dict[str, Any]) -> Any:
    """The same deployment once more. Raises Refusal: LiteLLM's errors would hide what the first answer was refused for."""
    try:
        return await litellm.acompletion(**arguments)
    except Exception as error:  # litellm raises provider classes without a common base
        raise refusal_of(error) from None


def _exception(refusal: Refusal, call: Call) -> Exception:
    """A refusal as LiteLLM raises its own, so that its proxy writes the error in the client's dialect."""
    about = {"message": refusal.text, "model": call.turn.model, "llm_provider": ""}
    kind = EXCEPTIONS.get(refusal.status)
    if kind is None:
        return litellm.APIError(status_code=refusal.status, **about)
    return kind(**about)


def _like(response: Any, data: dict[str, Any]) -> Any:
    """`data` in the class LiteLLM goes on with, keeping what LiteLLM notes beside an answer."""
    if isinstance(response, dict):
        return data | {k: v for k, v in response.items() if k.startswith("_")}
    fresh = ModelResponse(**data) if isinstance(response, ModelResponse) else ResponsesAPIResponse(**data)
    hidden = getattr(response, "_hidden_params", None)
    if hidden is not None:
        fresh._hidden_params = hidden
    return fresh


def headers(call: Call) -> dict[str, str]:
    """What the gateway's own answers carry: the request's id and the decisions so far."""
    names = ",".join(dict.fromkeys(f"{d.stage}.{d.rule}" for d in (*call.turn.decisions, *call.answer.decisions)))
    return {"x-moorage-request-id": call.turn.id, "x-moorage-decisions": names.encode("ascii", "replace").decode()[:2048]}


def __getattr__(name: str) -> Any:
    """`moorage`, made when LiteLLM asks for it: importing this file must not open files."""
    if name != "moorage":
        raise AttributeError(name)
    path = os.environ.get(CONFIG_VARIABLE)
    config = config_file.load(path)
    for warning in config.warnings:
        log.warning("%s", warning)
    log.info("moorage: policies of %s, records in %s", config.source, config.records.path or "no file")
    globals()[name] = made = Moorage(config)
    return made
