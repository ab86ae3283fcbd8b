"""Anthropic Messages requests as chat completions.

Everything of the Messages API either has its place in the chat body, or is named in a decision, or is refused; unknown
parameters are vendor fields and pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from engine.protocol import AnchorHint
from gateway.dialects import thoughts
from gateway.dialects.base import need_bool, need_model
from gateway.dialects.thread import GAP, Notes, Thread, media, must
from gateway.errors import Refusal
from gateway.turn import Decision

# Parameters of the Messages API that mean nothing to a chat server. What they ask for does not happen, and that is said.
NOT_APPLIED = {
    "context_management": "the agent's context edits are not applied here",
    "mcp_servers": "MCP servers are not called from here",
    "container": "there are no containers here",
    "service_tier": "there are no service tiers here",
    "inference_geo": "there are no regions here",
    "speed": "there is one speed",
    "betas": "beta features are headers of another API",
}
# Tool entries of these fields mean nothing to a chat server.
TOOL_FIELDS = ("defer_loading", "input_examples", "allowed_callers")
TRANSLATED = frozenset(
    str.split("messages system tools tool_choice stop_sequences metadata output_config output_format thinking cache_control")
)


def read(body: dict[str, Any]) -> tuple[dict[str, Any], tuple[AnchorHint, ...], tuple[Decision, ...]]:
    """(chat body, cache marks, decisions). Raises Refusal."""
    notes = Notes("messages")
    thread = Thread(notes)
    _system(body.get("system"), thread)
    messages = must(body.get("messages"), list, "messages")
    if not messages:
        raise Refusal(400, "`messages` must be a non-empty list", param="messages")
    for i, message in enumerate(messages):
        _message(must(message, dict, f"messages[{i}]"), f"messages[{i}]", thread, notes)
    thread.mark(body.get("cache_control"))
    chat: dict[str, Any] = {"model": need_model(body), "messages": thread.messages}
    chat |= _tools(body, thread, notes) | _parameters(body, notes)
    if thread.messages[-1]["role"] == "assistant" and "tool_calls" not in thread.messages[-1]:
        notes.add("prefill", "the last message is the assistant's: its text is continued")
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if need_bool(body, "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat, thread.breakpoints(), notes.decisions()


# --- the conversation


def _system(value: Any, thread: Thread) -> None:
    if value is None or isinstance(value, str):
        thread.system(value or "")
        return
    for i, block in enumerate(must(value, list, "system")):
        at = f"system[{i}]"
        if must(block, dict, at).get("type") != "text":
            raise Refusal(400, f"{at} is no text block", "A system prompt is text", param=at)
        thread.system(must(block.get("text"), str, f"{at}.text"))
        thread.mark(block.get("cache_control"))


def _message(message: dict[str, Any], at: str, thread: Thread, notes: Notes) -> None:
    role, content = message.get("role"), message.get("content")
    read_block: Callable[[dict[str, Any], str, Thread, Notes], None]
    if role == "user":
        read_block = _user_block
    elif role == "assistant":
        read_block = _assistant_block
    elif role == "system":
        read_block = _system_block
    else:
        raise Refusal(400, f"{at} has the role {str(role)[:40]!r}", "Use user, assistant or system", param=f"{at}.role")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for k, block in enumerate(must(content, list, f"{at}.content")):
        read_block(must(block, dict, f"{at}.content[{k}]"), f"{at}.content[{k}]", thread, notes)
        thread.mark(block.get("cache_control"))


def _system_block(block: dict[str, Any], at: str, thread: Thread, notes: Notes) -> None:
    thread.system(must(block.get("text"), str, f"{at}.text"))


def _user_block(block: dict[str, Any], at: str, thread: Thread, notes: Notes) -> None:
    kind = block.get("type")
    if kind == "tool_result":
        call_id = must(block.get("tool_use_id"), str, f"{at}.tool_use_id")
        text = _result(block.get("content"), f"{at}.content", notes)
        if block.get("is_error") and not text.lstrip("<").lower().startswith(("error", "tool_use_error")):
            notes.add("tool_error", "a failed tool's result says so in its text")
            text = f"Error: {text}"
        thread.result(call_id, text, at)
    else:
        thread.user(_plain(block, at))


def _plain(block: dict[str, Any], at: str) -> str:
    """A block that is text, or a document of text. Raises Refusal for images and anything else."""
    kind = block.get("type")
    if kind == "text":
        return must(block.get("text"), str, f"{at}.text")
    if kind == "search_result":
        return GAP.join([f"{block.get('title', '')} {block.get('source', '')}".strip(), _texts(block.get("content"), at)])
    if kind == "document":
        source = must(block.get("source"), dict, f"{at}.source")
        if source.get("type") == "text":
            return "\n".join(t for t in (block.get("title"), must(source.get("data"), str, f"{at}.source.data")) if t)
        if source.get("type") == "content":
            return _texts(source.get("content"), f"{at}.source.content")
        raise media("a document that is no plain text", at)
    raise media(f"content of type {str(kind)[:40]!r}" if kind != "image" else "an image", at)


def _texts(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    parts = must(content, list, at)
    return GAP.join(_plain(must(part, dict, f"{at}[{k}]"), f"{at}[{k}]") for k, part in enumerate(parts))


def _result(content: Any, at: str, notes: Notes) -> str:
    if isinstance(content, list):
        kept = [p for p in content if not (isinstance(p, dict) and p.get("type") == "tool_reference")]
        if len(kept) != len(content):
            notes.add("tool_reference", "references to deferred tools were left out: every tool is loaded here")
        content = kept
    return "" if content is None else _texts(content, at)


def _assistant_block(block: dict[str, Any], at: str, thread: Thread, notes: Notes) -> None:
    kind = block.get("type")
    if kind == "text":
        thread.said(must(block.get("text"), str, f"{at}.text"))
    elif kind == "thinking":
        _thinking(block, at, thread, notes)
    elif kind == "redacted_thinking":
        notes.add("redacted_thinking", "a thought that only its provider can read was left out")
    elif kind == "tool_use":
        name = must(block.get("name"), str, f"{at}.name")
        given = must(block.get("input"), dict, f"{at}.input")
        thread.call(must(block.get("id"), str, f"{at}.id"), name, orjson.dumps(given).decode())
    elif kind == "image":
        raise media("an image", at)
    else:
        notes.add("provider_block", f"a block of type {str(kind)[:40]} was left out: its provider's own tools are not here")


def _thinking(block: dict[str, Any], at: str, thread: Thread, notes: Notes) -> None:
    """Signed thoughts are kept; one without a signature, or changed under ours, is nobody's word and left out."""
    thought, signature = must(block.get("thinking"), str, f"{at}.thinking"), block.get("signature")
    if not isinstance(signature, str) or not signature:
        notes.add("unsigned_thinking", "a thinking block without a signature was left out")
    elif not thoughts.is_ours(signature):
        thread.thought(thought)
        thread.foreign_thought({"type": "thinking", "thinking": thought, "signature": signature})
    elif signature == thoughts.sign(thought):
        thread.thought(thought)
    else:
        notes.add("unsigned_thinking", "a thinking block whose text does not go with its signature was left out")


