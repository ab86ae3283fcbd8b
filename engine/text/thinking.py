"""How a model thinks, found out by rendering its own chat template, and what each client's spelling asks for.

No table of model names: the tags are what the template writes around an old thought, the switch is the template argument
whose two values end the prompt differently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.text.chat_template import ChatTemplate, TemplateError
from engine.text.tokenizer import Tokenizer

_BOOLEAN_SWITCHES = ("enable_thinking", "thinking", "enable_reasoning", "thinking_mode_on")
# Switches with other values, tried when no boolean one works: (off value, on value)
_VALUE_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("thinking_mode", "disabled", "enabled"),
    ("thinking_mode", "chat", "thinking"),
    ("thinking_budget", 0, -1),
    ("reasoning_effort", "none", "high"),
    ("reasoning_effort", "no_think", "high"),
)
# Spellings for templates that keep no old thoughts, and so cannot be asked; tried in the template's text, then the vocabulary.
_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thinking>", "</thinking>"),
)
_ASK, _THOUGHT, _ANSWER = "QxQ7", "RxR7", "AxA7"
_TAG = r"([<\[][^\s<>\[\]]{2,40}[>\]])"


@dataclass(frozen=True)
class ThinkingStyle:
    """`open`/`close` are "" for a model without thought tags. `off` None = the template has no way to switch thinking off."""

    open: str = ""
    close: str = ""
    on: dict[str, Any] = field(default_factory=dict)
    off: dict[str, Any] | None = field(default_factory=dict)
    effort: bool = False  # the template reads `reasoning_effort`

    @property
    def thinks(self) -> bool:
        return bool(self.open)


def probe(template: ChatTemplate, tokenizer: Tokenizer) -> ThinkingStyle:
    """Find tags and switches. A template that renders nothing at all counts as one that does not think."""
    tags = _tags_around_thought(template) or next((p for p in _PAIRS if p[1] in template.source), None)
    effort = "reasoning_effort" in template.source
    if tags is None:
        free = next((p for p in _PAIRS if tokenizer.id_of(p[0]) is not None and tokenizer.id_of(p[1]) is not None), None)
        # The model knows the tags but the template never thinks: banning the opening token keeps it off.
        return ThinkingStyle(*free, effort=effort) if free else ThinkingStyle(effort=effort)
    if _opens_answers_too(template, tags[0]):
        return ThinkingStyle(off=None, effort=effort)
    switch = _switch(template, *tags)
    if switch is None:
        return ThinkingStyle(*tags, on={}, off=None, effort=effort)
    return ThinkingStyle(*tags, on=switch[1], off=switch[0], effort=effort)


def _render(template: ChatTemplate, messages: list[dict[str, Any]], generate: bool, **extra: Any) -> str | None:
    try:
        return template.render(messages, None, generate, **extra)
    except TemplateError:
        return None


def _tags_around_thought(template: ChatTemplate) -> tuple[str, str] | None:
    ask = {"role": "user", "content": _ASK}
    for key in ("reasoning_content", "thinking", "reasoning"):
        answer = {"role": "assistant", "content": _ANSWER, key: _THOUGHT}
        for extra in ({}, {"enable_thinking": True}, {"thinking": True}):
            text = _render(template, [ask, answer], False, **extra)
            found = re.search(rf"{_TAG}\s*{_THOUGHT}\s*{_TAG}", text or "")
            if found:
                return found[1], found[2]
    return None


def _opens_answers_too(template: ChatTemplate, tag: str) -> bool:
    """Channel formats write the same tag before thoughts and answers (gpt-oss: `<|message|>`); it opens no thought."""
    talk = [{"role": "user", "content": _ASK}, {"role": "assistant", "content": _ANSWER}]
    return re.search(rf"{re.escape(tag)}\s*{_ANSWER}", _render(template, talk, False) or "") is not None


def _state(text: str | None, open_: str, close: str) -> Literal["open", "closed", "none", "failed"]:
    """How the prompt ends behind the user's text: inside a thought, behind an empty one, or neither."""
    if text is None or _ASK not in text:
        return "failed"
    tail = text[text.rindex(_ASK) :]
    if tail.rstrip().endswith(close):
        return "closed"
    return "open" if tail.rfind(open_) > tail.rfind(close) else "none"


