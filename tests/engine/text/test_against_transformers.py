"""Prompts equal those of transformers' `apply_chat_template`, token by token, for what clients really send."""

import json
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from transformers import AutoTokenizer

from engine.text.messages import normalise, normalise_tools
from engine.text.text_model import load_text_model
from tests.support.text import tool, write_tokenizer

DEMO = Path(__file__).resolve().parents[3] / "ops" / "demo_model"
USER = {"role": "user", "content": "读 the file\n\n  a.py 🚀 "}
SYSTEM = {"role": "system", "content": "You are  helpful.\n"}
ARGUMENTS = {"path": "ä\n\"b'", "n": [1, None, 2.5, True]}
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "read_file", "arguments": ARGUMENTS}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
TWO = {**CALL, "content": "Both:", "tool_calls": CALLS * 2}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "read_file", "content": "line 1\nline 2\n"}
THOUGHT = {"role": "assistant", "content": "It says hi.", "reasoning_content": "The user wants\nthe file."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}]}
TALKS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, {"role": "assistant", "content": "  yes \n"}, USER],
    "empty": [{"role": "user", "content": ""}],
    "call": [USER, CALL, RESULT],
    "two calls": [USER, TWO, RESULT, RESULT],
    "thought": [USER, THOUGHT, USER],
    "thought and call": [USER, {**CALL, "reasoning_content": "I read it."}, RESULT],
    "parts": [PARTS],
    "three parts": [{"role": "user", "content": [*PARTS["content"], {"type": "text", "text": ""}]}, THOUGHT, PARTS],
}
TOOLS = [tool(), tool("write_file", path="string", text="string", count="integer")]
SWITCHES = ({}, {"enable_thinking": False}, {"enable_thinking": True})


def directory(tmp_path: Path, name: str) -> Path:
    """A checkpoint's text files; `named tokens` writes every special token a template may name."""
    if name == "demo":
        return DEMO
    if name != "named tokens":
        return write_tokenizer(tmp_path, name)
    path = write_tokenizer(tmp_path, None)
    source = "{{ bos_token ~ '|' ~ eos_token ~ '|' ~ pad_token ~ '|' ~ unk_token }}"
    source += "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<|im_start|>", "unk_token": "<|endoftext|>", "add_bos_token": True, "chat_template": source}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [691, 693]}))
    return path


@pytest.mark.parametrize("name", ["demo", "json_calls", "xml_calls", "always_thinks", "plain", "named tokens", "without bos"])
@pytest.mark.parametrize("talk", TALKS)
def test_prompts_equal_transformers(tmp_path, name, talk):
    path = directory(tmp_path, name.replace("without bos", "plain"))
    if name == "without bos":  # the tokenizer puts one before raw text; the template does not write it
        config = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|im_start|>", "add_bos_token": True}))
    ours, theirs = load_text_model(path), AutoTokenizer.from_pretrained(path)
    messages = TALKS[talk]
    for tools in ([], TOOLS) if ours.shows_tools else ([],):
        for switch in SWITCHES:
            more = {"tools": tools or None, "add_generation_prompt": True, "return_dict": False, **switch}
            try:
                want = theirs.apply_chat_template(messages, **more)
            except (TypeError, UndefinedError):
                continue  # this template knows text only and adds it to other text, or splits it
            if "'type': 'text'" in theirs.decode(want):
                continue  # this one prints the list
            clean = normalise(messages, ours.thinking.close, ours.part_joint).messages
            have = ours.builder_for(tools).build(clean, normalise_tools(tools), switch).tokens
            assert ours.tokenizer.decode(have) == theirs.decode(want), (tools, switch)
            assert have == want


@pytest.mark.parametrize("name", ["demo", "json_calls", "xml_calls", "plain"])
@pytest.mark.parametrize("begun", ["The capital is", "a\n", "  trailing  ", "1", "🚀", "def f():\n    "])
@pytest.mark.parametrize("end", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_prompts_without_the_start_of_an_answer_equal_transformers(tmp_path, name, begun, end):
    ours, theirs = load_text_model(directory(tmp_path, name)), AutoTokenizer.from_pretrained(directory(tmp_path, name))
    messages = [SYSTEM, USER, {"role": "assistant", "content": begun}]
    want = theirs.apply_chat_template(messages, return_dict=False, **end)
    clean = normalise(messages, ours.thinking.close).messages
    have = ours.builder.build(clean, [], {}, end="continue" if end.get("continue_final_message") else "nothing").tokens
    assert ours.tokenizer.decode(have) == theirs.decode(want)
    assert have == want
