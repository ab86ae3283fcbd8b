"""Configuration: a LiteLLM file loads as it is; every mistake is one line with file, key and remedy."""

import pytest
import yaml

from gateway.config import NormaliseRule, Policy, Secret, ThinkingRule, ToolRule
from gateway.config_file import DEFAULT_ENGINE, ConfigError, load, parse

LITELLM = """
model_list:
  - model_name: claude
    litellm_params: {model: anthropic/claude-x, api_key: os.environ/ANTHROPIC_KEY, rpm: 60, temperature: 0.2}
    model_info: {id: the-one, mode: chat}
  - model_name: local
    litellm_params: {model: hosted_vllm/Qwen3, api_base: "http://vllm:8000/v1", api_key: none, extra_headers: {x-a: b}}
  - model_name: local
    litellm_params: {model: openai/Qwen3, api_base: "http://vllm2:8000/v1/"}
  - model_name: gpt-*
    litellm_params: {model: openai/gpt-*, api_key: os.environ/OPENAI_KEY}
litellm_settings: {drop_params: true, callbacks: [prometheus]}
general_settings: {master_key: os.environ/MASTER, database_url: os.environ/SET_WHERE_LITELLM_RUNS}
credential_list: [{credential_name: a, credential_values: {api_key: os.environ/SET_WHERE_LITELLM_RUNS}}]
router_settings: {routing_strategy: least-busy}
"""
ENV = {"ANTHROPIC_KEY": "sk-ant-secret", "OPENAI_KEY": "sk-oa-secret", "MASTER": "sk-master-secret"}


def test_a_litellm_file_loads_unchanged() -> None:
    config = parse(yaml.safe_load(LITELLM), "litellm.yaml", ENV)
    claude, vllm, second, gpt = config.deployments
    assert (claude.kind, claude.model, claude.name) == ("provider", "anthropic/claude-x", "the-one")
    assert claude.defaults == {"temperature": 0.2} and claude.control == {"rpm": 60}
    assert (vllm.kind, vllm.model, vllm.api_base, vllm.headers) == ("openai", "Qwen3", "http://vllm:8000/v1", {"x-a": "b"})
    assert second.api_base == "http://vllm2:8000/v1" and config.serving("local") == (vllm, second)
    assert gpt.upstream_model("gpt-9") == "gpt-9" and config.serving("gpt-9") == (gpt,)
    assert config.keys[0].name == "master_key" and config.keys[0].key.reveal() == "sk-master-secret"
    said = " ".join(config.warnings)
    assert "litellm_settings.drop_params" in said and "router_settings.routing_strategy" in said and "master_key" not in said
    assert "secret" not in repr(config)


def test_variables_that_a_litellm_file_sets_itself_are_used_in_it() -> None:
    text = """
environment_variables: {ENGINE_KEY: sk-own, ANTHROPIC_KEY: os.environ/REAL_ONE, TEAM: 7}
model_list:
  - {model_name: a, litellm_params: {model: openai/a, api_base: "http://a/v1", api_key: os.environ/ENGINE_KEY}}
  - {model_name: b, litellm_params: {model: anthropic/b, api_key: os.environ/ANTHROPIC_KEY}}
  - {model_name: c, litellm_params: {model: openai/c, api_base: "http://c/v1", extra_headers: {team: os.environ/TEAM}}}
"""
    config = parse(yaml.safe_load(text), "litellm.yaml", {"REAL_ONE": "sk-real", "ENGINE_KEY": "sk-outer"})
    assert [d.api_key.reveal() for d in config.deployments[:2]] == ["sk-own", "sk-real"]
    assert config.deployments[2].headers == {"team": "7"} and "must be set outside" in " ".join(config.warnings)
    for wrong in ("environment_variables: [A]", "environment_variables: {A: [1]}", "environment_variables: {A: os.environ/NOPE}"):
        with pytest.raises(ConfigError, match=r"environment_variables.*(mapping of names|NOPE is not set)"):
            parse(yaml.safe_load(wrong), "litellm.yaml", {})


def test_without_a_file_the_engine_here_serves_every_name() -> None:
    (engine,) = load(None).deployments
    assert engine.api_base == DEFAULT_ENGINE and engine.upstream_model("any") == "any"


