"""`POST /v1/chat/completions`: answers whole or as server-sent events, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from engine.api import account, generation
from engine.api.answer import Choice, LogprobWriter, message_of, usage_of
from engine.api.errors import bad_request, json_response
from engine.api.plan import ChatPlan, plan_chat
from engine.api.requests import ChatRequest, check_ranges, convert, read_body, sampling_of, stops_of
from engine.api.service import Service
from engine.api.transport import DONE, EventStream, TextEvent, begun, event, while_connected
from engine.ipc import Generate, token_array
from engine.text.detokenizer import Detokenizer
from engine.text.parser import OutputParser
from engine.text.stops import StopMatcher
from engine.text.stream import CallArguments, CallStart, Event, Text, Thought
from engine.text.text_model import TextModel


@dataclass(frozen=True)
class Turn:
    """One chat request on its way."""

    service: Service
    text: TextModel
    request: ChatRequest
    plan: ChatPlan
    id: str
    created: int
    choices: list[Choice]
    work: list[tuple[Generate, Choice]]

    @property
    def streaming_usage(self) -> bool:
        return bool(self.request.stream_options and self.request.stream_options.include_usage)


async def chat(http: Request, service: Service) -> Any:
    body = await read_body(http)
    request, ignored = convert(body, ChatRequest)
    service.check_model(request.model)
    check_ranges(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if request.max_tokens == 0:
        raise bad_request("max_tokens must be at least 1", "max_tokens")
    stops = stops_of(request)
    text = service.ready()
    limit = service.engine.state.max_context
    plan = await asyncio.get_running_loop().run_in_executor(
        service.text_thread, plan_chat, text, request, body, ignored, service.calls, limit
    )
    service.continuations.request_arrived(plan.session)
    turn = _turn(service, text, request, plan, stops)
    account.planned(service, plan.notes, plan.prompt.dropped_anchors)
    headers = plan.notes.headers()
    if not request.stream:
        return json_response(await while_connected(http.receive, _whole(turn)), headers=headers)
    events = await begun(_events(turn), service.refusal_s)
    return EventStream(events, headers, lambda: account.gone(service, turn.id), service.keep_alive_s)


def _turn(service: Service, text: TextModel, request: ChatRequest, plan: ChatPlan, stops: list[str]) -> Turn:
    ident = f"chatcmpl-{secrets.token_hex(12)}"
    choices, work = [], []
    for index in range(request.n or 1):
        parser = OutputParser(text.output, opened=plan.opened, tools=plan.tools or None)
        choice = Choice(
            index, Detokenizer(text.tokenizer, text.kept_ids), StopMatcher(stops), parser, request.parallel_tool_calls is False
        )
        choices.append(choice)
        generate = Generate(
            id=f"{ident}-{index}",
            tokens=token_array(plan.tokens),
            max_new=plan.max_new,
            sampling=sampling_of(request, service.engine.state.vocab, plan.banned, index),
            stop_ids=() if request.ignore_eos else text.stop_ids,
            min_new=min(request.min_tokens or 0, plan.max_new),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            thinking=plan.thinking,
            grammar=plan.grammar,
            anchors=plan.prompt.anchors,
            starts=plan.prompt.starts,
            session=plan.session,
            priority=plan.hints.priority,
        )
        work.append((generate, choice))
    return Turn(service, text, request, plan, ident, int(time.time()), choices, work)


async def _whole(turn: Turn) -> dict[str, Any]:
    for choice in turn.choices:
        choice.prime(turn.plan.forced)
    entries: dict[int, list[dict[str, Any]]] = {c.index: [] for c in turn.choices}
    writer = LogprobWriter(turn.text.tokenizer)
    async for update in generation.run(turn.service.engine, turn.work, turn.service.metrics):
        entries[update.choice.index] += map(writer.chat, update.piece.logprobs)
        if update.ended:
            _ended(turn, update.choice)
    usage = usage_of(len(turn.plan.tokens), turn.choices)
    account.usage(turn.service, usage)
    return {
        "id": turn.id,
        "object": "chat.completion",
        "created": turn.created,
        "model": turn.service.model,
        "choices": [
            {
                "index": c.index,
                "message": message_of(c.said),
                "logprobs": {"content": entries[c.index]} if turn.request.logprobs else None,
                "finish_reason": c.finish,
                "stop_reason": c.stop_reason,
            }
            for c in turn.choices
        ],
        "usage": usage,
    }


def _ended(turn: Turn, choice: Choice) -> None:
    account.ended(turn.service, choice, turn.id, turn.plan.thinking_off)
    for call_id, arguments in choice.arguments():
        turn.service.calls.remember(call_id, arguments)
    if len(turn.choices) == 1 and not turn.request.continue_final_message:  # the next turn joins the two parts of the answer
        turn.service.continuations.answer_ended(turn.text, turn.plan, choice, turn.id)


async def _events(turn: Turn) -> AsyncGenerator[bytes, None]:
    writer = LogprobWriter(turn.text.tokenizer)
    plain = [_Plain(turn, choice.index) for choice in turn.choices]
    async for update in generation.run(turn.service.engine, turn.work, turn.service.metrics):
        choice, piece, chunks = update.choice, update.piece, []
        if update.started:
            chunks.append(_chunk(turn, choice.index, {"role": "assistant", "content": ""}))
            piece = choice.prime(turn.plan.forced)
        if piece.logprobs:
            deltas = [_delta(e) for e in piece.events] or [{}]  # a token whose text is held back still has a logprob
            logprobs = {"content": [writer.chat(entry) for entry in piece.logprobs]}
            chunks += [_chunk(turn, choice.index, delta, None if i else logprobs) for i, delta in enumerate(deltas)]
        else:
            chunks += map(plain[choice.index], piece.events)
        if update.ended:
            _ended(turn, choice)
            chunks.append(_chunk(turn, choice.index, {}, finish=choice.finish, stop_reason=choice.stop_reason))
        if chunks:
            yield b"".join(chunks)  # one write for all that a token brings
    usage = usage_of(len(turn.plan.tokens), turn.choices)
    account.usage(turn.service, usage)
    yield (event({**_head(turn), "choices": [], "usage": usage}) if turn.streaming_usage else b"") + DONE


class _Plain:
    """Events of one choice without logprobs."""

    def __init__(self, turn: Turn, index: int) -> None:
        self._turn, self._index = turn, index
        self._text = TextEvent(lambda text: _chunk(turn, index, {"content": text}))
        self._thought = TextEvent(lambda text: _chunk(turn, index, {"reasoning_content": text}))

    def __call__(self, one: Event) -> bytes:
        if isinstance(one, Text):
            return self._text(one.text)
        if isinstance(one, Thought):
            return self._thought(one.text)
        return _chunk(self._turn, self._index, _delta(one))


def _head(turn: Turn) -> dict[str, Any]:
    return {"id": turn.id, "object": "chat.completion.chunk", "created": turn.created, "model": turn.service.model}


def _chunk(turn: Turn, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}
    body = {**_head(turn), "choices": [choice]}
    if turn.streaming_usage:
        body["usage"] = None
    return event(body)


def _delta(one: Event) -> dict[str, Any]:
    match one:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    raise AssertionError(f"unknown event {one}")
