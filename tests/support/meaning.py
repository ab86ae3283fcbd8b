"""What a conversation says, whatever its dialect: a flat list to compare what an agent sent with what an upstream received.

Written apart from the gateway's own readers, and simpler: white space does not count, and neighbouring texts of one kind are one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

Fact = tuple[Any, ...]

# Not part of the prompt: a nonce for the provider's accounting.
BILLING = "x-anthropic-billing-header"


def told(facts: Iterable[Fact]) -> list[Fact]:
    """Facts with white space removed from texts and neighbours of one kind joined."""
    out: list[Fact] = []
    for fact in facts:
        if fact[0] in ("call", "result"):
            out.append(fact)
            continue
        kind, text = fact[0], "".join(fact[1].split())
        if out and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1] + text)
        elif text:
            out.append((kind, text))
    return out


def of_chat(body: dict[str, Any]) -> list[Fact]:
    return told(_chat(body))


def _chat(body: dict[str, Any]) -> Iterator[Fact]:
    for message in body["messages"]:
        role, content = message["role"], message.get("content") or ""
        text = content if isinstance(content, str) else "".join(p["text"] for p in content)
        if role == "tool":
            yield "result", message["tool_call_id"], "".join(text.split())
            continue
        yield "thought", message.get("reasoning_content") or ""
        yield "system" if role == "developer" else role, text
        for call in message.get("tool_calls", ()):
            yield "call", call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])


def of_messages(body: dict[str, Any]) -> list[Fact]:
    return told(_messages(body))


def _messages(body: dict[str, Any]) -> Iterator[Fact]:
    system = body.get("system") or ()
    for block in [{"text": system}] if isinstance(system, str) else system:
        if not block["text"].startswith(BILLING):
            yield "system", block["text"]
    for message in body["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] == "system":
            blocks = [{"type": "text", "text": f"<system-reminder>{b['text']}</system-reminder>"} for b in blocks]
        role = "assistant" if message["role"] == "assistant" else "user"
        for block in sorted(blocks, key=lambda b: {"tool_result": 0, "thinking": 1, "text": 2}.get(b["type"], 3)):
            if block["type"] == "text":
                yield role, block["text"]
            elif block["type"] == "thinking":
                yield "thought", block["thinking"]
            elif block["type"] == "tool_use":
                yield "call", block["id"], block["name"], block["input"]
            else:
                inner = block.get("content") or ""
                text = inner if isinstance(inner, str) else "".join(b["text"] for b in inner)
                error = (
                    "Error:"
                    if block.get("is_error") and not text.lower().lstrip("<").startswith(("error", "tool_use_error"))
                    else ""
                )
                yield "result", block["tool_use_id"], error + "".join(text.split())


def of_responses(body: dict[str, Any]) -> list[Fact]:
    return told(_responses(body))


def _responses(body: dict[str, Any]) -> Iterator[Fact]:
    yield "system", body.get("instructions") or ""
    items = body["input"]
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind == "message":
            content, role = item["content"], item["role"]
            text = content if isinstance(content, str) else "".join(p["text"] for p in content)
            yield "system" if role == "developer" else role, text
        elif kind == "reasoning":
            yield "thought", "".join(p["text"] for p in item.get("content") or item["summary"])
        elif kind == "function_call":
            space = f"{item['namespace']}__" if item.get("namespace") else ""
            yield "call", item["call_id"], space + item["name"], json.loads(item["arguments"])
        elif kind == "custom_tool_call":
            yield "call", item["call_id"], item["name"], {"input": item["input"]}
        else:
            output = item["output"]
            text = output if isinstance(output, str) else "".join(p["text"] for p in output)
            yield "result", item["call_id"], "".join(text.split())


def tools_of(body: dict[str, Any]) -> set[str]:
    """The names of the tools that a body of any dialect offers, without those that only a provider could run."""
    return {name for tool in body.get("tools") or () for name in _names(tool)}


def _names(tool: dict[str, Any]) -> Iterator[str]:
    if tool.get("type") == "namespace":
        yield from (f"{tool['name']}__{name}" for inner in tool["tools"] for name in _names(inner))
    elif tool.get("type", "function") in ("function", "custom") and (name := (tool.get("function") or tool).get("name")):
        yield name
