"""Clamping, as a table: rule, body before, body after."""

import msgspec
import pytest

from gateway.config import ClampRule
from gateway.edits import apply
from gateway.errors import Refusal
from gateway.policy.clamp import decide

CASES = [
    ({"temperature": {"max": 1}}, {"temperature": 1.7}, {"temperature": 1.0}),
    ({"temperature": {"min": 0.2}}, {"temperature": 0}, {"temperature": 0.2}),
    ({"temperature": {"max": 1}}, {"temperature": 0.5}, {"temperature": 0.5}),
    ({"temperature": {"max": 1}}, {}, {}),
    ({"temperature": {"default": 0.6}}, {}, {"temperature": 0.6}),
    ({"temperature": {"default": 0.6}}, {"temperature": None}, {"temperature": 0.6}),
    ({"temperature": {"default": 0.6}}, {"temperature": 0}, {"temperature": 0}),
    ({"seed": {"force": 7}}, {"seed": 1}, {"seed": 7}),
    ({"seed": {"force": 7}}, {}, {"seed": 7}),
    ({"stop": {"force": ["</s>"]}}, {}, {"stop": ["</s>"]}),
    ({"top_*": {"forbid": "drop"}}, {"top_k": 1, "top_p": 0.5, "tools": []}, {"tools": []}),
    (
        {"*": {"forbid": "drop"}},
        {"model": "m", "messages": [], "stream": True, "x": 1},
        {"model": "m", "messages": [], "stream": True},
    ),
    ({"chat_template_kwargs.x": {"force": 1}}, {"chat_template_kwargs": {"y": 2}}, {"chat_template_kwargs": {"y": 2, "x": 1}}),
    ({"chat_template_kwargs.*": {"forbid": "drop"}}, {"chat_template_kwargs": {"y": 2}}, {"chat_template_kwargs": {}}),
    ({"output_tokens": {"max": 100}}, {"max_tokens": 5000}, {"max_tokens": 100}),
    ({"output_tokens": {"max": 100}}, {"max_completion_tokens": 5000}, {"max_completion_tokens": 100}),
    (
        {"output_tokens": {"max": 100}},
        {"max_tokens": 500, "max_completion_tokens": 50},
        {"max_tokens": 100, "max_completion_tokens": 50},
    ),
    ({"output_tokens": {"max": 100}}, {}, {"max_completion_tokens": 100}),
    ({"output_tokens": {"max": 100, "default": 50}}, {}, {"max_completion_tokens": 50}),
    ({"temp*": {"max": 1}, "temperature": {"max": 2}}, {"temperature": 3}, {"temperature": 1}),
]


def ruled(rules: dict) -> dict[str, ClampRule]:
    return msgspec.convert(rules, dict[str, ClampRule])


@pytest.mark.parametrize(("rules", "before", "after"), CASES)
def test_table(rules, before, after) -> None:
    decisions = decide(before, ruled(rules))
    assert apply(before, [e for d in decisions for e in d.edits]) == after
    assert bool(decisions) == (before != after)
    assert decide(after, ruled(rules)) == ()  # a clamped body is within its bounds


@pytest.mark.parametrize("value", ["0.7", True, [1], {}])
def test_bounded_parameters_must_be_numbers(value) -> None:
    with pytest.raises(Refusal) as e:
        decide({"temperature": value}, ruled({"temperature": {"max": 1}}))
    assert e.value.status == 400 and e.value.param == "temperature"


def test_forbidden_and_unknown_parameters_are_refused_by_name() -> None:
    with pytest.raises(Refusal, match="logit_bias"):
        decide({"logit_bias": {}}, ruled({"logit_bias": {"forbid": "refuse"}}))
    with pytest.raises(Refusal, match="temprature"):
        decide({"temprature": 1}, {}, "refuse")
    (dropped,) = decide({"temprature": 1, "top_k": 2}, {}, "drop")
    assert dropped.edits[0].path == ("temprature",)
    assert decide({"temprature": 1}, {}) == ()
