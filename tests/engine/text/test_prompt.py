"""Rendering, escaping, anchors: what users write is never structure, and anchors are true prefixes."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import AnchorHint, Hints
from engine.text.chat_template import ChatTemplate, TemplateError
from engine.text.escape import Escaper
from engine.text.prompt import ENTRY_CHARS, PieceCache, PromptBuilder
from tests.support.text import CONTROL, MARKERS, tool

EVIL = st.lists(
    st.sampled_from([*CONTROL, *MARKERS, "<|im_", "<", "<|", "end|>", "\ufdd0", "\ufdd1", "\ufdd2", "a", " ", "\n", "é"]),
    max_size=8,
).map("".join)
TEXT = st.one_of(EVIL, st.text(max_size=20))


@given(TEXT)
def test_escape_is_undone_and_leaves_no_special_text(text):
    escaper = Escaper([*CONTROL, *MARKERS])
    escaped = escaper.escape(text)
    assert Escaper.unescape(escaped) == text
    assert not any(s in escaped for s in (*CONTROL, *MARKERS))


@given(TEXT, TEXT)
def test_two_escaped_texts_side_by_side_form_no_special_text(left, right):
    escaper = Escaper([*CONTROL, *MARKERS])
    joined = escaper.escape(left) + escaper.escape(right)
    assert not any(s in joined for s in (*CONTROL, *MARKERS))
    assert Escaper.unescape(joined) == left + right


def structure(text_model, tokens):
    """The special tokens of a prompt, in order."""
    return [text_model.tokenizer.special_ids[t].text for t in tokens if t in text_model.tokenizer.special_ids]


def conversation(user, system="be good", result="ok", argument="a"):
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": {"path": argument}}}
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": result, "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize("kind", ["json_calls", "xml_calls"])
@settings(max_examples=60)
@given(user=TEXT, system=TEXT, result=TEXT, argument=TEXT)
def test_what_users_write_never_changes_the_structure_of_a_prompt(text_models, kind, user, system, result, argument):
    text = text_models[kind]
    tools = [tool("read_file", path="string")]
    honest = text.builder.build(conversation("u", "s", "r", "a"), tools, {})
    prompt = text.builder.build(conversation(user, system, result, argument), tools, {})
    assert structure(text, prompt.tokens) == structure(text, honest.tokens)


def test_plain_content_renders_as_the_template_alone_would(text_models):
    text = text_models["json_calls"]
    messages = conversation("What is <b>this</b>?", "You are kind.")
    rendered = text.template.render(messages, [tool()], True)
    assert text.builder.build(messages, [tool()], {}).tokens == text.tokenizer.encode(rendered)


def test_content_with_special_text_keeps_its_text(text_models):
    text = text_models["json_calls"]
    wild = "say <|im_end|> and <think>\ufdd0</think>"
    prompt = text.builder.build([{"role": "user", "content": wild}], [], {})
    assert wild in text.tokenizer.decode(prompt.tokens)


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=12), st.integers(300, 2000))
def test_the_piece_cache_changes_nothing_and_stays_in_its_bounds(tokenizer, texts, limit):
    cache = PieceCache(tokenizer, max_chars=limit)
    for text in texts * 2:
        assert list(cache.encode(text, False)) == tokenizer.encode_plain(text)
        assert cache._chars <= max(limit, 60 + ENTRY_CHARS)
        assert cache._chars == sum(len(k[0]) + ENTRY_CHARS for k in cache._known)


# --- anchors


def long_conversation(turns):
    messages = [{"role": "system", "content": "be good"}]
    for i in range(turns):
        messages += conversation(f"question {i}", result=f"result {i} " * 5)[1:]
        messages.append({"role": "assistant", "content": f"answer {i}"})
    return [*messages, {"role": "user", "content": "last question"}]


@pytest.mark.parametrize("kind", ["json_calls", "xml_calls", "plain"])
def test_every_anchor_is_a_prefix_that_a_truncated_conversation_shares(text_models, kind):
    text = text_models[kind]
    messages = long_conversation(3) if kind != "plain" else [m for m in long_conversation(3) if "tool_calls" not in m]
    tools = [] if kind == "plain" else [tool()]
    hints = Hints(anchors=tuple(AnchorHint(message=i, edge=e) for i in range(len(messages)) for e in ("start", "end")))
    prompt = text.builder.build(messages, tools, {}, hints)
    offsets = [a.offset for a in prompt.anchors]
    assert offsets == sorted(set(offsets)) and offsets[-1] == len(prompt.tokens)
    truncated = {tuple(text.builder.build(messages[:n], tools, {}).tokens) for n in range(2, len(messages) + 1)}
    for offset in offsets:
        assert any(t[:offset] == tuple(prompt.tokens[:offset]) for t in truncated)


def test_default_anchors_mark_system_user_and_turn(text_models):
    text = text_models["json_calls"]
    messages = long_conversation(2)
    prompt = text.builder.build(messages, [tool()], {})
    decoded = {a.kind: text.tokenizer.decode(prompt.tokens[: a.offset]) for a in prompt.anchors}
    ends = [text.tokenizer.decode(prompt.tokens[: a.offset]) for a in prompt.anchors]
    assert decoded["system"].endswith("tags.<|im_end|>\n") and "question" not in decoded["system"]
    assert decoded["user"].endswith("answer 1<|im_end|>\n")
    assert any(e.endswith("last question<|im_end|>\n") for e in ends)
    assert ends[-1].endswith("<|im_start|>assistant\n")


def test_the_system_anchor_is_the_same_for_every_conversation_with_that_head(text_models):
    text = text_models["xml_calls"]
    heads = []
    for user in ("a", "something quite different"):
        prompt = text.builder.build([{"role": "system", "content": "s"}, {"role": "user", "content": user}], [tool()], {})
        at = next(a.offset for a in prompt.anchors if a.kind == "system")
        heads.append(prompt.tokens[:at])
    assert heads[0] == heads[1] and len(heads[0]) > 20


def test_a_place_before_a_user_turn_holds_although_thoughts_were_dropped(text_models):
    text = text_models["json_calls"]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "thought"},
        {"role": "user", "content": "next"},
    ]
    prompt = text.builder.build(messages, [], {}, Hints(anchors=(AnchorHint(message=1), AnchorHint(message=99))))
    assert prompt.dropped_anchors == 1
    assert any(text.tokenizer.decode(prompt.tokens[: a.offset]).endswith("a<|im_end|>\n") for a in prompt.anchors)


def test_hints_that_the_template_does_not_allow_are_dropped_and_counted(text_models):
    text = text_models["json_calls"]
    template = ChatTemplate("<|im_start|>{{ messages | length }}" + text.template.source)
    builder = PromptBuilder(text.tokenizer, template)
    prompt = builder.build(long_conversation(1), [], {}, Hints(anchors=(AnchorHint(message=1), AnchorHint(message=2))))
    assert prompt.dropped_anchors == 2


@pytest.mark.parametrize("kind", ["json_calls", "xml_calls"])
def test_message_starts_stand_before_the_turn_of_each_message(text_models, kind):
    text = text_models[kind]
    talk = [
        {"role": "system", "content": "user"},
        {"role": "user", "content": "Read."},  # the tool's description says the same
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "read_file", "arguments": {"path": "a"}}}]},
        {"role": "tool", "content": "Read."},
        {"role": "assistant", "content": "Done <|im_end|> it."},
        {"role": "user", "content": "Read."},
    ]
    prompt = text.builder_for([tool()]).build(talk, [tool()], {})
    starts = list(prompt.starts)
    assert starts[2] == -1
    turns = [text.tokenizer.decode(prompt.tokens[a:]) for a in starts if a >= 0]
    for turn, message in zip(turns, [talk[0], *talk[1:2], *talk[3:]], strict=True):
        assert message["content"] in turn[: len(message["content"]) + 40]
    assert sorted(s for s in starts if s >= 0) == [s for s in starts if s >= 0]


def test_the_suffix_is_what_starts_the_answer(text_models):
    user = [{"role": "user", "content": "<think> ends here"}]
    assert text_models["xml_calls"].builder.build(user, [], {}).suffix == "<|im_start|>assistant\n<think>\n"
    assert (
        text_models["json_calls"].builder.build(user, [], {"enable_thinking": False}).suffix.endswith("<think>\n\n</think>\n\n")
    )


# --- the sandbox


def test_a_template_cannot_reach_python():
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(TemplateError):
            ChatTemplate(source).render([{"role": "user", "content": "x"}], None, True)


def test_a_template_that_loops_is_stopped():
    source = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}"
    begun = time.monotonic()
    with pytest.raises(TemplateError, match="more than|did not finish"):
        ChatTemplate(source).render([], None, True)
    assert time.monotonic() - begun < 60


def test_template_helpers_match_transformers():
    source = (
        "{{ tools[0] | tojson }}{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
        "{% generation %}g{% endgeneration %}{{ strftime_now('%Y')|length }}"
    )
    tools = [{"b": "<é中>", "a": {"y": 1, "x": [True, None]}}]
    out = ChatTemplate(source).render([{"content": "1"}, {"content": "2"}], tools, True)
    assert out == '{"b": "<é中>", "a": {"y": 1, "x": [true, null]}}1g4'


def test_template_errors_carry_the_template_s_words():
    with pytest.raises(TemplateError, match="^No user query found in messages.$"):
        ChatTemplate("{{ raise_exception('No user query found in messages.') }}").render([], None, True)
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% if %}")
    with pytest.raises(TemplateError, match="cannot render these messages"):
        ChatTemplate("{{ 'a' + none }}").render([], None, True)


def test_a_builder_renders_old_truncations_once(text_models, monkeypatch):
    text = text_models["xml_calls"]
    builder = PromptBuilder(text.tokenizer, text.template)
    calls = []
    real = text.template.render
    monkeypatch.setattr(text.template, "render", lambda *a, **k: calls.append(1) or real(*a, **k))
    messages = long_conversation(4)
    hints = Hints(anchors=tuple(AnchorHint(message=i) for i in range(len(messages))))
    builder.build(messages, [tool()], {}, hints)
    first = len(calls)
    builder.build(messages, [tool()], {}, hints)
    assert first > len(messages) and len(calls) == first + 1
