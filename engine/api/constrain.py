"""Which grammar a chat request is sampled under: `response_format`, a demanded tool call, or calls as they begin.

A call that the model begins by itself is kept inside the offered tools' schemas from its opening tag on; free text stays free.
"""

from __future__ import annotations

import logging
from typing import Any

from engine import ipc
from engine.api.errors import bad_request
from engine.protocol import log_line
from engine.text import grammar
from engine.text.text_model import TextModel

log = logging.getLogger("moorage.api")


def wanted_schema(response_format: dict[str, Any] | None, tools: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The JSON schema the answer must have, None for text. Raises ApiError."""
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return None
    if tools:
        raise bad_request("response_format and tools exclude each other here: leave one out, or send tool_choice none", FIELD)
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise bad_request(f"response_format must be text, json_object or json_schema, got {kind!r}", FIELD)
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise bad_request("response_format json_schema needs an object at json_schema.schema", FIELD)
    return schema


FIELD = "response_format"


def answer_grammar(text: TextModel, schema: dict[str, Any], opened: bool) -> ipc.Grammar:
    """The whole answer, behind the thought if the prompt `opened` one. Raises ApiError."""
    lark = grammar.answer(schema)
    why = grammar.check(lark)
    if why:
        raise bad_request(f"response_format: the schema cannot be enforced: {why}", FIELD, "unsupported_schema")
    return ipc.Grammar(lark=lark, after=_thought_end(text) if opened else None)


def _thought_end(text: TextModel) -> int:
    end = text.tokenizer.id_of(text.thinking.close)
    if end is None:
        raise bad_request("response_format needs thinking switched off for this model: its thoughts end in plain text", FIELD)
    return end


def call_grammar(
    text: TextModel, tools: list[dict[str, Any]], must_call: str | None, forced: bool, opened: bool
) -> tuple[ipc.Grammar | None, tuple[str, ...]]:
    """For a request that offers `tools`: the grammar and the names of tools whose schema it cannot hold.

    `must_call` is the name that must be called, "" for any, None for the model's choice; `forced` says that the prompt already
    holds the call's beginning. None when this model's calls have no tokens of their own to begin at, or no known form.
    """
    style, id_of = text.output, text.tokenizer.id_of
    opener, closer, thought_end = id_of(style.call_open), id_of(style.call_close), id_of(text.thinking.close)
    if not tools or style.tools not in ("json", "xml") or opener is None or closer is None:
        return None, ()
    form = grammar.CallForm(style.tools, opener, closer)
    calls = grammar.calls(tools, form, must_call or "")
    if calls.loose:
        log.warning("%s", log_line("schemas not enforced while sampling", tools=",".join(calls.loose)))
    if forced:
        return ipc.Grammar(lark=calls.rest(must_call or "")), calls.loose
    if must_call is not None and (thought_end is not None or not opened):
        return ipc.Grammar(lark=calls.required(form), after=thought_end if opened else None), calls.loose
    return ipc.Grammar(lark=calls.after_opening(), after=opener, repeat=True), calls.loose
