"""Chat request -> everything the engine and the parser need. Decides thinking, tools and limits; speaks no HTTP."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from engine import ipc
from engine.api.constrain import answer_grammar, call_grammar, wanted_schema
from engine.api.errors import ApiError, bad_request
from engine.api.requests import ChatRequest, hints_of
from engine.protocol import Hints
from engine.text.chat_template import TemplateError
from engine.text.history import CallMemory
from engine.text.messages import MessageError, normalise, normalise_tools
from engine.text.prompt import Ending, Prompt
from engine.text.text_model import TextModel
from engine.text.thinking import ThinkingError, ThinkingRequest, wanted
from engine.text.tokenizer import TooLong


def counted(max_context: int) -> int:
    """Prompts of up to so many tokens are counted to the last one; longer ones are only told to be too long."""
    return max(2 * max_context, 1 << 14)


@dataclass
class Notes:
    """What was not done as asked; goes to headers, counters and the log."""

    ignored: list[str] = field(default_factory=list)
    clamped: list[str] = field(default_factory=list)
    not_enforced: list[str] = field(default_factory=list)
    history_repaired: int = 0  # old calls whose arguments were no JSON object

    def headers(self) -> dict[str, str]:
        parts = {
            "x-moorage-ignored": self.ignored,
            "x-moorage-clamped": self.clamped,
            "x-moorage-not-enforced": self.not_enforced,
        }
        # field names come from clients: a line break in one must not end the header
        return {k: ", ".join(v).encode("unicode_escape").decode()[:2000] for k, v in parts.items() if v}


@dataclass(frozen=True)
class ChatPlan:
    messages: list[dict[str, Any]]  # normalised, as the template got them
    template_arguments: dict[str, Any]
    prompt: Prompt
    tokens: list[int]  # the prompt, with the opening of a forced call
    max_new: int
    tools: list[dict[str, Any]]  # offered to the model and understood by the parser
    forced: str  # text of the answer that stands in the prompt already
    opened: bool  # the prompt opened a thought
    thinking_off: bool
    thinking: ipc.Thinking | None
    banned: tuple[int, ...]
    grammar: ipc.Grammar | None
    hints: Hints
    session: str
    notes: Notes


def plan_chat(text: TextModel, request: ChatRequest, body: dict[str, Any], ignored: list[str], calls: CallMemory,
              max_context: int) -> ChatPlan:  # fmt: skip
    """Raises ApiError 400 naming the field. Runs on the text thread: it renders and tokenizes."""
    if text.builder is None:
        raise bad_request("this model has no chat template; use /v1/completions", code="no_chat_template")
    notes = Notes(ignored=list(ignored))
    try:
        normal = normalise(request.messages, text.thinking.close, text.part_joint)
        tools = normalise_tools(request.tools)
        asked = wanted(body, normal.messages)
    except (MessageError, ThinkingError) as e:
        raise bad_request(str(e), e.param) from None
    notes.ignored += sorted(normal.ignored)
    notes.history_repaired = normal.repaired
    messages = [_prepared(m, text, calls, tools) for m in normal.messages]
    tools, must_call = _tool_choice(request, tools, text)
    schema = wanted_schema(request.response_format, tools)
    kwargs = _template_arguments(request, text, asked, notes)
    hints = hints_of(request)
    try:
        builder = text.builder_for(tools)
        assert builder is not None
        prompt = builder.build(messages, tools, kwargs, hints, counted(max_context), _ending(request, messages))
    except TemplateError as e:
        raise bad_request(f"the chat template refused the messages: {e}", "messages", "template_error") from None
    except TooLong as e:
        raise too_long(str(e), max_context, "messages") from None
    style = text.thinking
    opened = style.thinks and prompt.suffix.rfind(style.open) > prompt.suffix.rfind(style.close)
    off = asked.mode == "off" and (style.thinks or style.off is None)
    if off and opened:
        raise _cannot_switch_off()
    forced = _forced_call(text, must_call, opened)
    if schema is not None:
        grammar = answer_grammar(text, schema, opened)
    else:
        grammar, loose = call_grammar(text, tools, must_call, bool(forced), opened)
        notes.not_enforced += [f"tools.{name}" for name in loose]
    if must_call is not None and not forced and (grammar is None or grammar.repeat):
        notes.not_enforced.append("tool_choice")
    tokens = prompt.tokens + (_encode_forced(text, forced) if forced else [])
    max_new = limit_new(request.max_completion_tokens or request.max_tokens, len(tokens), max_context, notes, "messages")
    return ChatPlan(
        messages=messages,
        template_arguments=kwargs,
        prompt=prompt,
        tokens=tokens,
        max_new=max_new,
        tools=tools,
        forced=forced,
        opened=opened,
        thinking_off=off,
        thinking=_budget(text, asked, opened),
        banned=_banned(text) if off else (),
        grammar=grammar,
        hints=hints,
        session=hints.session or request.prompt_cache_key or "",
        notes=notes,
    )


def _ending(request: ChatRequest, messages: list[dict[str, Any]]) -> Ending:
    """vLLM's two switches: the answer may begin in the request's last message, or the template may be kept from opening one."""
    if not request.continue_final_message:
        return "nothing" if request.add_generation_prompt is False else "answer"
    if request.add_generation_prompt:
        raise bad_request("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        text = "continue_final_message needs an answer's beginning, without calls, as the last message"
        raise bad_request(text, "continue_final_message")
    return "continue"


def _cannot_switch_off() -> ApiError:
    return bad_request(
        "thinking cannot be switched off for this model: its chat template has no way to; leave the request's thinking "
        "fields out, or serve a model that can",
        "reasoning_effort",
        "thinking_cannot_be_disabled",
    )


def _prepared(message: dict[str, Any], text: TextModel, calls: CallMemory, tools: list[dict[str, Any]]) -> dict[str, Any]:
    if message["role"] == "developer" and not text.knows_developer:
        message = {**message, "role": "system"}
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [calls.restore(c, tools) for c in message["tool_calls"]]}
    return message


def _tool_choice(request: ChatRequest, tools: list[dict[str, Any]], text: TextModel) -> tuple[list[dict[str, Any]], str | None]:
    """(tools to offer, name that must be called | "" for any | None)."""
    choice = request.tool_choice
    if isinstance(choice, str) and choice not in ("auto", "none", "required", "any"):
        raise bad_request(f"tool_choice must be auto, none, required or an object, got {choice!r}", "tool_choice")
    if choice == "none":
        return [], None
    if tools and not text.shows_tools:
        raise bad_request("this model's chat template cannot offer tools; leave `tools` out", "tools", "not_supported")
    if choice in (None, "auto"):
        return tools, None
    if not tools:
        raise bad_request("tool_choice asks for a call but the request offers no tools", "tool_choice")
    if isinstance(choice, str):
        return tools, ""
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [t["function"]["name"] for t in tools]:
        raise bad_request(
            f"tool_choice names {json.dumps(name, ensure_ascii=False)}, which is not among the tools", "tool_choice"
        )
    return tools, name


def _template_arguments(request: ChatRequest, text: TextModel, asked: ThinkingRequest, notes: Notes) -> dict[str, Any]:
    """Arguments for the template: the client's own, under the one switch that thinking means for this template."""
    style = text.thinking
    own = dict(request.chat_template_kwargs or {})
    reserved = sorted(own.keys() & {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
    if reserved:
        raise bad_request(f"chat_template_kwargs must not set {', '.join(reserved)}", "chat_template_kwargs")
    for name in ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort"):
        own.pop(name, None)
    if asked.mode == "off":
        if style.off is None:
            raise _cannot_switch_off()
        return {**own, **style.off}
    if asked.mode == "on":
        if not style.thinks:
            notes.ignored += [s for s in asked.spelled if s not in notes.ignored]
        own |= style.on
    if asked.effort and style.effort:
        own["reasoning_effort"] = asked.effort
    elif asked.effort and style.thinks:
        notes.not_enforced.append("reasoning_effort")  # thinking is on, how much of it this template cannot say
    return own


def _budget(text: TextModel, asked: ThinkingRequest, opened: bool) -> ipc.Thinking | None:
    style = text.thinking
    if asked.budget is None or asked.mode != "on" or not style.thinks:
        return None
    close = text.tokenizer.id_of(style.close)
    ids = (close,) if close is not None else tuple(text.tokenizer.encode_plain(style.close))
    return ipc.Thinking(close=ids, open_at_start=opened, open=text.tokenizer.id_of(style.open), budget=asked.budget)


def _banned(text: TextModel) -> tuple[int, ...]:
    opener = text.tokenizer.id_of(text.thinking.open)
    return () if opener is None else (opener,)


def _forced_call(text: TextModel, name: str | None, opened: bool) -> str:
    """`required` and named choices: the answer begins inside a call. Behind an open thought only a grammar can see to it."""
    if name is None or opened or text.output.tools not in ("json", "xml"):
        return ""
    opening = f"{text.output.call_open}\n"
    if text.output.tools == "xml":
        return opening + (f"<function={name}>\n" if name else "<function=")
    return opening + ('{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": ' if name else '{"name": "')


def _encode_forced(text: TextModel, forced: str) -> list[int]:
    """The tag is a special token where the vocabulary has it; the tool's name is the client's and stays plain text."""
    opening = text.output.call_open
    marker = text.tokenizer.id_of(opening)
    if marker is None:
        return text.tokenizer.encode_plain(forced)
    return [marker, *text.tokenizer.encode_plain(forced[len(opening) :])]


def too_long(length: str, max_context: int, param: str) -> ApiError:
    text = f"the prompt has {length}; this engine's limit is {max_context} tokens for prompt and answer together"
    return ApiError(400, text, "context_length_exceeded", param)


def limit_new(asked: int | None, prompt: int, max_context: int, notes: Notes, param: str) -> int:
    """How many tokens may be sampled. Raises ApiError when the prompt alone does not fit."""
    room = max_context - prompt
    if room < 1:
        raise too_long(f"{prompt} tokens", max_context, param)
    if asked is not None and asked > room:
        notes.clamped.append(f"max_tokens={room}")
    return room if asked is None else min(asked, room)
