"""Everything the API process knows about a checkpoint's text: tokenizer, template, how it thinks, how it calls tools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.text import thinking
from engine.text.chat_template import ChatTemplate, TemplateError
from engine.text.parser import OutputStyle, ToolFormat
from engine.text.prompt import PromptBuilder
from engine.text.tokenizer import Tokenizer, load_tokenizer

_INNER_MARKS = ("[TOOL_CALLS]", "[ARGS]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_NAME, _KEY, _VALUE = "probefn", "probekey", "probevalue"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "d",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
    },
}


@dataclass(frozen=True)
class TextModel:
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: a base model without a chat template; only raw completions work
    builder: PromptBuilder | None
    tool_builder: PromptBuilder | None  # some checkpoints have a template of their own for conversations with tools
    thinking: thinking.ThinkingStyle
    output: OutputStyle
    stop_ids: tuple[int, ...]
    shows_tools: bool  # the template writes offered tools into the prompt
    knows_developer: bool  # the template has the role `developer`
    kept_ids: frozenset[int]  # control tokens the output parser must see
    part_joint: str = "\n"  # what stands between two text parts of a message

    def builder_for(self, tools: list[dict[str, Any]]) -> PromptBuilder | None:
        return self.tool_builder if tools else self.builder


def load_text_model(path: str | Path) -> TextModel:
    """Raises TokenizerError or TemplateError, one line each."""
    tokenizer = load_tokenizer(path)
    source = tokenizer.files.templates.get("default") or next(iter(tokenizer.files.templates.values()), None)
    stop = tokenizer.eos_ids
    if source is None:
        none = thinking.ThinkingStyle()
        return TextModel(tokenizer, None, None, None, none, OutputStyle(), stop, False, False, frozenset())
    tool_source = tokenizer.files.templates.get("tool_use", source)
    template = ChatTemplate(source, _constants(tokenizer))
    probed = ChatTemplate(tool_source, _constants(tokenizer)) if tool_source != source else template
    builder = PromptBuilder(tokenizer, template)
    style = thinking.probe(template, tokenizer)
    tools, opener, closer = tool_format(probed)
    output = OutputStyle(style.open, style.close, tools, opener, closer)
    marks = {style.open, style.close, opener, closer, *_INNER_MARKS}
    kept = frozenset(i for i in map(tokenizer.id_of, marks) if i is not None)
    return TextModel(
        tokenizer,
        template,
        builder,
        PromptBuilder(tokenizer, probed) if probed is not template else builder,
        style,
        output,
        tuple(dict.fromkeys([*stop, *_turn_ends(template, tokenizer)])),
        shows_tools=_NAME in (_try(probed, [{"role": "user", "content": "x"}], [_TOOL]) or ""),
        knows_developer="developer" in source,
        kept_ids=kept,
        part_joint=part_joint(template),
    )


def _constants(tokenizer: Tokenizer) -> dict[str, Any]:
    """What templates may name: the checkpoint's own names; "" for those that many templates take for granted."""
    eos = next((tokenizer.special_ids[i].text for i in tokenizer.eos_ids if i in tokenizer.special_ids), "")
    return {"bos_token": "", "eos_token": eos, **tokenizer.files.named}


def _try(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
    try:
        return template.render(messages, tools, False)
    except TemplateError:
        return None


def _turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """The special token the template writes behind an answer: the model was trained to stop there."""
    text = _try(template, [{"role": "user", "content": "x"}, {"role": "assistant", "content": _VALUE}], None) or ""
    if _VALUE not in text:
        return []
    behind = tokenizer.pieces(text[text.rindex(_VALUE) + len(_VALUE) :].lstrip())
    return [behind[0][1].id] if behind and behind[0][1] else []


def part_joint(template: ChatTemplate) -> str:
    """What the template writes between two text parts of one message; a newline where it takes text only."""
    parts = [{"type": "text", "text": _KEY}, {"type": "text", "text": _VALUE}]
    text = _try(template, [{"role": "user", "content": parts}], None) or ""
    found = re.search(rf"{_KEY}(.*?){_VALUE}", text, re.DOTALL)
    return found[1] if found and "text" not in found[1] else "\n"  # else it printed the list itself


def tool_format(template: ChatTemplate) -> tuple[ToolFormat, str, str]:
    """(format, opening tag, closing tag), from how the template writes an old call back."""
    call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "content": "r", "tool_call_id": "call00001", "name": _NAME}
    text = _try(template, [*talk, result], [_TOOL]) or _try(template, talk, [_TOOL]) or ""
    text = text[text.rindex("x") :] if "x" in text[: text.rfind(_VALUE) + 1] else text
    tags = ("<tool_call>", "</tool_call>")
    if "[TOOL_CALLS]" in text or "[TOOL_CALLS]" in template.source:
        return "mistral", *tags
    if f"<function={_NAME}>" in text:
        return "xml", *tags
    if "<arg_key>" in text and "<tool_call>" in text:
        return "glm", *tags
    # The tag must speak of calls: Llama 3 writes `<|end_header_id|>` before every kind of text.
    tagged = re.search(rf"(<[\w|]*(?:tool|call|function)[\w|]*>)\s*\{{[^<]*{_NAME}[^<]*\}}\s*(</?[\w|/]+>)", text)
    if tagged:
        return "json", tagged[1], tagged[2]
    return "bare", *tags
