"""From one YAML file to a `Config`. All errors are one line: file, key, what is wrong, what to do.

The vocabulary is LiteLLM's: `model_list` with `model_name` and `litellm_params`, so such a file loads unchanged. A model
written `moorage/NAME` is our engine, reached directly; `openai/NAME` and other plain OpenAI servers are reached directly too;
any other provider goes through litellm. `os.environ/NAME` stands for an environment variable anywhere. A key nobody knows is
refused by file and path; a LiteLLM key that has no meaning here is accepted and said aloud (`Config.warnings`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gateway.config import Config, Deployment, Key, PolicyEntry, Secret
from gateway.redaction import Redactor

MAX_SECONDS = 7 * 86400.0  # longer is `never`, which no timeout means
DEFAULT_ENGINE = "http://127.0.0.1:8008"
OPENAI_BASE = "https://api.openai.com/v1"

# LiteLLM's provider prefixes for servers that speak plain OpenAI: reached directly, litellm is not needed for them.
PLAIN_OPENAI = frozenset({"openai", "hosted_vllm", "openai_like", "custom_openai", "litellm_proxy", "llamafile", "lm_studio"})

# litellm_params that steer LiteLLM or its router. Everything else there is a body parameter, as in LiteLLM.
CONTROL = frozenset(
    str.split(
        """
    rpm tpm weight order timeout stream_timeout max_retries tags region_name max_budget budget_duration
    max_parallel_requests custom_llm_provider input_cost_per_token output_cost_per_token input_cost_per_second
    output_cost_per_second cache_read_input_token_cost cooldown_time num_retries organization mock_response
    use_in_pass_through merge_reasoning_content_in_choices configurable_clientside_auth_params drop_params
    additional_drop_params
    """
    )
)
# Sections of a LiteLLM file that this gateway does not use: accepted, and said aloud.
LITELLM_SECTIONS = frozenset(
    str.split(
        """
    litellm_settings general_settings router_settings include guardrails mcp_servers
    callback_settings credential_list vector_store_registry files_settings finetune_settings search_tools prompts
    """
    )
)
SIMPLE_SECTIONS = (
    "listen",
    "server",
    "timeouts",
    "records",
    "limits",
    "store",
    "routing",
    "tracing",
)  # each converts straight into the Config field of its name
OUR_SECTIONS = (*SIMPLE_SECTIONS, "policies", "keys")


# LiteLLM's router_settings that mean something here, and what they are called.
ROUTER_SETTINGS = {
    "num_retries": "retries",
    "cooldown_time": "cooldown",
    "allowed_fails": "allowed_fails",
    "fallbacks": "fallbacks",
}
READ_OF_LITELLM = {"general_settings": ("master_key",), "router_settings": tuple(ROUTER_SETTINGS)}


class ConfigError(ValueError):
    """The configuration cannot be used. `str()` is one line for the user."""


def load(path: str | Path | None, env: Mapping[str, str] = os.environ) -> Config:
    """Read a configuration file; None gives the defaults, one engine on this machine. Raises ConfigError."""
    if path is None:
        return Config(deployments=(_engine_deployment(DEFAULT_ENGINE),))
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{where}: cannot be read ({e.strerror}). Give an existing YAML file with --config") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is not UTF-8 text. Save it as UTF-8") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        at = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}:{at} is not valid YAML ({getattr(e, 'problem', None) or 'syntax error'})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: must be a mapping with a model_list. An empty example: model_list: []")
    return parse(data, where, env)


def parse(data: dict[str, Any], where: str, env: Mapping[str, str] = os.environ) -> Config:
    """A parsed YAML mapping to a Config. `where` names the file in messages. Raises ConfigError."""
    warnings: list[str] = []
    env = _with_variables(data, where, env, warnings)
    data = {k: _resolve_section(k, v, where, env) for k, v in data.items() if k != "environment_variables"}
    known = (*OUR_SECTIONS, "model_list")
    for key in data:
        if key not in known and key not in LITELLM_SECTIONS:
            raise ConfigError(f"{where}: {key}: unknown section. {_suggest(key, known)}")
    entries = data.get("model_list")
    if entries is None:
        entries = [{"model_name": "*", "litellm_params": {"model": "moorage/*", "api_base": DEFAULT_ENGINE}}]
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: model_list: must be a list with at least one entry. Remove it to use {DEFAULT_ENGINE}")
    keys = list(_convert(data.get("keys", []), tuple[Key, ...], where, "keys"))
    for section in sorted(LITELLM_SECTIONS & data.keys()):
        keys += _litellm_section(section, data[section], where, warnings)
    if isinstance(data.get("router_settings"), dict):
        data = data | {"routing": _router_settings(data["router_settings"]) | (data.get("routing") or {})}
    sections = {f.name: f.type for f in msgspec.structs.fields(Config) if f.name in SIMPLE_SECTIONS}
    settings = Config(
        deployments=tuple(_deployment(e, i, where, warnings) for i, e in enumerate(entries)),
        keys=tuple(keys),
        policies=_convert(data.get("policies", []), tuple[PolicyEntry, ...], where, "policies"),
        source=where,
        warnings=tuple(warnings),
        **{name: _convert(data[name], kind, where, name) for name, kind in sections.items() if data.get(name) is not None},
    )
    _check_values(settings, where)
    return settings


def _check_values(settings: Config, where: str) -> None:
    """What a type cannot say: expressions that compile, hashes that are hashes."""
    try:
        Redactor(settings.records.redact, settings.records.bodies)
    except ValueError as e:
        raise ConfigError(f"{where}: {e}") from None
    for name in settings.timeouts.__struct_fields__:
        seconds = getattr(settings.timeouts, name)
        if not (seconds > 0 or (seconds == 0 and name == "keepalive")) or seconds > MAX_SECONDS:
            raise ConfigError(f"{where}: timeouts.{name}: {seconds:g} is no time. Write seconds, more than 0")
    for i, key in enumerate(settings.keys):
        value = key.key.reveal()
        if value.startswith("sha256:") and not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", value):
            raise ConfigError(f"{where}: keys[{i}].key: is no SHA-256 in hex. Write sha256: and 64 hex digits")


def _litellm_section(section: str, value: Any, where: str, warnings: list[str]) -> list[Key]:
    """What a LiteLLM section means here: a master key becomes a key; the rest is named in a warning."""
    value = value if isinstance(value, dict) else {"(value)": value}
    keys = []
    for name, item in value.items():
        if section == "router_settings" and name in ROUTER_SETTINGS:
            continue
        if (section, name) == ("general_settings", "master_key") and item:
            keys.append(Key(name="master_key", key=Secret(str(item)), admin=True))
        else:
            warnings.append(f"{where}: {section}.{name}: a LiteLLM setting with no effect in this gateway")
    return keys


def _router_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """LiteLLM's router_settings as our `routing`; its fallbacks are a list of one-entry mappings."""
    out = {ours: settings[theirs] for theirs, ours in ROUTER_SETTINGS.items() if theirs in settings}
    if isinstance(out.get("fallbacks"), list):
        out["fallbacks"] = {k: v for entry in out["fallbacks"] if isinstance(entry, dict) for k, v in entry.items()}
    return out


