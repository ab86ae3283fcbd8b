"""Grammars made from tools and schemas: what a template writes is inside, what breaks a schema is not."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.text.grammar import CallForm, answer, calls, check
from engine.text.parser import OutputParser, OutputStyle
from engine.text.stream import CallArguments, CallStart

OPEN, CLOSE, END = 256, 257, 258


class Bytes:
    """Every byte is a token; three special ones follow."""

    eos_token_id, bos_token_id = END, None
    tokens = [bytes([i]) for i in range(256)] + [b"<tool_call>", b"</tool_call>", b"<end>"]
    special_token_ids = [OPEN, CLOSE, END]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()))
READ = {
    "name": "read_file",
    "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "limit": {"type": "integer", "minimum": 0},
            "mode": {"enum": ["text", "hex"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        },
        "required": ["path"],
        "additionalProperties": False,
        "$defs": {"tag": {"type": "string"}},
    },
}
NOTHING = {"name": "list_all", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
FREE = {"name": "free", "description": "no schema at all"}
TOOLS = [{"type": "function", "function": f} for f in (READ, NOTHING, FREE)]
FORMS = [CallForm("json", OPEN, CLOSE), CallForm("xml", OPEN, CLOSE)]

# What a parameter may hold. The closing tag cannot stand inside an XML value; llguidance's JSON strings have DEL escaped only.
TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\x7f")
arguments = st.fixed_dictionaries(
    {"path": st.text(TEXT, max_size=20).filter(lambda t: "</parameter>" not in t)},
    optional={
        "limit": st.integers(0, 10**6),
        "mode": st.sampled_from(["text", "hex"]),
        "tags": st.lists(st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=5), max_size=3),
    },
).map(lambda found: {key: found[key] for key in ("path", "limit", "mode", "tags") if key in found})


def written(form: CallForm, name: str, values: dict) -> bytes:
    """A call as the templates of this form write it, without its tags."""
    if form.kind == "json":
        return f'\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(values, ensure_ascii=False)}}}\n'.encode()
    parts = [f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in values.items()]
    return f"\n<function={name}>\n{''.join(parts)}</function>\n".encode()


def accepts(lark: str, tokens: list[int]) -> bool:
    matcher = LLMatcher(VOCABULARY, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.kind)
@settings(max_examples=60)
@given(values=arguments)
def test_what_the_template_writes_is_in_the_grammar_and_reads_back(form, values) -> None:
    made = calls(TOOLS, form)
    assert not made.loose
    text = written(form, "read_file", values)
    assert accepts(made.after_opening(), [*text, CLOSE])
    assert accepts(made.required(form), [OPEN, *text, CLOSE])
    parser = OutputParser(OutputStyle(tools=form.kind), tools=TOOLS)
    events = parser.feed(f"<tool_call>{text.decode()}</tool_call>") + parser.finish()
    assert [e.name for e in events if isinstance(e, CallStart)] == ["read_file"]
    assert json.loads("".join(e.text for e in events if isinstance(e, CallArguments))) == values


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.kind)
def test_what_breaks_the_schema_is_outside(form) -> None:
    lark = calls(TOOLS, form).after_opening()
    assert accepts(lark, [*written(form, "list_all", {}), CLOSE])
    assert accepts(lark, [*written(form, "free", {"any": "thing"}), CLOSE])
    for name, values in (
        ("read_files", {"path": "a"}),
        ("read_file", {}),
        ("read_file", {"path": "a", "limit": "ten"}),
        ("read_file", {"path": "a", "limit": -1}),
        ("read_file", {"path": "a", "mode": "binary"}),
        ("read_file", {"path": "a", "extra": "b"}),
        ("list_all", {"path": "a"}),
    ):
        assert not accepts(lark, [*written(form, name, values), CLOSE]), (name, values)
    assert not accepts(lark, [*written(form, "list_all", {})])


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.kind)
def test_a_forced_call_goes_on_where_the_prompt_stops(form) -> None:
    made = calls(TOOLS, form, "read_file")
    text = written(form, "read_file", {"path": "a"})
    name_at = text.index(b"read_file")
    assert accepts(made.rest(""), [*text[name_at:], CLOSE])
    begin = text.index(b'{"path"') if form.kind == "json" else text.index(b"<parameter")
    assert accepts(made.rest("read_file"), [*text[begin:], CLOSE])
    other = written(form, "list_all", {})
    assert not accepts(made.rest("read_file"), [*other[other.index(b"list_all") + 8 :], CLOSE])


def test_parallel_calls_are_allowed_when_one_is_required() -> None:
    form = FORMS[0]
    one = [OPEN, *written(form, "list_all", {}), CLOSE]
    assert accepts(calls(TOOLS, form).required(form), [*one, 10, *one])
    assert not accepts(calls(TOOLS, form).required(form), list(b"no call"))


def test_a_schema_that_cannot_be_expressed_is_loosened_and_named() -> None:
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"x": {"type": "integer", "minimum": "low"}}}}
    for form in FORMS:
        made = calls([{"type": "function", "function": odd}], form)
        assert made.loose == ("odd",)
        assert accepts(made.after_opening(), [*written(form, "odd", {"x": 5}), CLOSE])


def test_an_answer_is_json_of_its_schema_with_bounded_space() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    lark = answer(schema)
    for text in ('{"a": 1}', '\n\n{"a":1}', '{\n  "a": 1\n}'):
        assert accepts(lark, list(text.encode())), text
    for text in ("{}", '{"a": "1"}', '{"a": 1} x', "\n" * 9 + '{"a": 1}', '{"a":' + " " * 99 + "1}"):
        assert not accepts(lark, list(text.encode())), text
    assert check(answer({"type": "objec"})) and "\n" not in check(answer({"type": "objec"}))


def longest(schema: dict, text: str) -> int:
    """How many bytes of `text` an answer of `schema` may begin with."""
    matcher = LLMatcher(VOCABULARY, answer(schema), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode()))


NUMBERS = [
    {"type": "integer"},
    {"type": "number"},
    {"type": ["number", "null"]},
    {"anyOf": [{"type": "number"}, {"type": "string"}]},
]


@pytest.mark.parametrize("schema", NUMBERS)
@pytest.mark.parametrize("text", ["7" * 400, "-" + "7" * 400, "0." + "7" * 400, "0." + "0" * 400, "1e" + "7" * 400])
@pytest.mark.parametrize(
    "where", [lambda s: s, lambda s: {"type": "array", "items": s}, lambda s: {"$ref": "#/$defs/n", "$defs": {"n": s}}]
)
def test_a_number_without_bounds_ends(schema, text: str, where) -> None:
    outer = where(schema)
    assert longest(outer, ("[" if outer.get("type") == "array" else "") + text) < 40


@pytest.mark.parametrize("value", ["999999999999999999", "-999999999999999999", "1764460800000000", "3.141592653", "-0.5", "0"])
def test_the_numbers_people_send_fit(value: str) -> None:
    assert longest({"type": "number"}, value) == len(value)


def test_a_schema_with_its_own_bounds_keeps_them() -> None:
    assert longest({"type": "integer", "minimum": 0}, "7" * 30) == 30
    assert longest({"enum": [10**25, "minimum"]}, str(10**25)) == 26
