"""One request inside a LiteLLM proxy as the gateway sees it: which policies hold, what they change, what is recorded.

LiteLLM calls a plugin several times for one request. A `Call` is what is known between those moments, found again by an id in
LiteLLM's own metadata. The stages are the gateway's, in the gateway's order; only reading the body and limits are LiteLLM's here.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from engine.protocol import HINTS_FIELD, log_line
from gateway import anchors, sessions, toolcheck
from gateway.answer import Answer, Attempt
from gateway.config import Config, Deployment
from gateway.config_file import PLAIN_OPENAI
from gateway.dialects.base import Dialect
from gateway.dialects.chat import Chat, breakpoints, check_messages
from gateway.dialects.messages import Messages
from gateway.dialects.responses import Responses
from gateway.edits import ABSENT, edits, look
from gateway.errors import Refusal, UpstreamError
from gateway.filters import AnswerFilter
from gateway.learning import Learning
from gateway.plugin.read_answers import plain
from gateway.policy import clamp, thinking, thinking_watch
from gateway.policy.normalise import Normaliser
from gateway.records import RecordWriter, record
from gateway.store import MemoryStore
from gateway.toolcheck_watch import ToolCheck
from gateway.turn import Caller, Decision, Received, Thinking, Turn, new_id
from gateway.upstream.base import prepare

log = logging.getLogger("moorage")

# LiteLLM's call type -> what the client speaks. Others (embeddings, images, ...) are not the plugin's business.
DIALECTS: dict[str, Dialect] = {
    "acompletion": Chat(),
    "completion": Chat(),
    "anthropic_messages": Messages(),
    "aresponses": Responses(),
    "responses": Responses(),
}
CHAT_CALLS = frozenset({"acompletion", "completion"})
ID_FIELD = "moorage_call"  # in LiteLLM's metadata
METADATA = ("litellm_metadata", "metadata")
# Calls known at once. A proxy serves tens to hundreds; a call that is never finished must not stay for ever.
KEEP_CALLS = 4096
# LiteLLM's keyword arguments that are parameters of the chat body. `metadata` is LiteLLM's own book-keeping there.
BODY_KEYS = clamp.KNOWN - {"model", "metadata", HINTS_FIELD}
# The one parameter of Responses that has another name than in chat completions and a rule of its own.
LENGTHS = {"responses": "max_output_tokens"}


@dataclass(slots=True)
class Call:
    """`translated`: LiteLLM made a chat completion of it and the client's dialect is one that can be written again here."""

    turn: Turn
    answer: Answer
    base: Turn  # as it began, before any attempt
    refused: str = ""  # why the gateway's own reader does not take this request; its answer is then left alone
    translated: bool = False
    asked: dict[str, Any] = field(default_factory=dict)  # LiteLLM's keyword arguments of the newest attempt
    native: list[Decision] = field(default_factory=list)  # made before LiteLLM translated the request
    done: bool = False

    @property
    def watched(self) -> bool:
        """May the answer be held, changed and written again?"""
        return self.translated and not self.refused


