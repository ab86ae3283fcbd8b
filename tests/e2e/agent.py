"""The smallest agent: one tool, a question, and the OpenAI SDK. Puts a streamed answer back together."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from .harness import MODEL, Service

FILES = {"config.toml": '[server]\nlisten_port = "8471"\nlog_level = "warn"'}
QUESTION = "Read `config.toml` and tell me the value of `listen_port`."
READ_FILE = {
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


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)  # id, name, arguments
    finish: str = ""
    usage: Any = None
    chunks: int = 0

    def message(self) -> dict:
        said: dict = {"role": "assistant", "content": self.content}
        if self.reasoning:
            said["reasoning_content"] = self.reasoning
        if self.calls:
            said["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in self.calls
            ]
        return said


def client(up: Service, **options: Any) -> OpenAI:
    return OpenAI(base_url=up.base_url, api_key="any", max_retries=0, **options)


def ask(openai: OpenAI, messages: list[dict], **options: Any) -> Answer:
    """One streamed turn; every option goes to the SDK."""
    options = {"model": MODEL, "temperature": 0, "max_tokens": 400, "tools": [READ_FILE]} | options
    stream = openai.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **options)
    answer = Answer()
    for chunk in stream:
        answer.chunks += 1
        answer.usage = chunk.usage or answer.usage
        for choice in chunk.choices:
            delta = choice.delta
            answer.content += delta.content or ""
            answer.reasoning += getattr(delta, "reasoning_content", None) or ""
            answer.finish = choice.finish_reason or answer.finish
            for call in delta.tool_calls or ():
                if call.index == len(answer.calls):
                    answer.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                answer.calls[call.index]["arguments"] += (call.function and call.function.arguments) or ""
    return answer


def use(call: dict[str, str]) -> dict:
    """The tool message for a call."""
    path = json.loads(call["arguments"])["path"]
    return {"role": "tool", "tool_call_id": call["id"], "content": FILES.get(path, f"error: no such file: {path}")}
