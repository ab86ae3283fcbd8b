"""Tags and switches are found in the template; every client spelling means one of off, on, budget."""

import pytest

from engine.text.chat_template import ChatTemplate
from engine.text.text_model import tool_format
from engine.text.thinking import ThinkingError, probe, wanted


class NoTokens:
    def id_of(self, text):
        return None


def style(source):
    return probe(ChatTemplate(source), NoTokens())


def test_switches_are_found_in_the_test_templates(text_models):
    found = {name: model.thinking for name, model in text_models.items()}
    for name in ("json_calls", "xml_calls"):
        assert (found[name].open, found[name].close) == ("<think>", "</think>")
        assert (found[name].off, found[name].on) == ({"enable_thinking": False}, {"enable_thinking": True})
    assert found["always_thinks"].thinks and found["always_thinks"].off is None
    # the template never thinks, but the vocabulary has the tags: banning the opening token is enough
    assert found["plain"].thinks and found["plain"].off == {}


USER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("tail", "open_", "off"),
    [
        ("{% if thinking %}<think>{% else %}</think>{% endif %}", "<think>", {"thinking": False}),
        (
            "{% if reasoning_effort == 'none' %}<think></think>{% else %}<think>{% endif %}",
            "<think>",
            {"reasoning_effort": "none"},
        ),
        ("{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}", "<seed:think>", {"thinking_budget": 0}),
        ("<think>\n\n</think>\n\n", "<think>", {}),
        ("<think>\n{# closes with </think> #}", "<think>", None),
        ("", "", {}),
    ],
)
def test_the_switch_is_whatever_closes_the_thought(tail, open_, off):
    found = style(USER + "{% if add_generation_prompt %}" + tail + "{% endif %}")
    assert (found.open, found.off) == (open_, off)


def test_tags_come_from_how_old_thoughts_are_written():
    thought = "{% if m.reasoning_content %}<inner>{{ m.reasoning_content }}</inner>{% endif %}"
    source = "{% for m in messages %}" + thought + "{{ m.content }}{% endfor %}"
    assert style(source).open == "<inner>"


def test_a_channel_format_is_not_taken_for_tags():
    thought = "{% if m.thinking %}<|analysis|><|message|>{{ m.thinking }}<|end|>{% endif %}"
    source = "{% for m in messages %}" + thought + "<|final|><|message|>{{ m.content }}<|end|>{% endfor %}"
    found = style(source)
    assert found.open == "" and found.off is None


def test_tool_formats_of_the_test_templates(text_models):
    formats = {name: model.output.tools for name, model in text_models.items()}
    assert formats["json_calls"] == "json" and formats["xml_calls"] == "xml"
    assert text_models["json_calls"].shows_tools and not text_models["plain"].shows_tools
    call = "{% for m in messages %}{% for c in m.tool_calls or [] %}TAG{{ c.function | tojson }}END{% endfor %}{% endfor %}"
    mistral = call.replace("TAG", "[TOOL_CALLS][").replace("END", "]")
    assert tool_format(ChatTemplate(mistral))[0] == "mistral"
    assert tool_format(ChatTemplate(call.replace("TAG", "<function_call>").replace("END", "</function_call>"))) == (
        "json", "<function_call>", "</function_call>",
    )  # fmt: skip
    assert tool_format(ChatTemplate(call.replace("TAG", "<|header|>").replace("END", "<|eot|>")))[0] == "bare"


def test_turn_ends_are_stop_tokens(text_models):
    for model in text_models.values():
        assert model.tokenizer.id_of("<|im_end|>") in model.stop_ids


def user(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"thinking_budget": 0}},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        {"thinking": False},
        {"think": False},
        {"enable_thinking": False},
        {"thinking_budget": 0},
        {"output_config": {"effort": "none"}},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_spellings_of_off(body):
    asked = wanted(body, user("x"))
    assert (asked.mode, asked.budget) == ("off", None) and asked.spelled


@pytest.mark.parametrize(
    ("body", "mode", "budget", "effort"),
    [
        ({}, "default", None, None),
        ({"reasoning_effort": "low"}, "on", None, "low"),
        ({"thinking": {"type": "adaptive"}}, "default", None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 512}}, "on", 512, None),
        ({"reasoning": {"max_tokens": 100, "effort": "high"}}, "on", 100, "high"),
        ({"output_config": {"effort": "medium"}}, "on", None, "medium"),
        ({"think": True}, "on", None, None),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 7}}, "on", 7, None),
        ({"thinking_budget": -1}, "on", None, None),
        ({"thinking_budget": 50, "thinking": {"type": "enabled", "budget_tokens": 20}}, "on", 20, None),
    ],
)
def test_spellings_of_on_and_budget(body, mode, budget, effort):
    asked = wanted(body, user("x"))
    assert (asked.mode, asked.budget, asked.effort) == (mode, budget, effort)


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("hi /no_think", "off"),
        ("/nothink hi", "off"),
        ("a /think b", "on"),
        ("see /no_thinking", "default"),
        ("a/no_think", "default"),
        ("/no_think then /think", "on"),
    ],
)
def test_soft_switches_in_the_last_user_message(text, mode):
    assert wanted({}, [*user("/no_think"), {"role": "assistant", "content": "k"}, *user(text)]).mode == mode


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"thinking": {"type": 7}}, "thinking.type"),
        ({"thinking": {"budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"thinking_budget": -5}, "thinking_budget"),
        ({"chat_template_kwargs": {"thinking": 3}}, "chat_template_kwargs.thinking"),
    ],
)
def test_wrong_spellings_name_their_field(body, param):
    with pytest.raises(ThinkingError) as e:
        wanted(body, user("x"))
    assert e.value.param == param