WRONG = [
    ("model_lst: []", "model_lst: unknown section. Did you mean model_list?"),
    ("listen: {prt: 1}", "listen.prt: unknown key. Did you mean port?"),
    ("listen: {port: abc}", "listen.port: Expected `int`"),
    ("policies: [{clamp: {temperature: {mx: 1}}}]", "mx: unknown key. Did you mean max?"),
    ("policies: [{thinking: {force: maybe}}]", "policies[0].thinking.force"),
    ("policies: [{unknown: drp}]", "policies[0].unknown"),
    ("model_list: []", "model_list: must be a list with at least one entry"),
    ("model_list: [{litellm_params: {model: openai/x}}]", "model_list[0].model_name: is missing"),
    ("model_list: [{model_name: x}]", "model_list[0].litellm_params.model: is missing"),
    ("model_list: [{model_name: x, litellm_params: {model: moorage/x, api_base: localhost}}]", "is no http(s) URL"),
    ("model_list: [{model_name: x, litellm_params: {model: openai/x, api_key: os.environ/NOPE}}]", "NOPE is not set"),
    ("model_list: [{model_name: x, litellm_params: {model: a/x}, model_info: {thinking: no}}]", "model_info.thinking: must be"),
    ("general_settings: {master_key: os.environ/NOPE}", "general_settings.master_key: environment variable NOPE is not set"),
    ("keys: [{name: a, key: ''}]", "keys[0].key: Expected a non-empty string"),
    ("timeouts: {idle: 0}", "timeouts.idle: 0 is no time"),
    ("timeouts: {keepalive: -1}", "timeouts.keepalive: -1 is no time"),
    ("timeouts: {prefill: .inf}", "timeouts.prefill: inf is no time"),
    ("timeouts: {connect: .nan}", "timeouts.connect: nan is no time"),
    ("policies: [{thinking: {forc: off}}]", "forc: unknown key. Did you mean force?"),
    ("a: [", "line 1 is not valid YAML"),
    ("just text", "must be a mapping"),
]


@pytest.mark.parametrize(("text", "want"), WRONG)
def test_mistakes_are_one_line_with_file_and_key(tmp_path, text, want) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as e:
        load(path, {})
    assert want in str(e.value) and str(e.value).startswith(str(path)) and "\n" not in str(e.value)


def test_a_missing_file_says_so(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")


def test_later_policies_win_per_parameter() -> None:
    table = """
    policies:
      - clamp: {temperature: {max: 1}, top_k: {max: 50}}
        thinking: {force: off}
      - {model: "big-*", key: desk, clamp: {temperature: {max: 2}}, unknown: drop}
    """
    config = parse(yaml.safe_load(table), "t", {})
    common = config.policy("small", "desk", "/v1/chat/completions")
    special = config.policy("big-1", "desk", "/v1/chat/completions")
    assert common.clamp["temperature"].max == 1 and common.thinking.force is False and common.unknown == "pass"
    assert special.clamp["temperature"].max == 2 and special.clamp["top_k"].max == 50
    assert special.thinking.force is False and special.unknown == "drop"


def test_a_row_changes_only_what_it_says() -> None:
    table = """
    policies:
      - {thinking: {force: off, retry: true}, tools: {retries: 3, repair: false}, normalise: {clock: pin, tool_schemas: true}}
      - {thinking: {on_violation: error}, tools: {otherwise: pass}, normalise: {tool_schemas: false}}
      - {key: desk, thinking: {force: null, retry: false}}
    """
    config = parse(yaml.safe_load(table), "t", {})
    all_, desk = config.policy("m", "other", "/"), config.policy("m", "desk", "/")
    assert all_.thinking == ThinkingRule(force=False, retry=True, on_violation="error")
    assert all_.tools == ToolRule(retries=3, repair=False, otherwise="pass")
    assert all_.normalise == NormaliseRule(clock="pin", tool_schemas=False)
    assert desk.thinking == ThinkingRule(on_violation="error") and desk.tools == all_.tools
    assert parse({}, "t", {}).policy("m", "k", "/") == Policy()


def test_rows_hold_for_their_model_key_and_route() -> None:
    rows = [{"model": "qwen*", "unknown": "drop"}, {"key": "desk", "tools": {"retries": 3}}]
    rows.append({"route": "/v1/messages", "thinking": {"default": False}})
    config = parse({"policies": rows}, "t", {})
    for model, key, route in [
        ("qwen3", "lab", "/v1/responses"),
        ("glm", "desk", "/v1/responses"),
        ("glm", "lab", "/v1/messages"),
    ]:
        found = config.policy(model, key, route)
        assert found.unknown == ("drop" if model == "qwen3" else "pass") and found.tools.retries == (3 if key == "desk" else 1)
        assert found.thinking.default == (False if route == "/v1/messages" else None)
    assert config.policy("glm", "lab", "/v1/responses") == Policy()


def test_secrets_hide_themselves() -> None:
    assert "hush" not in f"{Secret('hush')} {Secret('hush')!r}"
