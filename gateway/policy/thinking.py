"""Thinking: every spelling clients use means one thing, off | on | budget n; a policy may overrule it; one spelling is sent.

`read` finds what the client said, `resolve` applies the rule, `spell` writes the result for one upstream and removes every
spelling that would contradict it. Whether the model obeyed is checked on the answer, in `thinking_watch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from msgspec.structs import replace

from gateway.config import Deployment, ThinkingRule
from gateway.conversations import places
from gateway.edits import ABSENT, Edit, Path, apply, edits, look
from gateway.errors import Refusal
from gateway.turn import Decision, Thinking, Turn

OFF_WORDS = frozenset({"none", "off", "disabled", "disable", "false", "no"})
ON_WORDS = frozenset({"on", "enabled", "adaptive", "auto", "true"})
TEXT_SWITCHES = ("/no_think", "/think")  # Qwen3's soft switches; they count as the first or last word of a message

EFFORTS: tuple[Path, ...] = (("reasoning_effort",), ("reasoning", "effort"), ("output_config", "effort"))
SWITCHES: tuple[Path, ...] = (
    ("chat_template_kwargs", "enable_thinking"),
    ("chat_template_kwargs", "thinking"),
    ("extra_body", "chat_template_kwargs", "enable_thinking"),
    ("extra_body", "chat_template_kwargs", "thinking"),
    ("extra_body", "enable_thinking"),
    ("enable_thinking",),
    ("think",),
    ("reasoning", "enabled"),
)
OBJECTS: tuple[Path, ...] = (("thinking",), ("extra_body", "thinking"))
BUDGETS: tuple[Path, ...] = (
    ("reasoning", "max_tokens"),
    ("thinking_budget",),
    ("chat_template_kwargs", "thinking_budget"),
    ("extra_body", "thinking_budget"),
)
EVERY_SPELLING = (*EFFORTS, *SWITCHES, *OBJECTS, *BUDGETS)
ROOTS = frozenset(path[0] for path in EVERY_SPELLING)


def stage(turn: Turn) -> Turn:
    """Read, resolve, note. The body changes only when it is sent, because the spelling depends on the upstream."""
    if "messages" not in turn.body:
        return turn
    thinking, decisions = resolve(read(turn.body), turn.policy.thinking)
    if thinking != turn.thinking:
        turn = turn.but(thinking=thinking)
    return turn.decide(*decisions)


def read(body: Mapping[str, Any]) -> Thinking:
    """What the client said. Off anywhere wins over everything; a budget wins over on."""
    said = list(_said(body))
    effort = next((t.effort for t in said if t.effort), None)
    for mode in ("off", "budget", "on"):
        for thinking in said:
            if thinking.mode == mode:
                return replace(thinking, effort=None if mode == "off" else effort)
    return Thinking()


def _said(body: Mapping[str, Any]) -> Iterator[Thinking]:
    if not ROOTS.isdisjoint(body):
        yield from _said_in_parameters(body)
    if (switch := _text_switch(body)) is not None:
        mode = "off" if switch[1] == "/no_think" else "on"
        yield Thinking(mode=mode, source=f"client:{switch[1]}")


def _said_in_parameters(body: Mapping[str, Any]) -> Iterator[Thinking]:
    for path in (*EFFORTS, *SWITCHES):
        if (value := look(body, path)) is not ABSENT:
            yield _word(value, path)
    for path in OBJECTS:
        value = look(body, path)
        if isinstance(value, dict):
            budget = value.get("budget_tokens")
            if value.get("type") != "disabled" and _is_budget(budget):
                yield _budget(budget, path)
            else:
                yield _word(value.get("type"), (*path, "type"))
        elif value is not ABSENT:
            yield _word(value, path)
    for path in BUDGETS:
        if _is_budget(value := look(body, path)):
            yield _budget(value, path)


def _word(value: Any, path: Path) -> Thinking:
    """An effort, a switch or a type: off words are off, anything else that was said is on."""
    name = "client:" + ".".join(map(str, path))
    if value is None:
        return Thinking()
    if isinstance(value, bool):
        return Thinking(mode="on" if value else "off", source=name)
    if not isinstance(value, str):
        raise Refusal(400, f"`{name[7:]}` must be a word or true or false, not {str(value)[:40]!r}", param=name[7:])
    if value.lower() in OFF_WORDS:
        return Thinking(mode="off", source=name)
    return Thinking(mode="on", effort=None if value.lower() in ON_WORDS else value, source=name)


def _is_budget(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _budget(value: int, path: Path) -> Thinking:
    source = "client:" + ".".join(map(str, path))
    return Thinking(mode="budget", budget=value, source=source) if value else Thinking(mode="off", source=source)


def _text_switch(body: Mapping[str, Any]) -> tuple[Path, str] | None:
    """The soft switch that counts, (path of its text, switch): in the newest user message, else in a system message."""
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    for i in (*places(messages, "user")[-1:], *places(messages, "system")):
        content = messages[i].get("content")
        if type(content) is str and "think" not in content:
            continue
        for path in _texts(messages[i], i):
            text = look(body, path)
            if "think" not in text:
                continue
            text = text.strip()
            for switch in TEXT_SWITCHES:
                if _starts(text, switch) or _ends(text, switch):
                    return path, switch
    return None


def _texts(message: Mapping[str, Any], index: int) -> Iterator[Path]:
    content = message.get("content")
    if isinstance(content, str):
        yield ("messages", index, "content")
    elif isinstance(content, list):
        for k in range(len(content) - 1, -1, -1):
            if isinstance(content[k], dict) and isinstance(content[k].get("text"), str):
                yield ("messages", index, "content", k, "text")


def _starts(text: str, switch: str) -> bool:
    return text.startswith(switch) and not text[len(switch) : len(switch) + 1].strip()


def _ends(text: str, switch: str) -> bool:
    return text.endswith(switch) and not text[: -len(switch)][-1:].strip()


def resolve(said: Thinking, rule: ThinkingRule) -> tuple[Thinking, tuple[Decision, ...]]:
    """What holds, and the decisions that made it so: force over client over default, then the budget's bound."""
    now, notes = said, []
    if rule.force is not None:
        now = _ruled(rule.force, "policy:force", said)
        if (now.mode, now.budget) != (said.mode, said.budget):
            notes.append(Decision("thinking", "force", f"{said} -> {now}"))
    elif said.mode is None and rule.default is not None:
        now = _ruled(rule.default, "policy:default", said)
        notes.append(Decision("thinking", "default", str(now)))
    if rule.max_budget is not None and (now.mode == "on" or (now.budget or 0) > rule.max_budget):
        before, now = now, replace(now, mode="budget", budget=rule.max_budget)
        notes.append(Decision("thinking", "max_budget", f"{before} -> {now}"))
    return now, tuple(notes)


