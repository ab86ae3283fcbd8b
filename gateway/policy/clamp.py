"""Parameters within bounds: min, max, default, force, forbid, with wildcards; and what happens to unknown ones.

A rule's name is a body key (`temperature`), a dotted path (`chat_template_kwargs.foo`), a shell wildcard over both (`top_*`),
or `output_tokens`, which means whichever of `max_tokens` and `max_completion_tokens` the client used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

import msgspec

from gateway.config import ClampRule
from gateway.edits import ABSENT, Edit, Path, apply, edits, look
from gateway.errors import Refusal
from gateway.turn import Decision, Turn

_WILD = re.compile(r"[*?\[]")
KEEP_MATCHES = 4096  # pairs of a body's key and a rule's name; requests bring the same ones
OUTPUT_TOKENS = "output_tokens"
OUTPUT_SPELLINGS = ("max_completion_tokens", "max_tokens")

# What the request is; a clamp never touches these.
CONTENT = frozenset({"model", "messages", "prompt", "tools", "stream", "functions"})

# Chat completions and completions, plus the vendor fields of vLLM, SGLang, llama-server and our engine.
KNOWN = CONTENT | frozenset(
    str.split(
        """
    stream_options max_tokens max_completion_tokens temperature top_p top_k min_p typical_p n stop seed logit_bias
    logprobs top_logprobs presence_penalty frequency_penalty repetition_penalty repeat_penalty response_format
    tool_choice parallel_tool_calls function_call user metadata store service_tier modalities prediction audio
    web_search_options verbosity safety_identifier prompt_cache_key prompt_cache_retention reasoning reasoning_effort
    thinking think enable_thinking thinking_budget chat_template_kwargs include_reasoning output_config extra_body
    moorage cache_salt guided_json guided_regex guided_choice guided_grammar structured_outputs grammar json_schema
    ignore_eos min_tokens stop_token_ids bad_words skip_special_tokens spaces_between_special_tokens
    add_generation_prompt continue_final_message echo suffix best_of truncate_prompt_tokens priority return_token_ids
    timings_per_token cache_prompt id_slot samplers mirostat mirostat_tau mirostat_eta dry_multiplier dry_base
    xtc_probability xtc_threshold keep_alive options
    """
    )
)


def stage(turn: Turn) -> Turn:
    return turn.decide(*decide(turn.body, turn.policy.clamp, turn.policy.unknown))


def decide(
    body: Mapping[str, Any], rules: Mapping[str, ClampRule], unknown: Literal["pass", "drop", "refuse"] = "pass"
) -> tuple[Decision, ...]:
    """What the rules change in `body`. Raises Refusal when a rule refuses or a bounded parameter is no number."""
    out: list[Decision] = []
    for name, rule in rules.items():
        for path in list(_paths(body, name)):
            found = tuple(_one(body, path, name, rule))
            if found:
                body = apply(body, [e for d in found for e in d.edits])  # the next rule sees what this one did
                out += found
    if unknown != "pass":
        out += _unknown(body, unknown)
    return tuple(out)


def _paths(body: Mapping[str, Any], name: str) -> Iterator[Path]:
    """The places a rule's name means in this body. An exact name means its place also when nothing is there yet."""
    if name == OUTPUT_TOKENS:
        used = [(n,) for n in OUTPUT_SPELLINGS if body.get(n) is not None]
        yield from used or [(OUTPUT_SPELLINGS[0],)]
    elif not _is_wild(name):
        yield tuple(name.split("."))
    else:
        for key, value in body.items():
            if key in CONTENT:
                continue
            if _matches(key, name):
                yield (key,)
            elif isinstance(value, dict):
                yield from ((key, inner) for inner in value if _matches(f"{key}.{inner}", name))


@lru_cache(KEEP_MATCHES)
def _matches(key: str, name: str) -> bool:
    return fnmatchcase(key, name)


@lru_cache(KEEP_MATCHES)
def _is_wild(name: str) -> bool:
    return _WILD.search(name) is not None


def _one(body: Mapping[str, Any], path: Path, name: str, rule: ClampRule) -> Iterator[Decision]:
    value, shown = look(body, path), ".".join(map(str, path))
    absent = value is ABSENT or value is None
    if rule.forbid and not absent:
        if rule.forbid == "refuse":
            raise Refusal(400, f"`{shown}` is not allowed here", "Leave it out", code="parameter_forbidden", param=shown)
        yield Decision("clamp", f"{name}.forbid", "dropped", (Edit(path, value, ABSENT),))
        return
    if rule.force is not msgspec.UNSET:
        if change := edits(body, (path, rule.force)):
            yield Decision("clamp", f"{name}.force", "", change)
        return
    if absent:
        if rule.default is not msgspec.UNSET:
            yield Decision("clamp", f"{name}.default", "", edits(body, (path, rule.default)))
        elif name == OUTPUT_TOKENS and rule.max is not None:  # a cap holds also for clients that name no length
            yield Decision("clamp", f"{name}.max", "no length was asked for", edits(body, (path, int(rule.max))))
        return
    if rule.min is None and rule.max is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refusal(400, f"`{shown}` must be a number, not {str(value)[:40]!r}", param=shown)
    for bound, limit in (("min", rule.min), ("max", rule.max)):
        if limit is not None and (value < limit if bound == "min" else value > limit):
            bounded = int(limit) if isinstance(value, int) and float(limit).is_integer() else limit
            yield Decision("clamp", f"{name}.{bound}", "", (Edit(path, value, bounded),))
            return


def _unknown(body: Mapping[str, Any], action: str) -> Iterator[Decision]:
    for key in body:
        if key in KNOWN:
            continue
        if action == "refuse":
            raise Refusal(400, f"Unknown parameter `{key[:80]}`", "Leave it out", code="unknown_parameter", param=key[:80])
        yield Decision("clamp", "unknown.drop", f"unknown parameter {key[:80]}", (Edit((key,), body[key], ABSENT),))
