"""Is this tool call one the agent can run? Names, JSON, schema; repair when the repaired value validates.

Pure: a `Toolbox` is built from a request's tools, `check` takes one finished call and says what holds. What is done about a bad
call (ask again, refuse, pass) is `toolcheck_watch`'s, the filter on the answer.
"""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import json_repair
import jsonschema_rs
import orjson

from engine.protocol import log_line
from gateway.config import ToolRule
from gateway.conversations import folded
from gateway.edits import edits
from gateway.errors import Refusal
from gateway.tools import derived
from gateway.turn import Decision, Turn

log = logging.getLogger("moorage")

# Compiled validators kept. An agent brings 10-30 tools, a team has a handful of agents and their versions.
KEEP_VALIDATORS = 512
# Of larger schemas only the outline is compiled. Compiling takes 0.1 ms a KiB and lets no other thread run, so this is what other
# streams may be held up by, once a schema; the largest tool seen in an agent has 12 KiB.
MAX_SCHEMA_BYTES = 40 << 10

NESTING = (dict, list)  # no `dict | list`, which is made anew for every value looked at
WRITABLE_DEPTH = 250  # orjson writes 254 levels


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds for one call. With `problem` "" it may go on; `arguments` are JSON text; `repairs` say what was changed."""

    name: str
    arguments: str
    problem: str = ""
    repairs: tuple[str, ...] = ()


class Validators:
    """Compiled JSON schemas by their bytes; least recently used ones go first. No schema is ever fetched from anywhere."""

    def __init__(self, keep: int = KEEP_VALIDATORS) -> None:
        self._keep = keep
        self._known: OrderedDict[bytes, jsonschema_rs.Validator | None] = OrderedDict()

    def get(self, schema: Any) -> jsonschema_rs.Validator | None:
        """The validator, or None for a schema that cannot be used (not a schema, refers elsewhere, too large even in outline)."""
        if not isinstance(schema, dict | bool):
            return None
        key = orjson.dumps(schema)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if len(key) > MAX_SCHEMA_BYTES:
            log.warning(
                "%s", log_line("large tool schema", kb=len(key) >> 10, checked="outline", limit_kb=MAX_SCHEMA_BYTES >> 10)
            )
            schema = outline(schema)
        self._known[key] = found = None if schema is None else _compile(schema)
        if len(self._known) > self._keep:
            self._known.popitem(last=False)
        return found


def outline(schema: Any) -> dict[str, Any] | None:
    """A smaller schema that accepts at least whatever `schema` accepts: which properties there are, must be, and their types.

    None when even that is larger than MAX_SCHEMA_BYTES.
    """
    if not isinstance(schema, dict) or "$ref" in schema:
        return None
    declared = schema.get("properties")
    declared = declared if isinstance(declared, dict) else {}
    short = {name: schema[name] for name in ("type", "required") if name in schema}
    typed = (k for k, v in declared.items() if isinstance(v, dict) and "type" in v and "$ref" not in v)
    short["properties"] = dict.fromkeys(declared, True) | {k: {"type": declared[k]["type"]} for k in typed}
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        short["additionalProperties"] = False
    return short if len(orjson.dumps(short)) <= MAX_SCHEMA_BYTES else None


def _compile(schema: dict[str, Any] | bool) -> jsonschema_rs.Validator | None:
    try:
        return jsonschema_rs.validator_for(schema, offline=True)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError):
        return None


class Toolbox:
    """The tools of one request by name. Later tools of the same name win, as in the engines' templates."""

    def __init__(self, tools: Any, rule: ToolRule, validators: Validators) -> None:
        self._rule = rule
        self._validators = validators
        self._tools = tools
        self._schemas = derived(tools, "schemas", lambda: _schemas(tools))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._schemas)

    def check(self, name: str, arguments: str) -> Verdict:
        """Judge one finished call. Arguments must be a JSON object that its tool's schema accepts."""
        rule, repairs = self._rule, []
        known = name if name in self._schemas else self._similar(name) if rule.repair else None
        if known is None:
            return Verdict(name, arguments, f"there is no tool {name[:64]!r}; the tools are {', '.join(self.names)[:400]}")
        if known != name:
            repairs.append(f"name {name[:64]!r} became {known!r}")
        if len(arguments) > rule.max_kb << 10:
            return Verdict(known, arguments, f"the arguments have {len(arguments) >> 10} KiB, the limit is {rule.max_kb}")
        validator = derived(self._tools, ("validator", known), lambda: self._validators.get(self._schemas[known]))
        value, broken = _parse(arguments)
        if broken and rule.repair:
            value = _repaired(arguments)
            repairs.append("the arguments were broken JSON" if arguments.strip() else "empty arguments became {}")
        if not isinstance(value, dict):
            return Verdict(known, arguments, broken or "the arguments are not a JSON object")
        if _depth(value) > rule.max_depth:
            return Verdict(known, arguments, f"the arguments are nested deeper than {rule.max_depth}")
        problem = _problem(validator, value)
        if problem and rule.repair:
            coerced = _coerce(value, self._schemas[known])
            if coerced != value and not _problem(validator, coerced):
                value, problem = coerced, ""
                repairs.append("argument types were put right")
        if problem:
            return Verdict(known, arguments, problem)
        return Verdict(known, orjson.dumps(value).decode() if repairs else arguments, "", tuple(repairs))

    def _similar(self, name: str) -> str | None:
        """The one tool that is meant: other case, or a namespace before it (`functions.read`)."""
        want = name.strip().lower()
        tails = {want, want.rpartition(".")[2], want.rpartition(":")[2], want.rpartition("/")[2]}
        found = [n for n in self._schemas if n.lower() in tails]
        return found[0] if len(found) == 1 else None


