"""`POST /v1/completions`: raw text or token prompts, with logprobs and echo, so that logits can be compared from outside."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from engine.api import account, generation
from engine.api.answer import Choice, LogprobWriter, TextOffsets, usage_of
from engine.api.errors import bad_request, json_response
from engine.api.plan import Notes, counted, limit_new, too_long
from engine.api.requests import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    CompletionRequest,
    check_ranges,
    convert,
    hints_of,
    read_body,
    sampling_of,
    stops_of,
)
from engine.api.service import Service
from engine.api.transport import DONE, EventStream, TextEvent, begun, event, while_connected
from engine.ipc import Generate, TokenLogprob, token_array
from engine.text.detokenizer import Detokenizer
from engine.text.stops import StopMatcher
from engine.text.stream import Text
from engine.text.text_model import TextModel
from engine.text.tokenizer import Tokenizer, TooLong

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint


@dataclass(frozen=True)
class Job:
    service: Service
    text: TextModel
    request: CompletionRequest
    prompts: list[list[int]]
    work: list[tuple[Generate, Choice]]
    id: str
    created: int
    offsets: dict[int, TextOffsets]

    def prompt_of(self, choice: Choice) -> list[int]:
        return self.prompts[choice.index // (self.request.n or 1)]


async def completions(http: Request, service: Service) -> Any:
    body = await read_body(http)
    request, ignored = convert(body, CompletionRequest)
    service.check_model(request.model)
    check_ranges(request)
    _check(request)
    stops = stops_of(request)
    text = service.ready()
    loop = asyncio.get_running_loop()
    state = service.engine.state
    arguments = (text.tokenizer, request, state.vocab, state.max_context)
    prompts = await loop.run_in_executor(service.text_thread, prompts_of, *arguments)
    notes = Notes(ignored=ignored)
    job = _job(service, text, request, prompts, stops, notes)
    account.planned(service, notes)
    if not request.stream:
        return json_response(await while_connected(http.receive, _whole(job)), headers=notes.headers())
    events = await begun(_events(job), service.refusal_s)
    return EventStream(events, notes.headers(), lambda: account.gone(service, job.id), service.keep_alive_s)


def _check(request: CompletionRequest) -> None:
    if request.suffix:
        raise bad_request("suffix is not supported: this engine completes, it does not fill in", "suffix", "not_supported")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request("best_of other than n is not supported", "best_of", "not_supported")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_TOP_LOGPROBS:
        raise bad_request(f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}", "logprobs")
    if request.max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens 0 makes sense with echo only", "max_tokens")


def prompts_of(tokenizer: Tokenizer, request: CompletionRequest, vocab: int, max_context: int) -> list[list[int]]:
    """A text, a token list, or a list of either. Raises ApiError naming `prompt`."""
    given = request.prompt
    if given is None:
        raise bad_request("prompt is required", "prompt", "missing_field")
    many = given if isinstance(given, list) and not _is_tokens(given) else [given]
    if not many or len(many) * (request.n or 1) > MAX_CHOICES:
        raise bad_request(f"prompt must hold between 1 and {MAX_CHOICES} prompts (times n)", "prompt")
    out = []
    for one in many:
        if isinstance(one, str):
            try:
                tokens = tokenizer.encode(one, request.add_special_tokens, counted(max_context))
            except TooLong as e:
                raise too_long(str(e), max_context, "prompt") from None
        elif isinstance(one, list) and _is_tokens(one):
            tokens = one
        else:
            raise bad_request("prompt must be a string, a list of token ids, or a list of either", "prompt", "wrong_type")
        bad = next((t for t in tokens if not 0 <= t < vocab), None)
        if bad is not None:
            raise bad_request(f"prompt holds the token id {bad}; this model has ids 0 to {vocab - 1}", "prompt")
        if not tokens:
            if tokenizer.bos_id is None:
                raise bad_request("prompt must hold at least one token", "prompt")
            tokens = [tokenizer.bos_id]  # as other engines do for an empty prompt
        if len(tokens) >= max_context:
            raise too_long(f"{len(tokens)} tokens", max_context, "prompt")
        out.append(tokens)
    return out


def _is_tokens(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def _job(
    service: Service, text: TextModel, request: CompletionRequest, prompts: list[list[int]], stops: list[str], notes: Notes
) -> Job:
    ident = f"cmpl-{secrets.token_hex(12)}"
    hints = hints_of(request)
    asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    scored = request.logprobs if request.echo else None
    work: list[tuple[Generate, Choice]] = []
    for number, tokens in enumerate(prompts):
        max_new = limit_new(asked, len(tokens), service.engine.state.max_context, notes, "prompt") if asked else 0
        for k in range(request.n or 1):
            index = number * (request.n or 1) + k
            choice = Choice(index, Detokenizer(text.tokenizer), StopMatcher(stops), None)
            generate = Generate(
                id=f"{ident}-{index}",
                tokens=token_array(tokens),
                max_new=max_new,
                sampling=sampling_of(request, service.engine.state.vocab, (), k),
                stop_ids=() if request.ignore_eos else text.stop_ids,
                min_new=min(request.min_tokens or 0, max_new),
                logprobs=request.logprobs,
                prompt_logprobs=scored,
                session=hints.session,
                priority=hints.priority,
            )
            work.append((generate, choice))
    offsets = {choice.index: TextOffsets(text.tokenizer) for _, choice in work}
    return Job(service, text, request, prompts, work, ident, int(time.time()), offsets)


@dataclass
class _Part:
    """Text and scored tokens that one update adds to a choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    entries: list[TokenLogprob | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, other: _Part) -> None:
        self.text += other.text
        self.tokens = self.tokens + other.tokens
        self.entries = self.entries + other.entries
        self.offsets = self.offsets + other.offsets


