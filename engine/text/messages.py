"""Chat messages as clients send them -> the one form that templates get.

Clients differ: content null or a list of parts, arguments as text or as an object, thoughts inline or in a field. Whatever
they send back of our own answers must render to the tokens that were sampled, so each thing has exactly one form here:
content is a string, arguments are an object (or the model's exact text, see `engine.text.history`), a thought is
`reasoning_content`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from engine.text.strict_json import loads

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "function_call", "refusal"}
_TEXT_PARTS = ("text", "input_text", "output_text")


class MessageError(ValueError):
    """A message the engine cannot use. `param` names the field, e.g. `messages[3].content`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass
class Normalised:
    messages: list[dict[str, Any]]
    joint: str
    ignored: set[str] = field(default_factory=set)  # message fields nothing reads, as `messages[].field`
    repaired: int = 0  # tool arguments that were no JSON object and had to be wrapped


def normalise(messages: Any, think_close: str = "</think>", joint: str = "\n") -> Normalised:
    """Check and normalise. Raises MessageError naming the first field that is wrong. The input is not changed.

    `joint` stands between the text parts of one message.
    """
    if not isinstance(messages, list):
        raise MessageError(f"messages must be a list, got {_kind(messages)}", "messages")
    if not messages:
        raise MessageError("messages must hold at least one message", "messages")
    out = Normalised([], joint)
    for i, message in enumerate(messages):
        out.messages.append(_message(message, f"messages[{i}]", out, think_close))
    return out


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _message(message: Any, at: str, out: Normalised, think_close: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise MessageError(f"{at} must be an object, got {_kind(message)}", at)
    role = message.get("role")
    if role not in ROLES:
        given = json.dumps(role) if isinstance(role, str) else _kind(role) if "role" in message else "nothing"
        raise MessageError(f"{at}.role must be one of {', '.join(ROLES)}; got {given}", f"{at}.role")
    out.ignored.update(f"messages[].{key}" for key in message if key not in _KNOWN)
    clean: dict[str, Any] = {"role": "tool" if role == "function" else role, "content": _content(message, at, out)}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            clean[key] = _string(message[key], f"{at}.{key}")
    if role == "assistant":
        _assistant(message, clean, at, out, think_close)
    elif message.get("content") is None:
        raise MessageError(f"{at}.content is required for role {role}", f"{at}.content")
    return clean


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise MessageError(f"{at} must be a string, got {_kind(value)}", at)
    return value


def _content(message: dict[str, Any], at: str, out: Normalised) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessageError(f"{at}.content must be a string or a list of parts, got {_kind(content)}", f"{at}.content")
    texts = []
    for i, part in enumerate(content):
        here = f"{at}.content[{i}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise MessageError(f"{here} must be an object, got {_kind(part)}", here)
        kind = part.get("type", "text" if "text" in part else None)
        if kind not in _TEXT_PARTS:
            raise MessageError(f"{here}: parts of type {json.dumps(kind)} are not supported, this model reads text only", here)
        texts.append(_string(part.get("text"), f"{here}.text"))
        out.ignored.update(f"messages[].content[].{key}" for key in part if key not in ("type", "text"))
    return out.joint.join(texts)


def _assistant(message: dict[str, Any], clean: dict[str, Any], at: str, out: Normalised, think_close: str) -> None:
    reasoning = message.get("reasoning_content")
    if reasoning is None and isinstance(message.get("reasoning"), str):
        reasoning = message["reasoning"]
    if reasoning is not None:
        clean["reasoning_content"] = _string(reasoning, f"{at}.reasoning_content")
    elif think_close and think_close in clean["content"]:
        clean["reasoning_content"], clean["content"] = split_thought(clean["content"], think_close)
    calls = message.get("tool_calls")
    if calls is None and message.get("function_call") is not None:
        calls = [{"type": "function", "function": message["function_call"]}]
    if calls is None:
        return
    if not isinstance(calls, list):
        raise MessageError(f"{at}.tool_calls must be a list, got {_kind(calls)}", f"{at}.tool_calls")
    if calls:
        clean["tool_calls"] = [_call(call, f"{at}.tool_calls[{i}]", out) for i, call in enumerate(calls)]


def split_thought(content: str, close: str) -> tuple[str, str]:
    """`<think>a</think>b` (the opening may be missing) -> ("a", "b"), trimmed as templates trim."""
    opening = close.replace("/", "", 1)
    before, _, after = content.rpartition(close)
    thought = re.sub(rf"^\s*{re.escape(opening)}", "", before)
    return thought.strip("\n"), after.lstrip("\n")


def _call(call: Any, at: str, out: Normalised) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise MessageError(f"{at} must be an object, got {_kind(call)}", at)
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise MessageError(f"{at}.function must be an object, got {_kind(function)}", f"{at}.function")
    name = _string(function.get("name"), f"{at}.function.name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            parsed = loads(arguments)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            # A broken call of an earlier turn: templates walk over an object, so the text travels inside one.
            out.repaired += 1
            parsed = {"arguments": arguments}
        arguments = parsed
    elif not isinstance(arguments, dict):
        where = f"{at}.function.arguments"
        raise MessageError(f"{where} must be a JSON string or an object, got {_kind(arguments)}", where)
    ident = call.get("id")
    return {
        "id": _string(ident, f"{at}.id") if ident is not None else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def normalise_tools(tools: Any) -> list[dict[str, Any]]:
    """Checks `tools`. Raises MessageError naming the field; unknown tool kinds are refused, not dropped."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise MessageError(f"tools must be a list, got {_kind(tools)}", "tools")
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise MessageError(f"{at} must be an object, got {_kind(tool)}", at)
        if tool.get("type", "function") != "function":
            raise MessageError(f'{at}.type {json.dumps(tool.get("type"))} is not supported; only "function" is', f"{at}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise MessageError(f"{at}.function must be an object, got {_kind(function)}", f"{at}.function")
        if not _string(function.get("name"), f"{at}.function.name"):
            raise MessageError(f"{at}.function.name must not be empty", f"{at}.function.name")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise MessageError(f"{at}.function.parameters must be an object", f"{at}.function.parameters")
    return tools
