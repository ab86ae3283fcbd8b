"""What a request allows to be sampled, as llguidance Lark grammars: JSON answers, and tool calls made from the offered tools.

Pure text in, text out; `engine.grammar` follows them token by token. A tool whose schema the library cannot express falls back to
a call with any arguments, and its name is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# spaces and newlines between the parts of a JSON answer; unbounded, a model that is unsure fills the context with them
WHITESPACE = r"[ \n]{0,40}"
# how Python's json.dumps and the templates write arguments: a call then reads the same when the client sends it back
AS_DUMPED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
ANY_OBJECT = {"type": "object"}
# text up to the first closing tag of a parameter
VALUE = r"VALUE: /(?s:.*)\n<\/parameter>\n/ & ~/(?s:.*)\n<\/parameter>\n(?s:.+)/"
SPACE = r"SPACE: /[ \n]{1,4}/"
KEY = r"KEY: /[^>\n]{1,64}/"
CACHED = 256  # tools whose rules are kept: an agent offers the same few dozen in every request


# A number without bounds is the commonest way to fill a context: one digit for ever. llguidance can write a range of integers
# down up to about here; a schema with bounds of its own keeps them.
MOST = 10**18
DECIMALS = 1e-9
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")
NUMERIC = {"integer", "number"}


def bounded(schema: Any) -> Any:
    """A JSON schema in which every number that had no bounds ends: at most 18 digits before the point, 9 behind, no exponent."""
    if isinstance(schema, list):
        return [bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # what stands in enum, const, default and examples is data, not schema
    own = {k: v if k in ("enum", "const", "default", "examples") else bounded(v) for k, v in schema.items()}
    kinds = schema.get("type")
    numeric = NUMERIC & set(kinds if isinstance(kinds, list) else [kinds] if isinstance(kinds, str) else [])
    if not numeric or any(key in schema for key in BOUNDS):
        return own
    limits: dict[str, Any] = {"minimum": -MOST, "maximum": MOST}
    return own | limits | ({"multipleOf": DECIMALS} if "number" in numeric else {})


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def check(lark: str) -> str:
    """Why a grammar cannot be used, in one line; "" when it can."""
    from llguidance import LLMatcher  # not before a request needs it

    return first_line(LLMatcher.validate_grammar(lark))


def answer(schema: dict[str, Any]) -> str:
    """The whole answer is one JSON value of `schema`."""
    own = bounded({k: v for k, v in schema.items() if k not in ("$schema", "$id")})
    body = json.dumps({**own, "x-guidance": {"whitespace_pattern": WHITESPACE}})
    return f"start: SPACE? json\n{SPACE}\njson: %json {body}\n"


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls: `kind` json | xml, and the special tokens around one call."""

    kind: str
    open_id: int
    close_id: int


@dataclass(frozen=True)
class Calls:
    """The grammar's rules for calls of some tools. `loose` names tools whose schema could not be expressed."""

    rules: str
    loose: tuple[str, ...]

    def after_opening(self) -> str:
        """One call, its opening token already sampled."""
        return f"start: body\n{self.rules}"

    def required(self, form: CallForm) -> str:
        """The answer is one or more calls and nothing else."""
        return f"start: SPACE? call (SPACE? call)*\ncall: <[{form.open_id}]> body\n{SPACE}\n{self.rules}"

    def rest(self, name: str) -> str:
        """What follows when the prompt already holds the call up to where the name begins, or past it when `name` is given."""
        return f"start: {'rest' if not name else 'named'}\n{self.rules}"


def calls(tools: Iterable[dict[str, Any]], form: CallForm, name: str = "") -> Calls:
    """Rules `body`, `rest` (from the name on) and, with `name`, `named` (behind it) over `tools` in OpenAI's form."""
    write = _json_tool if form.kind == "json" else _xml_tool
    functions = [t["function"] for t in tools]
    parts, loose = [], []
    for i, function in enumerate(functions):
        text, exact = write(i, json.dumps(function, sort_keys=False))
        parts.append(text)
        loose += [] if exact else [function["name"]]
    names = [f["name"] for f in functions]
    chosen = names.index(name) if name else 0
    heads = " | ".join(f"head{i} tail{i}" for i in range(len(names)))
    opening, ending = ('{"name": "', "}") if form.kind == "json" else ("<function=", "</function>")
    end = f'{_literal(ending)} "\\n"? <[{form.close_id}]>'
    frame = [
        f'body: "\\n"? {_literal(opening)} rest',
        f"rest: ({heads}) {end}",
        f"named: tail{chosen} {end}",
        VALUE,
        KEY,
    ]
    return Calls("\n".join([*frame, *parts]) + "\n", tuple(loose))


# --- one tool: rule `head{i}` is its name as it stands in a call, `tail{i}` its arguments; (rules, whether they are exact)


@lru_cache(CACHED)
def _json_tool(i: int, function: str) -> tuple[str, bool]:
    tool = json.loads(function)
    head = _literal(json.dumps(tool["name"])[1:] + ', "arguments": ')
    exact, loose = ([f"tail{i}: %json {json.dumps({**s, 'x-guidance': AS_DUMPED})}"] for s in (_parameters(tool), ANY_OBJECT))
    return _checked(i, head, exact, loose)


@lru_cache(CACHED)
def _xml_tool(i: int, function: str) -> tuple[str, bool]:
    tool = json.loads(function)
    loose = [f'tail{i}: ("<parameter=" KEY ">\\n" VALUE)*']
    schema = _parameters(tool)
    anything = not schema.get("properties") and schema.get("additionalProperties", True)
    exact = loose if anything else _xml_parameters(i, schema)
    return _checked(i, _literal(f"{tool['name']}>\n"), exact, loose)


def _checked(i: int, head: str, exact: list[str], loose: list[str]) -> tuple[str, bool]:
    """The exact rules where the library can express them, else the loose ones."""
    why = check("\n".join([f"start: tail{i}", *exact, VALUE, KEY]))
    return "\n".join([f"head{i}: {head}", *(loose if why else exact)]), not why


def _xml_parameters(i: int, schema: dict[str, Any]) -> list[str]:
    """Parameters in the schema's order, the optional ones optional."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    order = " ".join(f"p{i}_{n}{'' if name in required else '?'}" for n, name in enumerate(properties))
    rules = [f"tail{i}: {order}" if order else f'tail{i}: ""']
    for n, (name, each) in enumerate(properties.items()):
        rules.append(f"p{i}_{n}: {_literal(f'<parameter={name}>' + chr(10))} v{i}_{n}")
        rules.append(f"v{i}_{n}: {_xml_value(each, shared)}")
    return rules


def _xml_value(schema: Any, shared: dict[str, Any]) -> str:
    """Text as it is; everything else as JSON."""
    end = _literal("\n</parameter>\n")
    schema = schema if isinstance(schema, dict) else {}
    options = schema.get("enum")
    if options and all(isinstance(option, str) for option in options):
        return f"({' | '.join(_literal(option) for option in options)}) {end}"
    if schema.get("type") in ("integer", "number", "boolean", "object", "array"):
        return f"%json {json.dumps({**schema, **shared, 'x-guidance': AS_DUMPED})} {end}"
    return "VALUE"


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema, without the names by which a validator would look it up."""
    schema = tool.get("parameters")
    schema = {k: v for k, v in schema.items() if k not in ("$schema", "$id")} if isinstance(schema, dict) else {}
    return bounded(schema) or ANY_OBJECT


def _literal(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)
