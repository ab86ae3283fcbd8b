"""Thoughts, answers and calls out of streamed text: any cut of the text gives what the whole gives."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.parser import OutputParser, OutputStyle, _joined
from engine.text.stops import StopMatcher
from engine.text.stream import CallArguments, CallStart, Text, Thought
from engine.text.toolformats import typed_value
from tests.support.text import tool

TOOLS = [tool("read", path="string", n="integer"), tool("run", cmd="string")]
QWEN = OutputStyle("<think>", "</think>", "json")
CODER = OutputStyle("<think>", "</think>", "xml")
STYLES = {
    "json": QWEN,
    "xml": CODER,
    "glm": OutputStyle("<think>", "</think>", "glm"),
    "mistral": OutputStyle(tools="mistral"),
    "bare": OutputStyle(tools="bare"),
    "none": OutputStyle("<think>", "</think>", "none"),
}


def parse(style, text, cuts=None, opened=False, tools=TOOLS, truncated=False):
    """(thought, answer, [(name, arguments)], findings)"""
    parser = OutputParser(style, opened=opened, tools=tools)
    events, at = [], 0
    for cut in [*(cuts or []), len(text)]:
        events += parser.feed(text[at:cut])
        at = cut
    events += parser.finish(truncated)
    thought = "".join(e.text for e in events if isinstance(e, Thought))
    answer = "".join(e.text for e in events if isinstance(e, Text))
    calls = [[e.name, ""] for e in events if isinstance(e, CallStart)]
    for e in events:
        if isinstance(e, CallArguments):
            calls[e.index][1] += e.text
    ids = [e.id for e in events if isinstance(e, CallStart)]
    assert len(set(ids)) == len(ids)
    order = [type(e).__name__ if isinstance(e, Text | Thought) else (type(e).__name__, e.index) for e in _joined(events)]
    return thought, answer, [tuple(c) for c in calls], order, parser.findings


def calls(style, text, **more):
    return parse(style, text, **more)[2]


CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py", "n": 3}}\n</tool_call>'


def xml(name, **parameters):
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


XML = xml("read", path="a.py", n=3)


@pytest.mark.parametrize("style", [QWEN, CODER])
@pytest.mark.parametrize("call", [CALL, XML])
def test_a_thought_an_answer_and_two_calls(style, call):
    text = f"<think>\nLet me see.\n</think>\n\nReading.\n\n{call}\n{call}"
    thought, answer, made, order, findings = parse(style, text)
    assert (thought, answer) == ("Let me see.", "Reading.")
    assert [(n, json.loads(a)) for n, a in made] == [("read", {"path": "a.py", "n": 3})] * 2
    assert order == ["Thought", "Text", ("CallStart", 0), ("CallArguments", 0), ("CallStart", 1), ("CallArguments", 1)]
    assert (findings.malformed, findings.broken, findings.repaired) == (0, 0, 0)


def test_json_arguments_pass_through_unchanged():
    odd = '{"path" : "a\\u00e9\\n\\"}</tool_call>",  "n":1.50, "deep": [{"x": null}, [], {}]}'
    assert calls(QWEN, f'<tool_call>{{"name":"read","arguments":{odd}}}</tool_call>') == [("read", odd)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"arguments": {"n": 1}, "name": "read"}', '{"n": 1}'),
        ('{"name": "read", "parameters": {"n": 1}}', '{"n": 1}'),
        ('{"name": "read", "arguments": "{\\"n\\": 1}"}', '{"n": 1}'),
        ('{"name": "read"}', "{}"),
        ('{"name": "read", "arguments": null}', "{}"),
        ('{"type": "function", "function": {"name": "read", "arguments": {"n": 1}}}', '{"n": 1}'),
        ('{"id": "x", "name": "read", "arguments": {"n": 1}, "extra": [1, {"a": 2}]}', '{"n": 1}'),
    ],
)
def test_forms_of_a_json_call(text, expected):
    assert calls(QWEN, f"<tool_call>\n{text}\n</tool_call>") == [("read", expected)]


def test_raw_newlines_in_json_strings_are_repaired_and_counted():
    _, _, made, _, findings = parse(QWEN, '<tool_call>{"name":"run","arguments":{"cmd":"a\nb\tc"}}</tool_call>')
    assert json.loads(made[0][1]) == {"cmd": "a\nb\tc"} and findings.repaired == 2


@pytest.mark.parametrize(
    "body",
    ["nonsense", '{"nam": "read"}', "{", '{"name": ', '{"name": 7}', "[1]", '{"arguments": {}}', '{"name": "' + "x" * 300 + '"}'],
)
@pytest.mark.parametrize("style", [QWEN, CODER])
def test_what_is_no_call_stays_text_and_is_counted(style, body):
    text = f"before <tool_call>{body}</tool_call> after"
    _, answer, made, _, findings = parse(style, text)
    assert (answer, made, findings.malformed) == (text, [], 1)


def test_broken_arguments_reach_the_client_and_are_counted():
    thought, answer, made, _, findings = parse(QWEN, '<tool_call>{"name":"read","arguments":{"path": oops this}}</tool_call>bye')
    assert made[0][0] == "read" and "oops this" in made[0][1]
    assert (answer, findings.broken) == ("bye", 1)


def test_a_call_cut_by_the_limit_keeps_what_there_is():
    assert calls(QWEN, '<tool_call>{"name":"read","arguments":{"path": "a', truncated=True) == [("read", '{"path": "a')]
    assert parse(QWEN, "ok <tool_call>\n", truncated=True)[1:3] == ("ok <tool_call>\n", [])
    assert parse(QWEN, "ok <tool_c", truncated=True)[1] == "ok <tool_c"
    made = calls(CODER, "<tool_call>\n<function=read>\n<parameter=path>\nabc", truncated=True)
    assert made == [("read", '{"path": "abc"}')]


def test_xml_values_follow_the_schema():
    text = xml("t", s="12", i="12", b="True", o='{"a": [1]}', l="\nx\n", u="[1]")
    tools = [tool("t", s="string", i="integer", b="boolean", o="object", l="string")]
    ((name, arguments),) = calls(CODER, text, tools=tools)
    assert json.loads(arguments) == {"s": "12", "i": 12, "b": True, "o": {"a": [1]}, "l": "\nx\n", "u": [1]}


def test_xml_values_may_hold_the_closing_tag_as_text():
    value = "if '</parameter>' in x:\n    y = '</function>'\n"
    assert json.loads(calls(CODER, xml("run", cmd=value))[0][1]) == {"cmd": value}


def test_a_forgotten_opening_tag():
    assert calls(CODER, XML.removeprefix("<tool_call>\n")) == [("read", '{"path": "a.py", "n": 3}')]


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", {"integer"}, 5),
        ("5", {"string"}, "5"),
        ("5", {"string", "integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("null", {"null"}, None),
        ("None", set(), None),
        ("true", set(), True),
        ("[1", {"array"}, "[1"),
        ("x", {"object"}, "x"),
        ("5", {"number"}, 5),
        ('"q"', set(), '"q"'),
    ],
)
def test_typed_values(text, kinds, value):
    assert typed_value(text, frozenset(kinds)) == value


def test_glm_and_mistral_and_bare():
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in (("path", "a b"), ("n", "3")))
    glm = f"<tool_call>read\n{pairs}</tool_call>"
    assert calls(STYLES["glm"], "<think>x</think>" + glm) == [("read", '{"path": "a b", "n": 3}')]
    two = '[TOOL_CALLS][{"name": "read", "arguments": {"n": 1}}, {"name": "run", "arguments": {}}]'
    assert calls(STYLES["mistral"], two) == [("read", '{"n": 1}'), ("run", "{}")]
    newer = '[TOOL_CALLS]run[ARGS]{"cmd": "x"}[TOOL_CALLS]read[ARGS]{}'
    assert calls(STYLES["mistral"], newer) == [
        ("run", '{"cmd": "x"}'),
        ("read", "{}"),
    ]
    assert calls(STYLES["bare"], '{"name": "read", "parameters": {"n": 1}}') == [("read", '{"n": 1}')]
    assert parse(STYLES["bare"], 'Do:\n```json\n{"name": "run", "arguments": {}}\n```\nok')[1:3] == ("Do:ok", [("run", "{}")])
    plain = '{"name": "somebody", "arguments": {}}'
    assert parse(STYLES["bare"], plain)[1:3] == (plain, []), "JSON that names no offered tool is an answer"


def test_without_offered_tools_call_syntax_is_text():
    assert parse(QWEN, CALL, tools=None)[1:3] == (CALL, [])


# --- thoughts


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        ("  \n<think>a</think>b", False, "a", "b"),
        ("a\n</think>\n\nb", True, "a", "b"),
        ("never closed\n", True, "never closed\n", ""),
        ("<think>\n\n</think>\n\n", False, "", ""),
        ("b <think> c", False, "", "b <think> c"),
        ("  b", False, "", "  b"),
        ("a < b </thin", True, "a < b </thin", ""),
    ],
)
def test_thoughts(text, opened, thought, answer):
    assert parse(QWEN, text, opened=opened)[:2] == (thought, answer)


def test_a_call_that_ends_inside_a_thought_is_an_action():
    thought, answer, made, _, findings = parse(QWEN, f"I read it. {CALL}\n{CALL}", opened=True)
    assert (thought, answer, len(made), findings.calls_in_thought) == ("I read it.", "", 2, 2)


def test_a_call_drafted_in_a_thought_is_not_made():
    thought, answer, made, _, _ = parse(QWEN, f"Maybe {CALL} or not.\n</think>\n\nNo.", opened=True)
    assert (thought, answer, made) == (f"Maybe {CALL} or not.", "No.", [])


def test_a_turn_of_nothing_but_a_drafted_call_makes_it():
    thought, answer, made, _, findings = parse(QWEN, f"Do it. {CALL}\n</think>\n\n", opened=True)
    assert made == [("read", '{"path": "a.py", "n": 3}')] and CALL in thought and findings.calls_in_thought == 1


def test_a_call_cut_inside_a_thought_is_no_action():
    thought, _, made, _, _ = parse(QWEN, f"x {CALL[:-20]}", opened=True, truncated=True)
    assert made == [] and "read" in thought


# --- the property of the core

TAGS = "<think> </think> <tool_call> </tool_call> <function=read> <parameter=path> </parameter> </function>"
OTHER_TAGS = "<arg_key> </arg_key> <arg_value> </arg_value> [TOOL_CALLS] [ARGS] ```json ``` read < </ word é中"
JSON = ['{"name": "read", "arguments": {"n": [1, "}"]}}', '{"name": "run"', *'"{}[],:\\\n \x01', "\n\n"]
WORDS = st.sampled_from([*TAGS.split(), *OTHER_TAGS.split(), *JSON, CALL, XML])


@pytest.mark.parametrize("name", sorted(STYLES))
@settings(max_examples=150)
@given(st.lists(WORDS, max_size=14).map("".join), st.booleans(), st.booleans(), st.data())
def test_any_cut_gives_the_same_and_nothing_is_lost(name, text, opened, truncated, data):
    style = STYLES[name]
    whole = parse(style, text, opened=opened, truncated=truncated)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    assert parse(style, text, cuts, opened=opened, truncated=truncated) == whole
    assert parse(style, text, list(range(len(text))), opened=opened, truncated=truncated) == whole


BEGINNINGS = ["<tool_call>read\n<arg_key>", "<tool_call>\n<function=read>\n<parameter=", XML[:-30], "</arg_key>\n<arg_value>"]
NAMES = st.integers(0, 10**6).map("w{}w".format)


@pytest.mark.parametrize("name", ["xml", "glm", "none", "json"])
@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([*TAGS.split(), *OTHER_TAGS.split()[:4], "\n", " ", *BEGINNINGS]) | NAMES, max_size=10),
    st.booleans(),
)
def test_no_word_is_lost_whatever_the_tags_do(name, parts, opened):
    """Words of the model come out as thought, answer, name, key or value, however broken the tags around them are."""
    thought, answer, made, _, _ = parse(STYLES[name], "".join(parts), opened=opened)
    shown = thought + answer + "".join(n + a for n, a in made)
    for part in parts:
        if part.startswith("w") and part != "word":
            assert part in shown


@given(st.text(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_text_without_tags_passes_whole(text, cuts):
    cuts = sorted(c for c in cuts if c <= len(text))
    assert parse(OutputStyle(), text, cuts, tools=None)[1] == text


# --- stop strings and bytes


@given(st.text("abcx", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_across_any_cut(text, stops, data):
    def run(cuts):
        matcher, out, at = StopMatcher(stops), "", 0
        for cut in [*cuts, len(text)]:
            out += matcher.feed(text[at:cut])
            at = cut
        return out + matcher.flush(), matcher.matched

    out, matched = run([])
    assert run(sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))) == (out, matched)
    assert run(range(len(text))) == (out, matched)
    assert text.startswith(out) and not any(s in out for s in stops)
    assert (out == text) == (not matched)


@given(st.text(max_size=30))
def test_streamed_text_equals_the_whole_and_never_shows_half_a_character(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.feed(t) for t in tokenizer.encode_plain(text)]
    assert "".join(parts) + detokenizer.flush() == text
    assert "\ufffd" in text or not any("\ufffd" in p for p in parts)


def test_bytes_that_never_become_a_character(tokenizer):
    tokens = tokenizer.encode_plain("🚀")[:1] if len(tokenizer.encode_plain("🚀")) > 1 else [tokenizer.plain.token_to_id("ð")]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed(t) for t in tokens] == [""]
    assert detokenizer.flush() == "\ufffd" and detokenizer.flush() == ""
    detokenizer.feed(tokens[0])
    assert detokenizer.feed(tokenizer.id_of("<think>")) == "\ufffd<think>"


def test_control_tokens_are_hidden_unless_the_parser_needs_them(tokenizer):
    end = tokenizer.id_of("<|im_end|>")
    assert Detokenizer(tokenizer).feed(end) == ""
    assert Detokenizer(tokenizer, frozenset({end})).feed(end) == "<|im_end|>"
    assert Detokenizer(tokenizer).feed(tokenizer.id_of("<tool_call>")) == "<tool_call>"
