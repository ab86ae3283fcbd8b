"""The pages name options, routes and settings that exist, and their configurations load as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from gateway import app
from gateway.config import Config, NormaliseRule, ThinkingRule, ToolRule
from gateway.config_file import parse
from gateway.pipeline import DIALECTS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("gateway", "cluster", "litellm")}
TEXT = [pytest.param(text, id=name) for name, text in PAGES.items()]
HASH = "<hash in hex>"

SECTIONS = {f.name: f.type for f in msgspec.structs.fields(Config) if isinstance(f.type, type)}
RULES = {"thinking": ThinkingRule, "tools": ToolRule, "normalise": NormaliseRule}
STRUCTS = {n: {f.name for f in msgspec.structs.fields(t)} for n, t in (SECTIONS | RULES).items() if issubclass(t, msgspec.Struct)}

STAGES = {("limits", "admit"), ("limits", "settle")}  # are written in the same way


def loaded(text: str) -> Config:
    env = dict.fromkeys(re.findall(r"os\.environ/(\w+)", text), "sk-x")
    return parse(yaml.safe_load(text.replace(HASH, "0" * 64)), "page", env)


BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", text, re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_configuration_on_the_pages_loads(block: str) -> None:
    config = loaded(block)
    assert config.warnings == () or "litellm_settings" in block


def test_the_gateways_page_shows_every_section_and_its_defaults_are_true() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGES["gateway"], re.S)
    config, shown = loaded(text), yaml.safe_load(text)
    assert {d.kind for d in config.deployments} == {"engine", "openai", "provider"} and len(config.keys) == 2
    assert STRUCTS.keys() - RULES.keys() <= shown.keys()
    defaults = Config(deployments=())
    meant = {("records", "redact"), ("tracing", "endpoint"), ("routing", "fallbacks")}  # examples, which have no default
    for section in STRUCTS.keys() - RULES.keys():
        for name in shown[section]:
            said, so = getattr(getattr(config, section), name), getattr(getattr(defaults, section), name)
            assert said == so or (section, name) in meant, f"{section}.{name}"


@pytest.mark.parametrize("text", TEXT)
def test_every_setting_that_a_page_names_exists(text: str) -> None:
    for section, name in re.findall(r"`(\w+)\.([a-z_]+)[`:]", text):
        if section in STRUCTS and name != "py":
            assert name in STRUCTS[section] or (section, name) in STAGES, f"{section}.{name}"
    for snippet in re.findall(r"`((?:policies|routing|records|server|limits|store): [^`]*)`", text):
        config = loaded(snippet.replace("{...}", "{}"))
        assert config.warnings == ()


@pytest.mark.parametrize("text", TEXT)
def test_every_route_that_a_page_names_exists(text: str) -> None:
    known = app.App(Config(deployments=()))._gets.keys() | app.ADMIN.keys() | DIALECTS.keys()
    for path in re.findall(r"`(?:GET |POST |HEAD )?(/(?:v1|admin|health|metrics|openapi)[\w/.{}]*)", text):
        assert path in known | {"/v1"} or path.startswith("/v1/responses/"), path


def test_the_table_of_rules_for_the_cache_says_their_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGES["gateway"], re.M)
    defaults = {f.name: f.default for f in msgspec.structs.fields(NormaliseRule)}
    assert {name: yaml.safe_load(said) for name, said in rows if name in defaults} == defaults
