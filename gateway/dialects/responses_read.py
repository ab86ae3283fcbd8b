"""OpenAI Responses requests as chat completions.

Everything of the Responses API either has its place in the chat body, or is named in a decision, or is refused; unknown
parameters are vendor fields and pass. Nothing is stored here, so whatever refers to a stored response is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.dialects import thoughts
from gateway.dialects.base import need_bool, need_model
from gateway.dialects.thread import GAP, Notes, Thread, media, must
from gateway.errors import Refusal
from gateway.turn import Decision

# What would need stored responses or stored prompts.
STATEFUL = ("previous_response_id", "conversation", "prompt")
# Parameters that mean nothing to a chat server. What they ask for does not happen, and that is said.
NOT_APPLIED = {
    "client_metadata": "it is the agent's own bookkeeping",
    "metadata": "responses are not stored, so nothing can be found by it",
    "max_tool_calls": "built-in tools do not run here",
    "service_tier": "there are no service tiers here",
    "top_logprobs": "log-probabilities are not passed on in this dialect",
    "context_management": "the context is never cut here",
}
TRANSLATED = frozenset(
    str.split(
        """
    input instructions tools tool_choice text reasoning max_output_tokens store include truncation background
    stream stream_options model parallel_tool_calls
    """
    )
)
SEALED_THOUGHTS = "reasoning.encrypted_content"
# The arguments of a custom tool, whose input is free text.
FREE_FORM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input of the tool, as it is"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Names:
    """What the chat function names stand for: custom tools, and tools inside a namespace."""

    custom: set[str] = field(default_factory=set)
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # chat name -> (namespace, name)
    known: set[str] = field(default_factory=set)


def chat_name(name: str, space: Any = None) -> str:
    """The one name that a chat function has for a tool and its namespace."""
    return f"{space}__{name}" if isinstance(space, str) and space else name


@dataclass(frozen=True, slots=True)
class Wire:
    """What the writer must know of the request."""

    names: Names
    summary: bool  # thoughts go out as summaries, because that is what the client reads
    sealed: bool  # thoughts go out sealed as well, so that they can come back
    echo: Mapping[str, Any]  # fields of the response object that repeat the request
    response_id: str = ""  # the id under which another server knows the answer; empty = our own


def read(body: dict[str, Any]) -> tuple[dict[str, Any], Wire, tuple[Decision, ...]]:
    """(chat body, what the writer must know, decisions). Raises Refusal."""
    for name in STATEFUL:
        if body.get(name) is not None:
            raise Refusal(
                400,
                f"`{name}` is not supported: nothing is stored here",
                "Send the whole conversation as `input` with store: false",
                code="unsupported_parameter",
                param=name,
            )
    if need_bool(body, "background"):
        raise Refusal(
            400, "`background` is not supported", "Stream the response", code="unsupported_parameter", param="background"
        )
    notes, names = Notes("responses"), Names()
    tools = _tools(body, names, notes)
    thread = Thread(notes)
    thread.system(must(body.get("instructions") or "", str, "instructions"))
    _input(body.get("input"), thread, notes)
    if not thread.messages:
        raise Refusal(400, "`input` is empty", "Send a string or a list of items", param="input")
    chat = {"model": need_model(body), "messages": thread.messages, **tools, **_parameters(body, notes)}
    if need_bool(body, "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat, _wire(body, names, notes), notes.decisions()


def _wire(body: dict[str, Any], names: Names, notes: Notes) -> Wire:
    reasoning, include = body.get("reasoning") or {}, must(body.get("include") or [], list, "include")
    summary = must(reasoning, dict, "reasoning").get("summary") or reasoning.get("generate_summary")
    if summary:
        notes.add("thought_summary", "the thought itself is sent where its summary was asked for")
    for item in include:
        if item != SEALED_THOUGHTS:
            notes.add("include", f"{str(item)[:80]} is not included")
    defaults = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}}
    echoed = ("instructions", "max_output_tokens", "reasoning", "temperature", "top_p", "user", "prompt_cache_key", *defaults)
    echo = defaults | {"metadata": {}, "previous_response_id": None, "store": False, "truncation": "disabled"}
    echo |= {name: body[name] for name in echoed if body.get(name) is not None}
    empty = {name: None for name in echoed if name not in echo}
    return Wire(names, bool(summary), SEALED_THOUGHTS in include, echo | empty)


# --- the conversation


def _input(value: Any, thread: Thread, notes: Notes) -> None:
    if isinstance(value, str):
        thread.user(value)
        return
    before = ""
    for i, item in enumerate(must(value, list, "input")):
        at = f"input[{i}]"
        kind = must(item, dict, at).get("type") or ("message" if "role" in item else None)
        if kind == "message":
            said = item.get("role") == "assistant"
            _message(item, at, thread, gap=GAP if said and before == "said" else "")
            before = "said" if said else ""
            continue
        before = ""
        if kind == "reasoning":
            _reasoning(item, at, thread, notes)
        elif kind in ("function_call", "custom_tool_call"):
            _call(item, at, thread)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            thread.result(must(item.get("call_id"), str, f"{at}.call_id"), _output(item.get("output"), f"{at}.output"), at)
        elif isinstance(kind, str) and kind.endswith(("_call", "_call_output", "_call_request", "_call_response", "_list_tools")):
            notes.add("builtin_item", f"an item of type {kind[:40]} was left out: built-in tools are not here")
        else:
            remedy = "Send messages, calls with their outputs, and reasoning items"
            raise Refusal(400, f"{at} has the type {str(kind)[:40]!r}", remedy, code="unsupported_item", param=at)


def _message(item: dict[str, Any], at: str, thread: Thread, gap: str) -> None:
    role, content = item.get("role"), item.get("content")
    text = content if isinstance(content, str) else GAP.join(_parts(content, f"{at}.content"))
    if role == "user":
        thread.user(text)
    elif role in ("system", "developer"):
        thread.system(text)
    elif role == "assistant":
        text = content if isinstance(content, str) else "".join(_parts(content, f"{at}.content"))
        thread.said(gap + text if text else "")
    else:
        raise Refusal(
            400, f"{at} has the role {str(role)[:40]!r}", "Use user, assistant, system or developer", param=f"{at}.role"
        )


def _parts(content: Any, at: str) -> list[str]:
    """The texts of a content list. Raises Refusal for images, files and sound."""
    texts = []
    for k, part in enumerate(must(content, list, at)):
        kind = must(part, dict, f"{at}[{k}]").get("type")
        if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
            texts.append(must(part.get("text"), str, f"{at}[{k}].text"))
        elif kind == "refusal":
            texts.append(must(part.get("refusal"), str, f"{at}[{k}].refusal"))
        else:
            raise media("an image" if kind == "input_image" else f"content of type {str(kind)[:40]!r}", f"{at}[{k}]")
    return [t for t in texts if t]


def _output(output: Any, at: str) -> str:
    return output if isinstance(output, str) else GAP.join(_parts(output, at))


def _reasoning(item: dict[str, Any], at: str, thread: Thread, notes: Notes) -> None:
    """The thought as its own text, or as it was sealed here, or as its summary."""
    sealed = item.get("encrypted_content")
    opened = thoughts.unseal(sealed) if isinstance(sealed, str) else None
    if isinstance(sealed, str) and sealed and opened is None:
        notes.add("encrypted_reasoning", "encrypted reasoning of another provider was left out")
    text = "".join(_parts(item.get("content") or [], f"{at}.content"))
    thread.thought(text or opened or GAP.join(_parts(item.get("summary") or [], f"{at}.summary")))


def _call(item: dict[str, Any], at: str, thread: Thread) -> None:
    name = chat_name(must(item.get("name"), str, f"{at}.name"), item.get("namespace"))
    call_id = must(item.get("call_id"), str, f"{at}.call_id")
    if item["type"] == "custom_tool_call":
        given = must(item.get("input"), str, f"{at}.input")
        thread.call(call_id, name, orjson.dumps({"input": given}).decode())
    else:
        thread.call(call_id, name, must(item.get("arguments"), str, f"{at}.arguments"))


# --- tools and parameters


def _tools(body: dict[str, Any], names: Names, notes: Notes) -> dict[str, Any]:
    tools: list[dict[str, Any]] = []
    given = [] if body.get("tools") is None else must(body["tools"], list, "tools")
    for i, tool in enumerate(given):
        _tool(must(tool, dict, f"tools[{i}]"), f"tools[{i}]", "", tools, names, notes)
    out: dict[str, Any] = {"tools": tools} if tools else {}
    if isinstance(parallel := body.get("parallel_tool_calls"), bool) and tools:
        out["parallel_tool_calls"] = parallel
    if (choice := body.get("tool_choice")) is not None:
        out |= _tool_choice(choice, names.known, notes)
    return out


def _tool(tool: dict[str, Any], at: str, space: str, tools: list[dict[str, Any]], names: Names, notes: Notes) -> None:
    kind = tool.get("type")
    if kind == "namespace" and not space:
        notes.add("namespace", f"the tools of {str(tool.get('name'))[:60]} carry its name in front")
        for k, inner in enumerate(must(tool.get("tools"), list, f"{at}.tools")):
            inner_at = f"{at}.tools[{k}]"
            _tool(must(inner, dict, inner_at), inner_at, must(tool.get("name"), str, f"{at}.name"), tools, names, notes)
        return
    if kind not in ("function", "custom"):
        notes.add("builtin_tool", f"the tool {str(kind)[:40]} was left out: built-in tools are not here")
        return
    own = must(tool.get("name"), str, f"{at}.name")
    name = chat_name(own, space)
    names.known.add(name)
    if space:
        names.spaces[name] = (space, own)
    if kind == "custom":
        notes.add("custom_tool", f"{own[:60]} is asked for as a function with one string")
        names.custom.add(name)
        function = {"name": name, "description": _described(tool), "parameters": FREE_FORM}
    else:
        function = {k: tool.get(k) for k in ("description", "parameters", "strict")}
        function = {"name": name} | {k: v for k, v in function.items() if v is not None}
    tools.append({"type": "function", "function": function})


def _described(tool: dict[str, Any]) -> str:
    """A custom tool's description, with the grammar its input must follow."""
    form = tool.get("format")
    text = str(tool.get("description") or "")
    if isinstance(form, dict) and form.get("type") == "grammar":
        grammar = f"The input must follow this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"
        text = GAP.join(t for t in (text, grammar) if t)
    return text