def _ruled(value: bool | int | str, source: str, said: Thinking) -> Thinking:
    if value in (0, "off"):  # False, YAML's own `off`, equals 0
        return Thinking(mode="off", source=source)
    if value is True or value == "on":
        return Thinking(mode="on", effort=said.effort, source=source)
    return Thinking(mode="budget", budget=int(value), effort=said.effort, source=source)


# What an upstream understands: our engine takes template arguments and any effort; vLLM, SGLang and llama-server (`plain`) take
# template arguments and three efforts; providers behind litellm take effort or a budget, OpenAI itself effort alone.
Form = Literal["template", "plain", "effort", "openai"]
FORMS = ("template", "plain", "effort", "openai")
# Words of other APIs for what a plain server knows by the nearest of low, medium and high.
PLAIN_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
# Budgets in tokens up to which OpenAI is asked for this effort; more than the last is `high`.
BUDGET_EFFORTS = ((2048, "low"), (8192, "medium"))


def form_of(deployment: Deployment) -> Form:
    """`model_info: {thinking: FORM}` says it for servers that differ from their kind (Ollama takes an effort)."""
    if deployment.info.get("thinking") in FORMS:
        return deployment.info["thinking"]
    if deployment.kind == "engine":
        return "template"
    if deployment.kind == "provider":
        return "effort"
    return "openai" if "api.openai.com" in deployment.api_base else "plain"


def spell(body: Mapping[str, Any], thinking: Thinking, form: Form) -> tuple[Decision, ...]:
    """The edits that make `body` say exactly `thinking` in the form an upstream takes. Empty when it does already."""
    if thinking.mode is None:
        return ()
    target = dict(_target(thinking, form))
    wanted = list(target.items())
    for path in () if ROOTS.isdisjoint(body) else EVERY_SPELLING:
        if path not in target and look(body, path) is not ABSENT and not any(t[: len(path)] == path for t in target):
            wanted.append((path, ABSENT))
    changes = list(edits(body, *wanted))
    changes += _emptied(body, changes) + _unsay(body, thinking)
    if not changes:
        return ()
    return (Decision("thinking", "spell", f"{thinking} ({thinking.source})", tuple(changes)),)


def _target(thinking: Thinking, form: Form) -> Iterator[tuple[Path, Any]]:
    templated = form in ("template", "plain")
    if thinking.mode == "budget" and form == "openai":
        yield ("reasoning_effort",), next((word for limit, word in BUDGET_EFFORTS if thinking.budget <= limit), "high")
    elif thinking.mode == "budget":
        yield ("thinking",), {"type": "enabled", "budget_tokens": thinking.budget}
    elif templated:
        yield ("chat_template_kwargs", "enable_thinking"), thinking.mode == "on"
    else:
        yield ("reasoning_effort",), "none" if thinking.mode == "off" else thinking.effort or "medium"
    if templated and thinking.effort and thinking.mode != "off":
        effort = thinking.effort
        yield ("reasoning_effort",), effort if form == "template" else PLAIN_EFFORTS.get(effort.lower(), effort)


def _emptied(body: Mapping[str, Any], changes: list[Edit]) -> list[Edit]:
    """Objects that held nothing but dropped spellings go with them."""
    out = []
    after = apply(body, changes)
    for path in [e.path for e in changes if e.after is ABSENT]:
        for parent in (path[:n] for n in range(len(path) - 1, 0, -1)):
            if look(after, parent) == {}:
                out.append(Edit(parent, look(body, parent), ABSENT))
                after = apply(after, out[-1:])
    return out


def _unsay(body: Mapping[str, Any], thinking: Thinking) -> list[Edit]:
    """A soft switch in the text that says the opposite of what holds is taken out of the text."""
    found = _text_switch(body)
    if found is None or (found[1] == "/no_think") == (thinking.mode == "off"):
        return []
    path, switch = found
    before = look(body, path)
    text = before.strip()
    after = text[len(switch) :].lstrip() if _starts(text, switch) else text[: -len(switch)].rstrip()
    return [Edit(path, before, after)]


def say_no_think(body: Mapping[str, Any]) -> tuple[Edit, ...]:
    """The stricter form of off: the soft switch as the last word of the newest user text, beside the template argument."""
    messages = body["messages"]
    for i in range(len(messages) - 1, -1, -1):
        if messages[i]["role"] == "user":
            path = next(_texts(messages[i], i), None)
            return edits(body, (path, look(body, path).rstrip() + " /no_think")) if path else ()
    return ()