class Calls:
    """The plugin's half that knows no litellm. `config` gives policies and records; the rest of it is LiteLLM's to do."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._records = RecordWriter(config.records) if config.records.path else None
        self._learning = Learning()
        self._normalise = Normaliser(MemoryStore())
        self._tools = ToolCheck()
        self._calls: OrderedDict[str, Call] = OrderedDict()

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    # --- a request's life

    def begin(self, call_type: str, data: dict[str, Any], key: str) -> Call | None:
        """The call that starts with LiteLLM's request `data`; marks it in its metadata. None for other kinds of calls."""
        dialect = DIALECTS.get(call_type)
        if dialect is None:
            return None
        request = data.get("proxy_server_request") or {}
        body = client_body(request.get("body") or data)
        headers = {str(k).lower(): str(v) for k, v in (request.get("headers") or {}).items()}
        received = Received(route=_route(request, dialect), headers=headers, body=orjson.dumps(body, default=str))
        turn = Turn(
            id=new_id(), received=received, dialect=dialect, caller=Caller(key or "anonymous"), model=str(data.get("model"))
        )
        refused = ""
        try:
            # For what the answer's writer must know; what this reading decides is not what LiteLLM sends.
            turn = dialect.read(turn).but(decisions=())
        except Refusal as refusal:  # LiteLLM may well serve it: pictures, stored responses
            refused = refusal.text
            turn = turn.decide(Decision("litellm", "unread", f"the answer is passed on unchecked: {refused}"))
        turn = turn.but(stream=bool(data.get("stream")), policy=self._config.policy(turn.model, turn.caller.key, received.route))
        call = Call(turn=turn, base=turn, answer=Answer(received.started), refused=refused)
        self._calls[turn.id] = call
        while len(self._calls) > KEEP_CALLS:
            lost = next(iter(self._calls.values()))
            log.warning("request %s never ended; its record is written as it stands", lost.turn.id)
            self.end(lost)
        name = next((m for m in METADATA if isinstance(data.get(m), dict)), METADATA[1])
        data[name] = (data.get(name) or {}) | {ID_FIELD: turn.id}
        return call

    def find(self, data: Mapping[str, Any]) -> Call | None:
        """The call that LiteLLM's keyword arguments or request data belong to."""
        for name in METADATA:
            holder = data.get(name)
            if isinstance(holder, dict) and holder.get(ID_FIELD) in self._calls:
                return self._calls[holder[ID_FIELD]]
        return None

    def end(self, call: Call) -> None:
        """The response is over, or its client has left. Without a `finish` before it the request was cancelled."""
        self.finish(call, "cancelled")
        self._calls.pop(call.turn.id, None)

    def failed(self, call: Call, error: Refusal) -> None:
        """An attempt of LiteLLM's ended in an error; LiteLLM may make another one."""
        if call.answer.attempts and not call.answer.attempts[-1].error:
            attempt = call.answer.attempts[-1]
            attempt.error, attempt.status, attempt.seconds = error, error.status, time.perf_counter() - attempt.at

    def finish(self, call: Call, outcome: str, error: Refusal | None = None) -> None:
        """Write the record, once. Whatever LiteLLM logs for this request, this is what happened."""
        if call.done:
            return
        call.done = True
        call.answer.end(outcome, error)
        call.answer.status = call.answer.status or (error.status if error else 200 if outcome == "ok" else 0)
        if call.answer.attempts and not call.answer.attempts[-1].error:
            call.answer.attempts[-1].seconds = time.perf_counter() - call.answer.attempts[-1].at
        if self._records is not None and not self._records.put(record(call.turn, call.answer)):
            log.warning("records: queue full, the record of %s was dropped", call.turn.id)
        decisions = ",".join(f"{d.stage}.{d.rule}" for d in (*call.turn.decisions, *call.answer.decisions))
        said = {"outcome": outcome, "model": call.turn.model, "decisions": decisions or None, "req": call.turn.id}
        log.info(log_line("request", **said, error=error.text if error else None))

    # --- the request

    async def ask(self, call: Call, call_type: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        """LiteLLM's keyword arguments for one attempt, with every policy applied. Raises Refusal.

        A request that LiteLLM translates comes here first in the client's dialect and then as a chat completion.
        """
        if call_type in CHAT_CALLS and "messages" in kwargs:
            return await self._chat(call, kwargs)
        return self._native(call, kwargs)

    def _native(self, call: Call, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Not translated yet, and perhaps never: bounds and thinking hold in the client's own words."""
        length = LENGTHS.get("responses" if "input" in kwargs else "", "max_tokens")
        body = {("max_tokens" if k == length else k): v for k, v in kwargs.items() if k in BODY_KEYS or k == length}
        decisions = clamp.decide(body, call.turn.policy.clamp)
        now, said = thinking.resolve(self._said(call), call.turn.policy.thinking)
        decisions += said
        if said:
            decisions += (_native_spelling(body, now, "input" in kwargs),)
        fresh = Turn(id="", received=call.turn.received, dialect=call.turn.dialect, body=body).decide(*decisions).body
        call.native += [d for d in decisions if d not in call.native]
        call.turn = call.base.decide(*(_noted(d) for d in call.native)).but(thinking=now)
        rest = {k: v for k, v in kwargs.items() if k not in body and k != length}
        return rest | {(length if k == "max_tokens" else k): v for k, v in fresh.items()}

    async def _chat(self, call: Call, kwargs: dict[str, Any]) -> dict[str, Any]:
        """As a chat completion: every stage of the gateway, in its order."""
        turn = call.base
        # Vendor fields that only this client knows belong to the body too, but only chat clients send them under chat names.
        own = set(turn.parsed) - {"model", "metadata"} if turn.dialect.name == "chat" else set()
        body = {k: v for k, v in kwargs.items() if v is not None and (k in BODY_KEYS or k in own)}
        raw = orjson.dumps(body | {"model": kwargs["model"]}, default=plain)
        body = orjson.loads(raw)
        check_messages(body.get("messages"))
        stream = bool(body.get("stream"))
        turn = turn.but(decisions=()).start(raw, body, turn.model, stream, *turn.decisions, *map(_noted, call.native))
        turn = turn.but(breakpoints=breakpoints(body) or _same_places(call.base, body))
        turn = self._session(turn)
        turn = clamp.stage(turn)
        now, said = thinking.resolve(self._said(call, turn.body), turn.policy.thinking)
        turn = turn.but(thinking=now).decide(*(d for d in said if d not in call.native))
        turn = await self._normalise.stage(turn)
        turn = toolcheck.history(turn)
        turn = self._learning.stage(anchors.stage(turn))
        self._learning.learn(turn)
        deployment = _deployment(turn.model, kwargs)
        turn, sent = prepare(turn, deployment)
        call.turn, call.translated = turn, True
        call.answer.attempts.append(Attempt(deployment, sent, time.perf_counter(), status=200))
        hints = {HINTS_FIELD: msgspec.to_builtins(turn.hints)} if deployment.kind == "engine" else {}
        rest = {k: v for k, v in kwargs.items() if k not in body}
        call.asked = rest | {k: v for k, v in turn.body.items() if k != "model"} | {"model": kwargs["model"]} | hints
        return call.asked

    def again(self, call: Call, *decisions: Decision) -> dict[str, Any]:
        """The keyword arguments that ask the same deployment once more, with `decisions` made."""
        call.turn = call.turn.decide(*decisions)
        asked = {k: v for k, v in call.asked.items() if k not in ("litellm_logging_obj", "litellm_call_id")}
        for name in METADATA:
            if isinstance(asked.get(name), dict):
                asked[name] = {k: v for k, v in asked[name].items() if k != ID_FIELD}
        gone = [k for k in asked if k in BODY_KEYS and k not in call.turn.body]
        fresh = {k: v for k, v in call.turn.body.items() if k != "model"}
        last = call.answer.attempts[-1]
        sent = orjson.dumps(call.turn.body)
        call.answer.attempts.append(Attempt(last.deployment, sent, time.perf_counter(), status=200))
        return {k: v for k, v in asked.items() if k not in gone} | fresh

    def _session(self, turn: Turn) -> Turn:
        """Whose conversation: the client's own fields say it, also those that the translation left behind."""
        client = orjson.loads(turn.received.body)
        names = {k: client[k] for k in ("metadata", "user", "prompt_cache_key", HINTS_FIELD) if k in client}
        seen = turn.but(decisions=()).start(turn.raw, dict(turn.body) | names, turn.model, turn.stream)
        return turn.but(session=sessions.stage(seen).session)

    def _said(self, call: Call, chat: Mapping[str, Any] | None = None) -> Thinking:
        """What the client said of thinking, in its own body first: translations lose `disabled`."""
        said = thinking.read(orjson.loads(call.turn.received.body))
        return said if said.mode is not None or chat is None else thinking.read(chat)

    # --- the answer

    def filters(self, call: Call) -> list[AnswerFilter]:
        """What looks into the answer, in the gateway's order. What LiteLLM asks usage for is LiteLLM's to strip."""
        makers = (thinking_watch.watch, self._tools.watch)
        return [f for make in makers if (f := make(call.turn, call.answer)) is not None] if call.watched else []


def client_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body as the client sent it: without what LiteLLM put in, which includes its keys."""
    out = {k: v for k, v in body.items() if k not in ("litellm_metadata", "proxy_server_request", "secret_fields")}
    out = {k: v for k, v in out.items() if not k.startswith(("litellm_", "_litellm"))}
    metadata = out.get("metadata")
    if isinstance(metadata, dict) and ("headers" in metadata or "user_api_key" in metadata):
        theirs = metadata.get("requester_metadata")
        out.pop("metadata")
        if isinstance(theirs, dict) and theirs:
            out["metadata"] = theirs
    return out


def refusal_of(error: BaseException) -> UpstreamError:
    """LiteLLM's exception as ours: first line only."""
    status = getattr(error, "status_code", None)
    status = status if isinstance(status, int) and 400 <= status < 600 else 502
    text = next(iter(str(getattr(error, "message", "") or error).splitlines()), "") or type(error).__name__
    return UpstreamError(status, text, kind="status", retryable=False)


def _route(request: Mapping[str, Any], dialect: Dialect) -> str:
    """`/v1/...`: LiteLLM serves its routes with and without /v1, policies are written for one form."""
    path = "/" + str(request.get("url") or "").partition("://")[2].partition("/")[2].partition("?")[0]
    usual = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}[dialect.name]
    return path if path.startswith("/v1/") else usual


def _deployment(serves: str, kwargs: Mapping[str, Any]) -> Deployment:
    """Where LiteLLM is about to send it. `model_info: {moorage: true}` in LiteLLM's file says that it is our engine."""
    provider, _, name = str(kwargs.get("model")).partition("/")
    provider = str(kwargs.get("custom_llm_provider") or (provider if name else ""))
    info = kwargs.get("model_info") or {}
    base = str(kwargs.get("api_base") or "")
    kind = "provider"
    if info.get("moorage"):
        kind = "engine"
    elif provider in PLAIN_OPENAI and (base or provider == "openai"):
        kind = "openai"
    return Deployment(
        name=str(info.get("id") or serves)[:40],
        serves=serves,
        kind=kind,
        model=str(kwargs.get("model")),
        api_base=base or ("https://api.openai.com/v1" if kind == "openai" else ""),
    )


def _native_spelling(body: Mapping[str, Any], now: Thinking, responses: bool) -> Decision:
    """A policy's thinking in the words of Messages or Responses."""
    if responses:
        word = "none" if now.mode == "off" else now.effort or "medium"
        change = edits(body, (("reasoning", "effort"), word))
    elif now.mode == "off":
        change = edits(body, (("thinking",), {"type": "disabled"}))
    else:
        # Anthropic takes a budget only; half of the answer is what its own clients use when they say no number.
        budget = now.budget or max(1024, int(body.get("max_tokens") or 2048) // 2)
        change = edits(body, (("thinking",), {"type": "enabled", "budget_tokens": budget}))
    return Decision("thinking", "spell", f"{now} ({now.source})", change)


def _noted(decision: Decision) -> Decision:
    """A decision whose edits are in LiteLLM's arguments already; they must not be made once more."""
    return Decision(decision.stage, decision.rule, decision.reason)


def _same_places(read: Turn, body: Mapping[str, Any]) -> tuple[Any, ...]:
    """The marks found by our own reader, where LiteLLM's translation has the same messages at the same places."""
    ours, theirs = look(read.parsed, ("messages",)), body["messages"]
    if ours is ABSENT or [m.get("role") for m in ours] != [m.get("role") for m in theirs]:
        return ()
    return read.breakpoints
