"""Dialogues in the shape real coding agents give them: thousands of tokens of manual, many long tool schemas, notes around
the question, long files in results. The task inside is the same, and so is what the assistant says."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

from .dialogues import MAIN, Dialogue, pick_round, system_prompt
from .filler import filler, prose, shares
from .names import Names, spread
from .rounds import Round, Step
from .toolbox import Tool, make_toolset

AGENT_TOOLS = spread(
    "apply_patch update_plan Task TodoWrite NotebookEdit ExitPlanMode WebSearch Skill AskUserQuestion KillShell BashOutput "
    "write_stdin request_user_input list_mcp_resources read_mcp_resource spawn_agent wait_agent Glob multi_edit lsp"
)
NOTES = (
    "<system-reminder>\n{t}\n</system-reminder>\n",
    "<environment_context>\n  <cwd>{p}</cwd>\n  <shell>bash</shell>\n{t}\n</environment_context>\n",
    "# AGENTS.md instructions for {p}\n\n<INSTRUCTIONS>\n{t}\n</INSTRUCTIONS>\n",
    "<env>\n{t}\n</env>\n\n",
    "{t}\n\n",
)
SETTING_SKILLS = ("read_value", "find_then_read", "list_then_read", "retry_read", "read_two", "copy_value")


def long_description(n: Names, tool: Tool, size: int) -> Tool:
    """The same tool, its short description followed by a manual, and parameters nobody needs."""
    schema = copy.deepcopy(tool.schema)
    function = schema["function"]
    function["description"] += n.rng.choice(("\n\n", "\n\nUsage notes:\n", " ")) + filler(n, size)
    properties = function["parameters"]["properties"]
    for prop in properties.values():
        if n.rng.random() < 0.3:
            prop["description"] = (prop.get("description", "") + " " + prose(n, n.rng.randint(20, 200))).strip()
    for _ in range(n.rng.choice((0, 0, 1, 2, 4))):
        properties.setdefault("_".join((n.word(), n.word())), spare_parameter(n))
    return replace(tool, schema=schema)


def spare_parameter(n: Names) -> dict:
    about = {"description": prose(n, n.rng.randint(10, 150))}
    return about | n.rng.choice(
        (
            {"type": "string"},
            {"type": "boolean", "default": False},
            {"type": "integer", "minimum": 0},
            {"type": "string", "enum": [n.word(), n.word(), n.word()]},
            {"type": "array", "items": {"type": "object", "properties": {n.word(): {"type": "string"}}}},
            {"type": "object", "additionalProperties": True},
        )
    )


def strange_tool(n: Names, size: int) -> dict:
    """A tool no request here needs."""
    rng = n.rng
    name = rng.choice(AGENT_TOOLS) if rng.random() < 0.6 else f"mcp__{n.word()}__{n.ident(2)}"
    properties = {n.ident(2): spare_parameter(n) for _ in range(rng.randint(0, 5))}
    parameters = {"type": "object", "properties": properties, "required": [k for k in properties if rng.random() < 0.5]}
    return {"type": "function", "function": {"name": name, "description": filler(n, size), "parameters": parameters}}


def note(n: Names, size: int) -> str:
    return n.rng.choice(NOTES).format(t=filler(n, size), p=n.directory())


def longer_results(n: Names, r: Round, size: int) -> Round:
    """Settings stand somewhere inside a long file."""

    def stretched(step: Step) -> Step:
        if not all(call.kind == "read" for call in step.calls):
            return step
        around = [shares(n.rng, size // len(step.results), 2) for _ in step.results]
        texts = (f"{filler(n, a)}\n\n{text}\n\n{filler(n, b)}" for text, (a, b) in zip(step.results, around, strict=True))
        return replace(step, results=tuple(texts))

    return replace(r, steps=tuple(map(stretched, r.steps))) if r.skill in SETTING_SKILLS else r


def agent_dialogue(
    rng: random.Random, size: int, held_out: bool = False, noise: float = 0.0, rounds: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
) -> Dialogue:
    """One dialogue of about `size` characters: its rounds, and filler around them."""
    n = Names(rng, held_out, noise)
    zh, thinking = rng.random() < 0.3, rng.random() < 0.5
    made = [pick_round(n, zh) for _ in range(rng.choice(rounds))]
    needed = set().union(*(r.kinds for r in made))
    tools = make_toolset(needed, rng, zh, rng.choice((1, 4, 8, 12)), shell=rng.random() < 0.35)
    system, described, around, results = shares(rng, size, 4)
    many = rng.randint(0, 12)
    sizes = shares(rng, described, len(tools) + many)
    renamed: dict[str, Tool] = {}
    for (kind, tool), room in zip(tools.items(), sizes, strict=False):
        same = next((t for t in renamed.values() if t.name == tool.name), None)
        renamed[kind] = replace(tool, schema=same.schema) if same else long_description(n, tool, room)
    spare = [strange_tool(n, room) for room in sizes[len(tools) :]]
    head, tail = shares(rng, around, 2)
    made[0] = replace(made[0], user=note(n, head) + made[0].user) if rng.random() < 0.5 else made[0]
    at = rng.randrange(len(made))
    made[at] = longer_results(n, made[at], min(results, 12000))
    base = system_prompt(n, zh, MAIN)
    return Dialogue(
        (base + "\n\n" + filler(n, system)).strip(),
        renamed,
        tuple(made),
        thinking,
        zh,
        spare=tuple(spare),
        context=(note(n, tail),) if rng.random() < 0.5 else (),
    )
