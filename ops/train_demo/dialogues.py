"""Dialogues: rounds put together with a system prompt, a toolset and a thinking mode, and turned into chat messages."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass

from .names import Names
from .rounds import Round, Step
from .skills_files import FILE_SKILLS, edit_text, find_definition, fresh_pairs, list_dir, read_value, settings, write_text
from .skills_steps import STEP_SKILLS, copy_value, list_then_read, read_two
from .skills_talk import TALK_SKILLS, calc_tool, message, record, table_in_text, title
from .toolbox import Tool, make_toolset

SYSTEM_EN = (
    "You are a helpful assistant.",
    "You are Moorage Demo, a small coding agent.",
    "You are a coding assistant. Use the tools when needed.",
    "You are an interactive CLI tool that helps users with software tasks.",
    "Be brief.",
    "Answer concisely and use tools to look at files.",
)
SYSTEM_ZH = ("你是一个有用的助手。", "你是编程助手，需要时使用工具。", "请简短回答。", "你是命令行编程代理。")
TITLE_EN = ("You are a title generator. You output ONLY a thread title. Nothing else.", "Generate a short title. No quotes.")
TITLE_ZH = ("你是标题生成器，只输出标题。",)
RULES = (
    "Keep your responses short.",
    "Do not add comments to code unless asked.",
    "Always use the file path as the user gave it.",
    "Never guess file contents; read the file first.",
    "When several files are needed, read them in one step.",
    "Prefer small edits over rewriting files.",
    "If a command fails, report the error.",
    "Do not commit changes unless the user asks you to.",
    "Follow the conventions of the project.",
    "Use the search tool to find where a name is defined.",
    "Your output is shown in a terminal.",
    "Do not use emojis.",
    "Be careful with destructive commands.",
    "The user may ask questions in English or Chinese.",
    "Answer in the language of the user.",
    "Stop when the task is complete.",
    "Before you change a file, look at it.",
    "Security: never print secrets.",
    "Paths are relative to the working directory unless they start with a slash.",
    "Tool results may be long; use only what matters.",
    "Test your changes when there is a test command.",
    "If you are unsure, ask the user.",
)
FACT_LINES = (
    "Working directory: {p}",
    "Platform: linux",
    "Is directory a git repo: yes",
    "Today's date: 2026-{m}-{d}",
    "Current branch: {w}",
    "Model: moorage-demo",
    "Main language: {w}",
    "The project is called {w}.",
    "The owner is {w}.",
    "Open file: {f}",
)


def scattered(name: str) -> int:
    return zlib.crc32(name.encode())


@dataclass(frozen=True)
class Dialogue:
    """Everything needed to render, train on and judge one conversation."""

    system: str
    tools: dict[str, Tool]
    rounds: tuple[Round, ...]
    thinking: bool
    zh: bool
    spare: tuple[dict, ...] = ()  # schemas no round needs
    context: tuple[str, ...] = ()  # user messages before the first request, as some agents send them

    @property
    def tool_schemas(self) -> list[dict]:
        """Every offered tool once, in an order that does not tell which are needed."""
        schemas = {s["function"]["name"]: s for s in (*self.spare, *(tool.schema for tool in self.tools.values()))}
        return list(schemas.values()) if not self.spare else [schemas[name] for name in sorted(schemas, key=scattered)]

    def opening(self) -> list[dict]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [{"role": "user", "content": text} for text in self.context]

    def messages(self) -> list[dict]:
        messages = self.opening()
        for r in self.rounds:
            messages += self.round_messages(r)
        return messages

    def round_messages(self, r: Round) -> list[dict]:
        messages: list[dict] = [{"role": "user", "content": r.user}]
        for step in r.steps:
            messages.append(self.call_message(step))
            messages += [{"role": "tool", "content": result} for result in step.results]
        final = {"role": "assistant", "content": r.answer}
        return messages + [final | ({"reasoning_content": r.thought} if self.thinking else {})]

    def call_message(self, step: Step) -> dict:
        calls = [
            {"type": "function", "function": {"name": self.tools[c.kind].name, "arguments": self.tools[c.kind].arguments(c)}}
            for c in step.calls
        ]
        message: dict = {"role": "assistant", "content": "", "tool_calls": calls}
        return message | ({"reasoning_content": step.thought} if self.thinking else {})


@dataclass(frozen=True)
class Mix:
    """What a stage of training sees: rounds per dialogue, extra tools, and the length of distracting text."""

    rounds: tuple[int, ...] = (1, 2, 3, 4, 5)
    extra_tools: tuple[int, ...] = (0, 0, 1, 2, 4)
    padding: float = 0.2
    padding_lines: tuple[int, int] = (2, 10)
    thinking: float = 0.5


EARLY = Mix(rounds=(1, 1, 2, 3), extra_tools=(0, 0, 0, 1), padding=0.03, thinking=0.4)
MAIN = Mix()
LONG = Mix(rounds=(1, 2, 3, 6, 12), extra_tools=(3, 5, 8, 10), padding=0.8, padding_lines=(10, 120))


def system_prompt(n: Names, zh: bool, mix: Mix) -> str:
    rng = n.rng
    base = "" if rng.random() < 0.15 else rng.choice(SYSTEM_ZH if zh and rng.random() < 0.7 else SYSTEM_EN)
    if rng.random() >= mix.padding:
        return base
    lines = []
    for _ in range(rng.randint(*mix.padding_lines)):
        roll = rng.random()
        if roll < 0.6:
            lines.append(rng.choice(("- ", "", "")) + rng.choice(RULES))
        elif roll < 0.9:
            lines.append(
                rng.choice(FACT_LINES).format(
                    p=n.directory(), m=rng.randint(10, 12), d=rng.randint(10, 28), w=n.word(), f=n.path()
                )
            )
        else:
            lines.append(settings(n, fresh_pairs(n, 1, 3)))
    return (base + "\n\n" + "\n".join(lines)).strip()


def pick_round(n: Names, zh: bool) -> Round:
    makers, weights = zip(*(FILE_SKILLS + STEP_SKILLS + TALK_SKILLS), strict=True)
    return n.rng.choices(makers, weights)[0](n, zh)


def title_dialogue(n: Names, zh: bool, thinking: bool) -> Dialogue:
    """A request for a title stands alone, without tools, as agents send it."""
    r = title(n, zh, pick_round(n, zh))
    return Dialogue(n.rng.choice(TITLE_ZH if zh else TITLE_EN), {}, (r,), thinking, zh)


def make_dialogue(
    rng: random.Random,
    mix: Mix = MAIN,
    held_out: bool = False,
    zh: bool | None = None,
    thinking: bool | None = None,
    noise: float = 0.0,
) -> Dialogue:
    """One random dialogue. The same generator state always gives the same dialogue."""
    n = Names(rng, held_out, noise)
    zh = rng.random() < 0.4 if zh is None else zh
    thinking = rng.random() < mix.thinking if thinking is None else thinking
    if rng.random() < 0.04:
        return title_dialogue(n, zh, thinking)
    count = rng.choice(mix.rounds)
    if thinking and rng.random() < 0.7:
        count = min(count, 2)  # only the last round keeps its thoughts, so short dialogues teach thinking faster
    rounds = tuple(pick_round(n, zh) for _ in range(count))
    needed = set().union(*(r.kinds for r in rounds))
    tools = make_toolset(needed, rng, zh, rng.choice(mix.extra_tools))
    return Dialogue(system_prompt(n, zh, mix), tools, rounds, thinking, zh)


DRILLS = (
    calc_tool,
    message,
    message,
    table_in_text,
    table_in_text,
    copy_value,
    copy_value,
    copy_value,
    copy_value,
    copy_value,
    list_then_read,
    list_then_read,
    list_then_read,
    list_then_read,
    find_definition,
    read_value,
    record,
    edit_text,
    write_text,
    list_dir,
    list_dir,
    read_two,
    read_two,
    read_two,
)


def make_drill(rng: random.Random, noise: float = 0.0) -> Dialogue:
    """Several rounds of one of the harder skills, with few tools: practice for training only."""
    n, zh, thinking = Names(rng, noise=noise), rng.random() < 0.4, rng.random() < 0.6
    if rng.random() < 0.12:
        return title_dialogue(n, zh, thinking)
    skill = rng.choice(DRILLS)
    rounds = tuple(skill(n, zh) for _ in range(1 if thinking and rng.random() < 0.5 else rng.randint(1, 4)))
    needed = set().union(*(r.kinds for r in rounds))
    tools = make_toolset(needed, rng, zh, rng.choice((0, 0, 1, 2)), shell=rng.random() < 0.2)
    return Dialogue(system_prompt(n, zh, MAIN), tools, rounds, thinking, zh)


def dialogue_json(d: Dialogue) -> str:
    return json.dumps({"messages": d.messages(), "tools": d.tool_schemas, "thinking": d.thinking}, ensure_ascii=False)
