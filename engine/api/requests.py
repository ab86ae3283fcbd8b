"""Request bodies -> typed values. Every wrong field is named; every field that nothing reads is reported."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from engine.api.errors import ApiError, bad_request
from engine.api.transport import ClientGone
from engine.ipc import Sampling
from engine.protocol import HINTS_FIELD, Hints

# A 1M-token conversation is about 5 MB of JSON; this leaves room for escapes and tool schemas.
MAX_BODY = 64 << 20
MAX_CHOICES = 64  # n times the number of prompts: each is a sequence in the engine's queue
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 100  # OpenAI allows 20; comparing logits between engines wants more

Number = float | int


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class CommonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both endpoints. None = not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    seed: int | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    moorage: dict[str, Any] | None = None


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    messages: Any
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prompt_cache_key: str | None = None
    # the spellings of thinking; engine.text.thinking reads them from the raw body
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | bool | str | None = None
    think: bool | str | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    output_config: dict[str, Any] | None = None


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    prompt: str | list[Any] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError: 413 when too large, 400 when it is no JSON object; ClientGone."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY:
        raise _too_large()
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY:
                raise _too_large()
    except ClientDisconnect:
        raise ClientGone from None
    try:
        body = msgspec.json.decode(bytes(data))
    except (msgspec.DecodeError, RecursionError) as e:
        raise bad_request(f"the request body is not valid JSON: {e}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise bad_request("the request body is not valid UTF-8", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("the request body must be a JSON object", code="invalid_json")
    return body


def _too_large() -> ApiError:
    return ApiError(413, f"the request body is larger than the limit of {MAX_BODY >> 20} MiB", "body_too_large")


_KINDS = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "true or false", "object": "an object",
          "array": "a list"}  # fmt: skip
_AT = re.compile(r" - at `\$\.?(.*?)`$")


def convert(body: dict[str, Any], kind: type[Any]) -> tuple[Any, list[str]]:
    """(typed request, names of ignored fields). Raises ApiError naming the field of a wrong type."""
    known = set(kind.__struct_fields__)
    ignored = sorted(key for key, value in body.items() if key not in known and value is not None)
    options = body.get("stream_options")
    if isinstance(options, dict):
        ignored += sorted(f"stream_options.{key}" for key in options if key not in StreamOptions.__struct_fields__)
    try:
        return msgspec.convert({k: v for k, v in body.items() if k in known}, kind), ignored
    except msgspec.ValidationError as e:
        text = str(e)
        at = _AT.search(text)
        param = re.sub(r"\[\.\.\.\]", "", at[1]) if at else None
        missing = re.search(r"missing required field `(\w+)`", text)
        if missing:
            raise bad_request(f"{missing[1]} is required", missing[1], "missing_field") from None
        what = _AT.sub("", text).replace("`", "").replace("Expected ", "must be ")
        what = re.sub(r"\b(str|int|float|bool|object|array)\b", lambda m: _KINDS[m[1]], what.replace(" | ", " or "))
        raise bad_request(f"{param or 'the body'} {what}", param, "wrong_type") from None


def hints_of(request: CommonRequest) -> Hints:
    if request.moorage is None:
        return Hints()
    try:
        return msgspec.convert(request.moorage, Hints)
    except msgspec.ValidationError as e:
        raise bad_request(f"{HINTS_FIELD}: {e}", HINTS_FIELD, "wrong_type") from None


# name -> (lowest, highest); inclusive
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 1 << 31),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "max_tokens": (0, 1 << 31),
    "max_completion_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "n": (1, MAX_CHOICES),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
}


def check_ranges(request: CommonRequest) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(request, name, None)
        if value is not None and not isinstance(value, bool) and not low <= value <= high:
            raise bad_request(f"{name} must be between {low} and {high}, got {value}", name)


def sampling_of(request: CommonRequest, vocab: int, banned: tuple[int, ...], choice: int) -> Sampling:
    """Sampling of one choice. A given seed is made different for each choice, or all n answers would be the same."""

    def value(given: Number | None, default: float) -> float:
        return default if given is None else float(given)

    seed = None if request.seed is None else (request.seed + choice) & (2**63 - 1)
    return Sampling(
        temperature=value(request.temperature, 1.0),
        top_k=max(request.top_k or 0, 0),
        top_p=value(request.top_p, 1.0),
        min_p=value(request.min_p, 0.0),
        seed=seed,
        repetition_penalty=value(request.repetition_penalty, 1.0),
        presence_penalty=value(request.presence_penalty, 0.0),
        frequency_penalty=value(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias, vocab),
        banned=banned,
    )


def _logit_bias(given: dict[str, Number] | None, vocab: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, bias in (given or {}).items():
        if not key.isascii() or not key.isdigit() or int(key) >= vocab:
            raise bad_request(f"logit_bias: {key!r} is no token id of this model (0 to {vocab - 1})", "logit_bias")
        if not -100 <= bias <= 100:
            raise bad_request(f"logit_bias[{key}] must be between -100 and 100, got {bias}", "logit_bias")
        out[int(key)] = float(bias)
    return out


def stops_of(request: CommonRequest) -> list[str]:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop holds {len(stops)} strings, at most {MAX_STOPS} are allowed", "stop")
    if any(not s for s in stops):
        raise bad_request("stop must not hold an empty string", "stop")
    return stops