def _engine_deployment(base: str) -> Deployment:
    return Deployment(name="engine", serves="*", kind="engine", model="*", api_base=base)


def _deployment(entry: Any, index: int, where: str, warnings: list[str]) -> Deployment:
    """One `model_list` entry."""
    at = f"model_list[{index}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("model_name"), str):
        raise ConfigError(f"{where}: {at}.model_name: is missing. Give the name clients ask for")
    params = entry.get("litellm_params")
    if not isinstance(params, dict) or not isinstance(params.get("model"), str):
        raise ConfigError(f"{where}: {at}.litellm_params.model: is missing. Write moorage/NAME, openai/NAME or another provider")
    for key in entry.keys() - {"model_name", "litellm_params", "model_info"}:
        warnings.append(f"{where}: {at}.{key}: unknown key with no effect. {_suggest(key, ('litellm_params', 'model_info'))}")
    provider, _, name = params["model"].partition("/")
    base = str(params.get("api_base") or params.get("base_url") or "").rstrip("/")
    if provider == "moorage":
        kind, base = "engine", base or DEFAULT_ENGINE
    elif name and provider in PLAIN_OPENAI and (base or provider == "openai"):
        kind, base = "openai", base or OPENAI_BASE
    else:
        kind, name = "provider", params["model"]
    if kind != "provider" and not re.match(r"https?://[^/]", base):
        raise ConfigError(f"{where}: {at}.litellm_params.api_base: {base!r} is no http(s) URL. Write http://HOST:PORT/v1")
    rest = {k: v for k, v in params.items() if k not in ("model", "api_base", "base_url", "api_key", "extra_headers")}
    headers = params.get("extra_headers") or {}
    if not isinstance(headers, dict):
        raise ConfigError(f"{where}: {at}.litellm_params.extra_headers: must be a mapping of header names to values")
    key, info = params.get("api_key"), entry.get("model_info") or {}
    if not isinstance(info, dict) or info.get("thinking", "effort") not in ("template", "effort"):
        raise ConfigError(f"{where}: {at}.model_info.thinking: must be template or effort, how this server is told to think")
    return Deployment(
        name=str(info.get("id") or f"{entry['model_name']}#{index}"),
        serves=entry["model_name"],
        kind=kind,
        model=name,
        api_base=base.removesuffix("/v1") if kind == "engine" else base,
        api_key=Secret(str(key)) if key else None,
        headers={str(k): str(v) for k, v in headers.items()},
        defaults={k: v for k, v in rest.items() if k not in CONTROL},
        control={k: v for k, v in rest.items() if k in CONTROL},
        info=info,
    )