# --- tools and parameters


def _tools(body: dict[str, Any], thread: Thread, notes: Notes) -> dict[str, Any]:
    tools = []
    for i, tool in enumerate(must([] if (given := body.get("tools")) is None else given, list, "tools")):
        at = f"tools[{i}]"
        name = must(must(tool, dict, at).get("name"), str, f"{at}.name")
        if tool.get("type") not in (None, "custom"):
            notes.add(
                "provider_tool", f"the tool {name[:60]} ({str(tool['type'])[:40]}) was left out: only its provider can run it"
            )
            continue
        for field in TOOL_FIELDS:
            if tool.get(field):
                notes.add("tool_field", f"{field} of a tool is not applied here")
        if isinstance(tool.get("cache_control"), dict):
            thread.mark_tools(tool["cache_control"])
        function = {"name": name, "description": tool.get("description"), "parameters": tool.get("input_schema")}
        function["strict"] = tool.get("strict")
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    out: dict[str, Any] = {"tools": tools} if tools else {}
    choice = body.get("tool_choice")
    return out if choice is None else out | _tool_choice(must(choice, dict, "tool_choice"), tools, notes)


def _tool_choice(choice: dict[str, Any], tools: list[dict[str, Any]], notes: Notes) -> dict[str, Any]:
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and not any(t["function"]["name"] == name for t in tools):
        raise Refusal(400, f"`tool_choice` names {str(name)[:80]!r}, which is none of the tools", param="tool_choice.name")
    if kind in ("any", "tool") and not tools:
        raise Refusal(400, "`tool_choice` asks for a call, but there are no tools", param="tool_choice")
    known = {"auto": "auto", "any": "required", "none": "none", "tool": {"type": "function", "function": {"name": name}}}
    if not isinstance(kind, str) or kind not in known:
        raise Refusal(400, f"`tool_choice.type` is {str(kind)[:40]!r}", "Use auto, any, tool or none", param="tool_choice.type")
    if not tools:
        notes.add("tool_choice", "left out: there are no tools")
        return {}
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": known[kind], **parallel}


def _parameters(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if stops := body.get("stop_sequences"):
        out["stop"] = must(stops, list, "stop_sequences")
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and isinstance(user := metadata.get("user_id"), str) and user:
        out["user"] = user
    out |= _thinking_asked(body, notes) | _format(body)
    for name, value in body.items():
        if name in NOT_APPLIED:
            notes.add(name, NOT_APPLIED[name])
        elif name not in TRANSLATED and name not in ("model", "stream"):
            out[name] = value
    return out


def _thinking_asked(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """The client's words; what they mean is decided where every spelling is read (`policy.thinking`)."""
    out: dict[str, Any] = {}
    if (asked := body.get("thinking")) is not None:
        if must(asked, dict, "thinking").get("display") == "omitted":
            notes.add("thinking_display", "thoughts are sent with their text: without it they could not come back")
        out["thinking"] = {k: v for k, v in asked.items() if k != "display"}
    config = body.get("output_config")
    if isinstance(config, dict) and config.get("effort") is not None:
        out["output_config"] = {"effort": config["effort"]}
    return out


def _format(body: dict[str, Any]) -> dict[str, Any]:
    config = body.get("output_config")
    asked = (config.get("format") if isinstance(config, dict) else None) or body.get("output_format")
    if asked is None:
        return {}
    if must(asked, dict, "output_config.format").get("type") != "json_schema":
        raise Refusal(400, "`output_config.format.type` must be json_schema", param="output_config.format.type")
    schema = {"name": "answer", "schema": must(asked.get("schema"), dict, "output_config.format.schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
