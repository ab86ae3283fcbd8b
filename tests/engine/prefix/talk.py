"""Conversations the HTTP tests of the prefix cache hold: clients that send answers back their own way, scripted tool rounds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from engine.text.messages import normalise, normalise_tools
from tests.engine.prefix.server import Server
from tests.support.text import tool

TOOLS = [tool("read_file", path="string", limit="integer"), tool("grep", pattern="string", path="string")]
SYSTEM = {"role": "system", "content": "You are a helpful assistant who reads files. " * 12}
SLACK = 32  # tokens a turn may lose when the engine had time to prepare it
ROUND = 180  # tokens of a tool result and the borders around it, at most

Message = dict[str, Any]
Client = Callable[[Message], Message]


# --- how the assistant's message comes back


def replayed(message: Message) -> Message:
    return message


def stripped(message: Message) -> Message:
    return {k: v for k, v in message.items() if k != "reasoning_content"}


def _with_arguments(message: Message, write: Callable[[dict], Any]) -> Message:
    message = copy.deepcopy(message)
    for each in message.get("tool_calls", ()):
        each["function"]["arguments"] = write(json.loads(each["function"]["arguments"]))
    return message


def reserialised(message: Message) -> Message:
    """Other key order, spaces and escapes."""
    return _with_arguments(message, lambda a: json.dumps(dict(sorted(a.items(), reverse=True)), indent=1, ensure_ascii=True))


def as_objects(message: Message) -> Message:
    return _with_arguments(message, lambda a: a)


CLIENTS = [replayed, stripped, reserialised, as_objects]


# --- what is said


def thought(server: Server, text: str) -> str:
    """`text` as a thought, from where the template lets the model begin."""
    return f"{'' if server.opens_thought else '<think>' + chr(10)}{text}\n</think>\n\n"


def call(n: int, think: str = "") -> str:
    """What the model samples: thought, then a call with spaces and a non-ASCII path of its own."""
    body = json.dumps({"path": f"src/größe_{n}.py", "limit": n}, ensure_ascii=False)
    return f'{think}<tool_call>\n{{"name": "read_file", "arguments": {body}}}\n</tool_call>'


def switch(thinking: bool) -> dict[str, Any]:
    return {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": thinking}}


async def rounds(
    server: Server,
    messages: list[Message],
    count: int,
    client: Client = replayed,
    *,
    thinking: bool = False,
    settle: bool = True,
    first: int = 0,
    **body: Any,
) -> list[dict[str, Any]]:
    """`count` tool rounds at the end of `messages`, which grow. `usage.moorage` of each, with its answer's length as `turn`."""
    seen = []
    for n in range(first, first + count):
        think = thought(server, f"I read file {n} now, the quick brown fox says.") if thinking else ""
        server.say(call(n, think))
        reply = await server.chat(messages, settle=settle, **{**switch(thinking), **body})
        answer = reply["choices"][0]["message"]
        assert len(answer["tool_calls"]) == 1 and bool(answer.get("reasoning_content")) == thinking, answer
        seen.append({**reply["usage"]["moorage"], "turn": reply["usage"]["completion_tokens"]})
        messages.append(client(answer))
        result = f"def f_{n}(): return {n}\n" * 6
        messages.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": result})
    return seen


def opening(text: str = "Read the files and run the tests, please.") -> list[Message]:
    return [SYSTEM, {"role": "user", "content": text}]


async def conversation(server: Server, count: int = 6, **options: Any) -> list[Message]:
    messages = opening()
    await rounds(server, messages, count, **options)
    return messages


async def ask(server: Server, messages: list[Message], reply: str = "Done.", thinking: bool = False, **body: Any) -> dict:
    """`usage.moorage` of one request."""
    server.say(reply)
    return (await server.chat(messages, **{**switch(thinking), **body}))["usage"]["moorage"]


# --- what a prompt is


def prompt_of(server: Server, messages: list[Message], thinking: bool = False) -> list[int]:
    text = server.service.text
    arguments = switch(thinking)["chat_template_kwargs"]
    return text.builder.build(normalise(messages).messages, normalise_tools(TOOLS), arguments).tokens


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