def _with_variables(data: dict[str, Any], where: str, env: Mapping[str, str], warnings: list[str]) -> Mapping[str, str]:
    """`env` and, on top as in LiteLLM, what the file's own `environment_variables` set."""
    own = data.get("environment_variables")
    if own is None:
        return env
    if not isinstance(own, dict) or any(isinstance(v, dict | list) for v in own.values()):
        raise ConfigError(f"{where}: environment_variables: must be a mapping of names to single values")
    warnings.append(
        "environment_variables: used for os.environ/NAME in this file; what a library reads by itself must be set outside"
    )
    own = {str(k): str(_resolve_env(v, where, f"environment_variables.{k}", env)) for k, v in own.items() if v is not None}
    return {**env, **own}


def _resolve_section(key: str, value: Any, where: str, env: Mapping[str, str]) -> Any:
    """`_resolve_env` of what this gateway reads: what it ignores may name variables that are set only where LiteLLM runs."""
    if key not in LITELLM_SECTIONS:
        return _resolve_env(value, where, str(key), env)
    if not isinstance(value, dict):
        return value
    used = READ_OF_LITELLM.get(key, ())
    return {k: _resolve_env(v, where, f"{key}.{k}", env) if k in used else v for k, v in value.items()}


def _resolve_env(value: Any, where: str, at: str, env: Mapping[str, str]) -> Any:
    """`os.environ/NAME` anywhere becomes the variable's value; a missing variable is an error that names the key."""
    if isinstance(value, str) and value.startswith("os.environ/"):
        name = value.removeprefix("os.environ/")
        if name not in env:
            raise ConfigError(f"{where}: {at}: environment variable {name} is not set. Set it or write the value")
        return env[name]
    if isinstance(value, dict):
        return {k: _resolve_env(v, where, f"{at}.{k}" if at else str(k), env) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolve_env(v, where, f"{at}[{i}]", env) for i, v in enumerate(value)]
    return value


def _hook(kind: type, value: Any) -> Any:
    if kind is Secret and isinstance(value, str) and value:
        return Secret(value)
    raise ValueError("Expected a non-empty string")


def _convert(value: Any, kind: Any, where: str, at: str) -> Any:
    """msgspec's strict conversion with its error turned into one line of ours."""
    try:
        return msgspec.convert(value, kind, dec_hook=_hook)
    except msgspec.ValidationError as e:
        text, _, path = str(e).partition(" - at `$")
        path = at + path.rstrip("`").replace("[...]", ".*")
        unknown = re.search(r"unknown field `(.+?)`", text)
        if unknown:
            raise ConfigError(f"{where}: {path}.{unknown[1]}: unknown key. {_suggest(unknown[1], _fields(kind))}") from None
        raise ConfigError(f"{where}: {path}: {text}") from None


def _fields(kind: Any) -> list[str]:
    """Every key that may stand in a section, nested ones too: for suggestions."""
    names, todo, seen = [], [kind], set()
    while todo:
        item = todo.pop()
        todo += [a for a in getattr(item, "__args__", ()) if a is not Ellipsis]
        if isinstance(item, type) and issubclass(item, msgspec.Struct) and item not in seen:
            seen.add(item)
            for f in msgspec.structs.fields(item):
                names.append(f.name)
                todo.append(f.type)
    return names


def _suggest(key: str, known: Any) -> str:
    close = difflib.get_close_matches(str(key), known, n=1)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(sorted(known))}"