def _switch(template: ChatTemplate, open_: str, close: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(off arguments, on arguments), or None when no argument switches thinking off."""
    ask = [{"role": "user", "content": _ASK}]

    def end(**extra: Any) -> tuple[str | None, str]:
        text = _render(template, ask, True, **extra)
        return text, _state(text, open_, close)

    for name in _BOOLEAN_SWITCHES:
        (off, off_state), (on, on_state) = end(**{name: False}), end(**{name: True})
        if off != on and off_state in ("closed", "none") and on_state in ("open", "none"):
            return {name: False}, {name: True}
    for name, off_value, on_value in _VALUE_SWITCHES:
        (off, off_state), (_, on_state) = end(**{name: off_value}), end(**{name: on_value})
        if off_state == "closed" and on_state in ("open", "none"):
            return {name: off_value}, {name: on_value}
    text, state = end()
    # The prompt closes the thought by itself, whatever is asked: such a model never thinks.
    return ({}, {}) if text is not None and state == "closed" else None


# --- what a request asks for


@dataclass(frozen=True)
class ThinkingRequest:
    """The one internal form. `spelled` lists the request fields it came from."""

    mode: Literal["default", "off", "on"] = "default"
    budget: int | None = None  # tokens inside the thought, only with mode "on"
    effort: str | None = None
    spelled: tuple[str, ...] = ()


class ThinkingError(ValueError):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


_OFF_WORDS = {"none", "off", "disabled", "false", "no"}
_ON_WORDS = {"minimal", "low", "medium", "high", "xhigh", "max", "on", "enabled", "true", "adaptive", "auto", "default"}
_NEUTRAL_WORDS = {"adaptive", "auto", "default"}
_SOFT = re.compile(r"(?:^|\s)/(no_?think|think)(?=\s|$)")


def wanted(body: dict[str, Any], messages: list[dict[str, Any]]) -> ThinkingRequest:
    """Read every spelling. Off wins over on, a budget over a bare on. Raises ThinkingError on a wrong type or word."""
    votes: list[tuple[str, bool | None, int | None, str | None]] = []  # (field, on, budget, effort)
    for name in ("reasoning_effort", "reasoning", "thinking", "think", "enable_thinking", "thinking_budget", "output_config"):
        if body.get(name) is not None:
            votes.append(_vote(name, body[name]))
    extra = body.get("chat_template_kwargs") or {}
    for name in ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort"):
        if extra.get(name) is not None:
            votes.append(_vote(f"chat_template_kwargs.{name}", extra[name]))
    soft = _soft_switch(messages)
    if soft is not None:
        votes.append(("/think" if soft else "/no_think", soft, None, None))
    spelled = tuple(v[0] for v in votes)
    if any(v[1] is False for v in votes):
        return ThinkingRequest("off", spelled=spelled)
    budget = min((v[2] for v in votes if v[2] is not None), default=None)
    effort = next((v[3] for v in votes if v[3] is not None), None)
    on = budget is not None or any(v[1] for v in votes)
    return ThinkingRequest("on" if on else "default", budget, effort, spelled)


def _vote(name: str, value: Any) -> tuple[str, bool | None, int | None, str | None]:
    if isinstance(value, bool):
        return name, value, None, None
    if name.endswith("budget"):
        return _budget(name, value)
    if isinstance(value, str):
        return _word(name, value)
    if isinstance(value, dict):
        return _object(name, value)
    raise ThinkingError(f"{name} must be a word, a boolean or an object", name)


def _budget(name: str, value: Any) -> tuple[str, bool | None, int | None, str | None]:
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise ThinkingError(f"{name} must be a whole number of tokens, 0 or more (-1 = no limit)", name)
    return (name, True, None, None) if value == -1 else (name, value > 0, value or None, None)


def _word(name: str, value: str) -> tuple[str, bool | None, int | None, str | None]:
    word = value.lower()
    if word in _OFF_WORDS:
        return name, False, None, None
    if word in _ON_WORDS:
        return name, None if word in _NEUTRAL_WORDS else True, None, None if word in _NEUTRAL_WORDS else word
    raise ThinkingError(f"{name} {value!r} is not known; use none, minimal, low, medium, high, xhigh or max", name)


def _object(name: str, value: dict[str, Any]) -> tuple[str, bool | None, int | None, str | None]:
    """`thinking: {type, budget_tokens}`, `reasoning: {effort, max_tokens, enabled}`, `output_config: {effort}`."""
    on: bool | None = None
    budget: int | None = None
    effort: str | None = None
    for key in ("type", "effort", "enabled"):
        if value.get(key) is not None:
            if not isinstance(value[key], str | bool):
                raise ThinkingError(f"{name}.{key} must be a word or a boolean", f"{name}.{key}")
            _, vote, _, word = _vote(f"{name}.{key}", value[key])
            on = vote if on is not False and vote is not None else on
            effort = word if key == "effort" else effort
    for key in ("budget_tokens", "max_tokens"):
        if value.get(key) is not None:
            _, vote, budget, _ = _budget(f"{name}.{key}", value[key])
            on = vote is not False and on is not False
    return name, on, budget if on is not False else None, effort


def _soft_switch(messages: list[dict[str, Any]]) -> bool | None:
    """`/think` or `/no_think` as a word of its own in the last user message, else in the system message; the last one counts."""
    last_user = next((m for m in reversed(messages) if m.get("role") == "user"), None)
    system = next((m for m in messages if m.get("role") in ("system", "developer")), None)
    for message in (last_user, system):
        found = _SOFT.findall(message["content"]) if message else []
        if found:
            return found[-1] == "think"
    return None