def _part(job: Job, update: generation.Update) -> _Part:
    choice, piece = update.choice, update.piece
    if update.started:
        if not job.request.echo:
            return _Part()
        tokens = job.prompt_of(choice)
        text = job.text.tokenizer.decode(tokens)
        if update.prompt_logprobs is None:
            return _Part(text)
        return _Part(text, tokens, [None, *update.prompt_logprobs], job.offsets[choice.index].prompt(tokens))
    text = "".join(e.text for e in piece.events if isinstance(e, Text))
    if not piece.logprobs:
        return _Part(text)
    return _Part(text, piece.tokens, list(piece.logprobs), [job.offsets[choice.index].answer(t) for t in piece.tokens])


def _logprobs(job: Job, part: _Part) -> dict[str, Any] | None:
    if job.request.logprobs is None:
        return None
    return LogprobWriter(job.text.tokenizer).legacy(part.entries, part.tokens, part.offsets)


async def _whole(job: Job) -> dict[str, Any]:
    parts = {choice.index: _Part() for _, choice in job.work}
    async for update in generation.run(job.service.engine, job.work, job.service.metrics):
        parts[update.choice.index].add(_part(job, update))
        if update.ended:
            account.ended(job.service, update.choice, job.id, False)
    choices = [choice for _, choice in job.work]
    usage = usage_of(sum(map(len, job.prompts)), choices)
    account.usage(job.service, usage)
    return {
        "id": job.id,
        "object": "text_completion",
        "created": job.created,
        "model": job.service.model,
        "choices": [
            {
                "index": c.index,
                "text": parts[c.index].text,
                "logprobs": _logprobs(job, parts[c.index]),
                "finish_reason": c.finish,
                "stop_reason": c.stop_reason,
            }
            for c in choices
        ],
        "usage": usage,
    }


async def _events(job: Job) -> AsyncGenerator[bytes, None]:
    with_usage = bool(job.request.stream_options and job.request.stream_options.include_usage)
    head = {"id": job.id, "object": "text_completion", "created": job.created, "model": job.service.model}

    def chunk(choice: Choice, part: _Part, finish: str | None) -> bytes:
        logprobs = _logprobs(job, part)
        one = {"index": choice.index, "text": part.text, "logprobs": logprobs, "finish_reason": finish}
        body = {**head, "choices": [one | ({"stop_reason": choice.stop_reason} if finish else {})]}
        return event({**body, "usage": None} if with_usage else body)

    plain = None
    if job.request.logprobs is None:
        plain = [TextEvent(lambda text, choice=choice: chunk(choice, _Part(text), None)) for _, choice in job.work]
    async for update in generation.run(job.service.engine, job.work, job.service.metrics):
        part = _part(job, update)
        if update.ended:
            account.ended(job.service, update.choice, job.id, False)
            yield chunk(update.choice, part, update.choice.finish)
        elif plain is not None and (part.text or update.started):
            yield plain[update.choice.index](part.text)
        elif part.text or part.tokens or update.started:
            yield chunk(update.choice, part, None)
    usage = usage_of(sum(map(len, job.prompts)), [choice for _, choice in job.work])
    account.usage(job.service, usage)
    yield (event({**head, "choices": [], "usage": usage}) if with_usage else b"") + DONE
