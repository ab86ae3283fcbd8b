"""One agent-like exchange against the gateway, shown as it streams: a question, a tool call, the tool's result, the answer.

Owns what `ops/up` prints while it proves that the service works. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

FILES = {"config.toml": '[server]\nlisten_port = "8471"\nlog_level = "warn"'}
QUESTION = "Read `config.toml` and tell me the value of `listen_port`."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Path of the file"}},
                "required": ["path"],
            },
        },
    }
]
MAX_TURNS = 4  # one tool call is expected; a model that wanders is stopped


class ShowcaseError(Exception):
    """The service answered, but not as it should: one line for the user."""


@dataclass
class Reply:
    """One streamed answer, put together. `usage` is the last chunk's; `seconds` from request to first token and to the end."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict] = field(default_factory=list)
    usage: dict = field(default_factory=dict)
    first: float = 0.0
    seconds: float = 0.0

    def message(self) -> dict:
        said: dict = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            said["reasoning_content"] = self.reasoning
        if self.calls:
            said["tool_calls"] = self.calls
        return said


def events(port: int, body: dict, timeout: float) -> Iterator[dict]:
    """POST a streamed chat completion; yield each `data:` object. Raises ShowcaseError on an HTTP error or a cut stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ShowcaseError(f"the gateway answered {response.status}: {response.read(2000).decode(errors='replace').strip()}")
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ShowcaseError(f"the stream ended with an error: {event['error'].get('message', event['error'])}")
            yield event
        raise ShowcaseError("the stream ended without [DONE]")
    except (OSError, http.client.HTTPException) as problem:
        raise ShowcaseError(f"the gateway on port {port} did not answer: {problem}") from None
    finally:
        connection.close()


def add_call(calls: list[dict], delta: dict) -> None:
    """Merge one streamed tool-call fragment."""
    index = delta.get("index", 0)
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    call["id"] = delta.get("id") or call["id"]
    function = delta.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


class Printer:
    """Writes the channels of a stream as they come: reasoning dim, content plain. Colour only on a terminal."""

    def __init__(self) -> None:
        self.colour = sys.stdout.isatty()
        self.channel = ""

    def write(self, channel: str, text: str) -> None:
        if channel != self.channel:
            self.end()
            self.channel = channel
            sys.stdout.write("  " + ("\033[2m" if self.colour and channel == "thinking" else "") + f"{channel:>9} | ")
        sys.stdout.write(text.replace("\n", "\n            | "))
        sys.stdout.flush()

    def end(self) -> None:
        if self.channel:
            sys.stdout.write(("\033[0m" if self.colour else "") + "\n")
        self.channel = ""


def ask(port: int, model: str, messages: list[dict], timeout: float) -> Reply:
    """Send one turn and print it while it streams."""
    body = {
        "model": model,
        "messages": messages,
        "tools": TOOLS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 400,
    }
    reply, printer, began = Reply(), Printer(), time.monotonic()
    for event in events(port, body, timeout):
        reply.usage = event.get("usage") or reply.usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                add_call(reply.calls, call)
            if (thought or text or delta.get("tool_calls")) and not reply.first:
                reply.first = time.monotonic() - began
            if thought:
                reply.reasoning += thought
                printer.write("thinking", thought)
            if text:
                reply.content += text
                printer.write("answer", text)
    for call in reply.calls:
        printer.write("tool call", f"{call['function']['name']} {call['function']['arguments']}")
        printer.end()
    printer.end()
    reply.seconds = time.monotonic() - began
    return reply


def use_tool(call: dict) -> str:
    """What the pretended agent does with a call."""
    try:
        path = json.loads(call["function"]["arguments"]).get("path", "")
    except (ValueError, AttributeError):
        return "error: the arguments are no JSON object"
    return FILES.get(str(path).lstrip("./"), f"error: no such file: {path}")


def report(reply: Reply) -> str:
    """`common=.. prompt=..` of one turn, from the usage the engine sent."""
    ours = reply.usage.get("moorage") or {}
    cached = (reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    prompt, common = ours.get("prompt", reply.usage.get("prompt_tokens", 0)), ours.get("common", cached)
    line = f"common={common} prompt={prompt}" + (f" source={ours['source']}" if ours.get("source") else "")
    return f"{line} first_token={reply.first * 1000:.0f}ms total={reply.seconds * 1000:.0f}ms"


def run(port: int, model: str, timeout: float = 300.0) -> None:
    """The whole exchange. Raises ShowcaseError if an answer does not come."""
    messages: list[dict] = [{"role": "user", "content": QUESTION}]
    print(f"  {'you':>9} | {QUESTION}")
    for _ in range(MAX_TURNS):
        reply = ask(port, model, messages, timeout)
        print(f"  {'reused':>9} | {report(reply)}")
        messages.append(reply.message())
        if not reply.calls:
            if not reply.content.strip():
                raise ShowcaseError("the model ended its turn without an answer")
            return
        for call in reply.calls:
            result = use_tool(call)
            Printer().write("tool", result)
            print()
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise ShowcaseError(f"no answer after {MAX_TURNS} turns of tool calls")