def _tool_choice(choice: Any, known: set[str], notes: Notes) -> dict[str, Any]:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        notes.add("allowed_tools", "the model sees every tool, so that its prompt stays the same; the mode holds")
        choice = choice.get("mode", "auto")
    if choice in ("auto", "none", "required"):
        if not known:
            if choice == "required":
                raise Refusal(400, "`tool_choice` asks for a call, but there are no tools", param="tool_choice")
            return {}
        return {"tool_choice": choice}
    kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, dict) else (None, None)
    if kind not in ("function", "custom") or chat_name(str(name), choice.get("namespace")) not in known:
        shown = str(name or kind or choice)[:80]
        raise Refusal(400, f"`tool_choice` names {shown!r}, which is none of the tools here", param="tool_choice")
    return {"tool_choice": {"type": "function", "function": {"name": chat_name(str(name), choice.get("namespace"))}}}


def _parameters(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if (limit := body.get("max_output_tokens")) is not None:
        out["max_completion_tokens"] = limit
    reasoning = must(body.get("reasoning") or {}, dict, "reasoning")
    if reasoning.get("effort") is not None:
        out["reasoning_effort"] = reasoning["effort"]
    if need_bool(body, "store"):
        notes.add("store", "the response is not stored")
    if body.get("truncation") == "auto":
        notes.add("truncation", "a conversation that is too long is refused and never cut")
    out |= _text(must(body.get("text") or {}, dict, "text"))
    for name, value in body.items():
        if name in NOT_APPLIED:
            if value:
                notes.add(name, NOT_APPLIED[name])
        elif name not in TRANSLATED and name not in STATEFUL and value is not None:
            out[name] = value
    return out


def _text(text: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if text.get("verbosity") is not None:
        out["verbosity"] = text["verbosity"]
    form = must(text.get("format") or {}, dict, "text.format")
    kind = form.get("type", "text")
    if kind == "json_schema":
        schema = {k: form[k] for k in ("name", "description", "schema", "strict") if form.get(k) is not None}
        out["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind == "json_object":
        out["response_format"] = {"type": "json_object"}
    elif kind != "text":
        raise Refusal(
            400, f"`text.format.type` is {str(kind)[:40]!r}", "Use text, json_object or json_schema", param="text.format"
        )
    return out