def _schemas(tools: Any) -> dict[str, Any]:
    functions = (t.get("function") for t in tools if isinstance(t, dict)) if isinstance(tools, list) else ()
    return {f["name"]: f.get("parameters") for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)}


def _parse(text: str) -> tuple[Any, str]:
    """(value, "") or (None, what is wrong)."""
    try:
        return orjson.loads(text), ""
    except orjson.JSONDecodeError as e:
        return (
            None,
            f"the arguments are not valid JSON: {e.msg} at character {e.pos}" if text.strip() else "the arguments are empty",
        )


def _repaired(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        # Once more through JSON: a repaired value may hold lone surrogates or infinities, which no JSON text can carry.
        value = orjson.loads(json.dumps(json_repair.loads(text, skip_json_loads=True)))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _depth(value) <= WRITABLE_DEPTH else None


def _depth(value: Any) -> int:
    """Nesting of objects and lists; iterative, so that no depth breaks it."""
    deepest, todo = 0, [(value, 1)]
    while todo:
        item, depth = todo.pop()
        if isinstance(item, NESTING):
            deepest = max(deepest, depth)
            todo += [(v, depth + 1) for v in (item.values() if isinstance(item, dict) else item)]
    return deepest


def _problem(validator: jsonschema_rs.Validator | None, value: Any) -> str:
    """The first few schema errors as one line, "" if there are none (or nothing to check against)."""
    if validator is None:
        return ""
    found = []
    for error in validator.iter_errors(value):
        where = "/".join(map(str, error.instance_path))
        found.append(f"{where}: {error.message[:200]}" if where else error.message[:200])
        if len(found) == 3:
            break
    return "the arguments do not match the schema: " + "; ".join(found) if found else ""


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # `nan` is a word here; JSON has no such number and would say null
        raise ValueError(text)
    return value


READERS = {"integer": int, "number": _number, "boolean": {"true": True, "false": False}.get}


def _coerce(value: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Strings where the schema declares another type, read as that type: what models do that write every argument as text."""
    declared = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(declared, dict):
        return value
    return {k: _as(v, declared.get(k)) if isinstance(v, str) else v for k, v in value.items()}


def _as(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in READERS:
        try:
            value = READERS[kind](text.strip().lower())
        except ValueError:
            return text
        return text if value is None else value
    if kind in ("object", "array"):
        value, _ = _parse(text)
        return value if isinstance(value, dict if kind == "object" else list) else text
    return None if kind == "null" and text.strip().lower() in ("null", "none", "") else text


# --- the history a client sends back


def history(turn: Turn) -> Turn:
    """A stage: earlier calls in the conversation must be calls. Objects become JSON text, broken JSON is repaired or refused."""
    return turn.decide(*folded(turn.body.get("messages") or (), "past calls", (), partial(_past_calls, turn.body)))


def _past_calls(body: Mapping[str, Any], before: tuple[Decision, ...], first: int) -> tuple[Decision, ...]:
    decisions = list(before)
    messages = body.get("messages") or ()
    for i, message in enumerate(islice(messages, first, None), first):
        calls = message.get("tool_calls")
        if calls is None:
            continue
        if not isinstance(calls, list):
            raise Refusal(400, f"messages[{i}].tool_calls must be a list", param=f"messages[{i}].tool_calls")
        for j, call in enumerate(calls):
            if not _is_good(call):
                decisions += _past_call(body, ("messages", i, "tool_calls", j), call)
    return tuple(decisions)


def _is_good(call: Any) -> bool:
    """A name, and arguments that are the text of an object, as nearly all are."""
    try:
        function = call["function"]
        return type(function["name"]) is str and type(orjson.loads(function["arguments"])) is dict
    except (TypeError, LookupError, orjson.JSONDecodeError):
        return False


def _as_object(value: Any) -> dict[str, Any]:
    """Arguments that are JSON but no object, which templates cannot render: null is none, text may hold the object."""
    inner = _parse(value)[0] if isinstance(value, str) else None
    return inner if isinstance(inner, dict) else {} if value is None else {"value": value}


def _past_call(body: Mapping[str, Any], path: tuple[str | int, ...], call: Any) -> list[Decision]:
    at = f"messages[{path[1]}].tool_calls[{path[3]}]"
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        if isinstance(call, dict) and isinstance(call.get("custom"), dict):
            return []  # a custom tool's free-form call
        raise Refusal(400, f"{at}.function has no name", "Send each past call as the model made it", param=at)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        value, broken = _parse(arguments)
        if isinstance(value, dict):
            return []
        if broken:
            value = _repaired(arguments)
            if value is None:
                raise Refusal(400, f"{at}.function.arguments: {broken}", "Send each past call as the model made it", param=at)
        else:
            broken, value = "the arguments are no object", _as_object(value)
        rule, reason = "history.repaired", f"{at}: {broken}"
    elif arguments is None or isinstance(arguments, dict):
        value, rule, reason = arguments or {}, "history.text", f"{at}: arguments are JSON text on this wire"
    else:
        raise Refusal(400, f"{at}.function.arguments must be JSON text", param=at)
    return [Decision("toolcheck", rule, reason, edits(body, ((*path, "function", "arguments"), orjson.dumps(value).decode())))]
