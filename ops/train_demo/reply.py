"""What the model wrote, taken apart: thought, text, tool calls; and whether each call is valid for the offered tools."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.S)
TYPES = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict, "number": (int, float)}


@dataclass(frozen=True)
class Reply:
    thought: str | None  # None: thinking was on and never closed
    content: str
    calls: tuple[dict, ...]  # parsed {"name", "arguments"}
    broken: int  # calls that are not JSON of the right form
    obeyed: bool  # thinking as told

    def message(self) -> dict:
        calls = [{"type": "function", "function": call} for call in self.calls]
        message: dict = {"role": "assistant", "content": self.content}
        return message | ({"reasoning_content": self.thought} if self.thought else {}) | ({"tool_calls": calls} if calls else {})


def parse_call(text: str) -> dict | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return None
    return call


def parse_reply(text: str, thinking: bool) -> Reply:
    """`text` is what follows the generation prompt."""
    thought: str | None = ""
    if thinking:
        head, closed, rest = text.partition("</think>")
        thought, text = (head.strip(), rest) if closed else (None, text)
    obeyed = "<think>" not in text and "</think>" not in text and (not thinking or bool(thought))
    found = [(parse_call(m.group(1)), m.group(2)) for m in CALL.finditer(text)]
    calls = tuple(call for call, closed in found if call and closed)
    return Reply(thought, CALL.sub("", text).strip(), calls, len(found) - len(calls), obeyed)


def states(content: str, fact: str) -> bool:
    """The fact stands in the answer as a whole: `8` is not stated by `81`."""
    edge = r"[0-9A-Za-z]"
    return re.search(f"(?<!{edge}){re.escape(fact)}(?!{edge})", content) is not None


def fits_schema(call: dict, schemas: list[dict]) -> bool:
    """The tool exists, required arguments are there, none is unknown, types match."""
    for schema in schemas:
        function = schema["function"]
        if function["name"] == call["name"]:
            known, given = function["parameters"]["properties"], call["arguments"]
            required = set(function["parameters"]["required"])
            return required <= set(given) and all(k in known and isinstance(v, TYPES[known[k]["type"]]) for k, v in given.items())
    return False
