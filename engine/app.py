"""The engine's HTTP: routes, health, metrics and control. Answers from the first moment, while the model still loads.

Owns no text and no tokens: chat and completions live in `engine.api`, the engine process is reached through the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.api.chat import chat
from engine.api.completions import completions
from engine.api.continuation import Continuations
from engine.api.errors import ApiError, bad_request, bug, json_response
from engine.api.metrics import Gauge
from engine.api.requests import convert, read_body
from engine.api.service import Engine, Service
from engine.api.transport import ClientGone
from engine.text.chat_template import TemplateError
from engine.text.messages import MessageError, normalise, normalise_tools
from engine.text.tokenizer import TooLong

log = logging.getLogger("moorage.api")

Handler = Callable[[Request, Service], Awaitable[Any]]


def create_app(engine: Engine, model: str, path: str, manage: bool = True) -> ASGIApp:
    """`model` is the name clients use, `path` the checkpoint. `manage` = start and stop the engine with the server."""
    service = Service(engine, model, path)
    service.continuations = Continuations(service)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if manage:
            await engine.start()
        loading = asyncio.create_task(service.load_text())
        try:
            yield
        finally:
            loading.cancel()
            await service.continuations.close()
            if manage:
                await engine.stop()
            service.text_thread.shutdown(wait=False, cancel_futures=True)

    routes = [
        _route("/v1/chat/completions", chat, service, "POST"),
        _route("/v1/completions", completions, service, "POST"),
        _route("/v1/models", _models, service, "GET"),
        _route("/v1/models/{model:path}", _model, service, "GET"),
        _route("/v1/tokenize", _tokenize, service, "POST"),
        _route("/v1/detokenize", _detokenize, service, "POST"),
        _route("/health", _health, service, "GET"),
        _route("/metrics", _metrics, service, "GET"),
        _route("/v1/status", _control("status"), service, "GET"),
        _route("/v1/requests", _control("requests"), service, "GET"),
        _route("/v1/cache/status", _control("cache.status"), service, "GET"),
        _route("/v1/cache/rebuild", _control("cache.rebuild"), service, "POST"),
        _route("/v1/memory/status", _control("memory.status"), service, "GET"),
        _route("/v1/experts/status", _control("experts.status"), service, "GET"),
        _route("/v1/experts/trace", _control("experts.trace"), service, "POST"),
        _route("/v1/cache/sessions/{session:path}", _control("cache.forget"), service, "DELETE"),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.state.service = service
    return app


def _route(path: str, handler: Handler, service: Service, method: str) -> Route:
    """Every outcome of a handler becomes an answer, a count and, for our own bugs, one log entry."""

    async def endpoint(http: Request) -> Any:
        try:
            response = await handler(http, service)
        except ApiError as e:
            response = e.response()
        except RecursionError:
            response = bad_request("the request body is nested too deeply", code="invalid_json").response()
        except ClientGone:
            service.metrics.disconnects.inc()
            response = Response(status_code=499)  # nobody reads it
        except Exception:
            log.exception("%s %s failed", method, path)
            response = bug().response()
        service.metrics.requests.labels(path, str(getattr(response, "status_code", 200))).inc()
        return response

    return Route(path, _Counted(request_response(endpoint), service.metrics.running), methods=[method])


@dataclass(frozen=True)
class _Counted:
    """Counts what is being answered: a stream until its last byte, not until its handler has returned."""

    answer: ASGIApp
    running: Gauge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.running.track_inprogress():
            await self.answer(scope, receive, send)


async def _http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: f"there is no {http.url.path} here", 405: f"{http.method} is not allowed on {http.url.path}"}
    return ApiError(error.status_code, text.get(error.status_code, error.detail), "not_found").response()


# --- models and health


def _card(service: Service) -> dict[str, Any]:
    state = service.engine.state
    return {
        "id": service.model,
        "object": "model",
        "created": 0,
        "owned_by": "moorage",
        "max_model_len": state.max_context or None,
        "ready": state.ready and service.text is not None,
        "details": state.model,
    }


async def _models(http: Request, service: Service) -> Response:
    return json_response({"object": "list", "data": [_card(service)]})


async def _model(http: Request, service: Service) -> Response:
    service.check_model(http.path_params["model"])
    return json_response(_card(service))


async def _health(http: Request, service: Service) -> Response:
    state = service.engine.state
    ready = state.ready and service.text is not None
    service.metrics.ready.set(ready)
    if ready:
        body = {"status": "ready", "model": service.model, "max_context": state.max_context, "restarts": state.restarts}
        return json_response(body | ({"message": state.message} if state.message else {}))
    failed = service.text_error or (state.message if state.phase == "failed" else "")
    stage = state.stage if not state.ready else "reading the tokenizer"
    status = "failed" if failed else "loading" if state.ready else state.phase
    body = {"status": status, "fraction": state.fraction, "stage": stage, "message": failed or state.message}
    return json_response(body, 503, {"retry-after": "2"})


async def _metrics(http: Request, service: Service) -> Response:
    service.metrics.ready.set(service.engine.state.ready and service.text is not None)
    body, kind = service.metrics.render()
    return Response(body, headers={"content-type": kind})


# --- tokens


MOST_COUNTED = 1 << 20  # tokens: the longest context of any model; a text that is longer by far is not counted to its end


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


async def _tokenize(http: Request, service: Service) -> Response:
    """Text, or a conversation as the model would get it, to token ids."""
    request, _ = convert(await read_body(http), TokenizeRequest)
    service.check_model(request.model)
    text = service.ready_text()

    def work() -> list[int]:
        try:
            if request.messages is None:
                if request.prompt is None:
                    raise bad_request("prompt or messages is required", "prompt", "missing_field")
                return text.tokenizer.encode(request.prompt, request.add_special_tokens, MOST_COUNTED)
            if text.builder is None or text.tool_builder is None:
                raise bad_request("this model has no chat template", "messages", "no_chat_template")
            messages = normalise(request.messages, text.thinking.close, text.part_joint).messages
            tools = normalise_tools(request.tools)
            builder = text.tool_builder if tools else text.builder
            return builder.build(messages, tools, dict(request.chat_template_kwargs or {}), most=MOST_COUNTED).tokens
        except TooLong as e:
            param = "prompt" if request.messages is None else "messages"
            raise bad_request(f"the text has {e}; up to {MOST_COUNTED} are counted", param, "context_length_exceeded") from None
        except MessageError as e:
            raise bad_request(str(e), e.param) from None
        except TemplateError as e:
            raise bad_request(f"the chat template refused the messages: {e}", "messages", "template_error") from None

    tokens = await asyncio.get_running_loop().run_in_executor(service.text_thread, work)
    limit = service.engine.state.max_context or None
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": limit})


async def _detokenize(http: Request, service: Service) -> Response:
    request, _ = convert(await read_body(http), DetokenizeRequest)
    service.check_model(request.model)
    return json_response({"prompt": service.ready_text().tokenizer.decode(request.tokens)})


# --- control


def _control(verb: str) -> Handler:
    """Pass a command to the engine process and its answer back."""

    async def handler(http: Request, service: Service) -> Response:
        args: dict[str, Any] = dict(http.path_params)
        if http.method == "POST" and http.headers.get("content-length", "0") != "0":
            args["options"] = await read_body(http)
        try:
            reply = await service.engine.control(verb, **args)
        except OverflowError:  # messages between the processes hold 64-bit numbers
            raise bad_request("a number in the command is too large") from None
        if reply.error:
            raise ApiError(reply.status if reply.status >= 400 else 500, reply.error, "control_failed")
        return json_response(reply.body)

    return handler
