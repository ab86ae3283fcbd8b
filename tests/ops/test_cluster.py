"""ops/cluster: the compose file follows the schema and asks for little; its gateway configuration serves from two servers."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from gateway import config_file
from tests.support.fake_upstream import FakeUpstream, Stream, Whole, content, finish, message, reasoning, usage
from tests.support.gateway import Gateway, ask

from .dockerfile import ROOT, load
from .test_containers import compose_problems, node

PAGE = (ROOT / "docs/cluster.md").read_text()
FOLDER = ROOT / "ops/cluster"
COMPOSE = yaml.safe_load((FOLDER / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
SERVERS = sorted(SERVICES.keys() - {"gateway", "redis"})
KEYS = {"DESK_KEY": "sk-desk", "NIGHTLY_KEY": "sk-night"}
BOTH = {"CODER_A": "http://10.0.0.11:8000/v1", "CODER_B": "http://10.0.0.12:8000/v1"}


def test_the_compose_file_follows_the_schema() -> None:
    assert compose_problems(COMPOSE) == []


# What dclint holds against the file, and why it is so all the same.
MEANT = {
    "no-build-and-image": "the image that `build` makes gets a name",
    "no-unbound-port-interfaces": "every port has an address in front, in a variable that dclint does not read",
    "service-image-require-explicit-tag": "that image is made here, and those of servers are to be pinned to what was tested",
}


def test_the_compose_file_lints() -> None:
    command = [node(".bin/dclint"), "--quiet", "--formatter", "json", FOLDER / "docker-compose.yml"]
    (report,) = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert report["filePath"].endswith("docker-compose.yml")
    assert [m for m in report["messages"] if m["rule"] not in MEANT] == []


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_watched_and_unprivileged(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD" and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    user = load(ROOT / service["build"]["dockerfile"]).image().user if "build" in service else service["user"]
    assert user not in ("", "root", "0") and not user.startswith("0:")
    assert all(port.startswith("${") and ":-127.0.0.1}" in port for port in service.get("ports", ()))
    named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(("$", ".", "/"))}
    assert named and named <= set(COMPOSE["volumes"])


def test_the_front_needs_no_gpu_and_each_server_is_a_profile_of_its_own() -> None:
    fronts = {name for name, service in SERVICES.items() if service["profiles"] == ["front"]}
    assert fronts == {"gateway", "redis"} and not any("deploy" in SERVICES[name] for name in fronts)
    assert len({SERVICES[name]["profiles"][0] for name in SERVERS}) == len(SERVERS) == 4
    assert all("8000:8000" in SERVICES[name]["ports"][0] for name in SERVERS)


def test_every_setting_has_a_default_or_says_what_is_missing() -> None:
    used = re.findall(r"\$\{(\w+)([^}]*)\}", (FOLDER / "docker-compose.yml").read_text())
    assert used and all(rest.startswith((":-", ":?")) for _, rest in used)


def test_the_configuration_in_the_container_is_the_one_beside_it() -> None:
    source, target, _ = SERVICES["gateway"]["volumes"][0].split(":")
    assert (FOLDER / source).resolve() == FOLDER / "gateway.yaml" and target in SERVICES["gateway"]["command"]
    asked = set(re.findall(r"os\.environ/(\w+)", (FOLDER / "gateway.yaml").read_text()))
    assert asked == SERVICES["gateway"]["environment"].keys() == KEYS.keys() | BOTH.keys()


def test_the_configuration_loads_without_a_warning() -> None:
    config = config_file.load(FOLDER / "gateway.yaml", BOTH | KEYS)
    assert [(d.name, d.kind, d.api_base) for d in config.serving("coder")] == [
        ("coder-a", "openai", BOTH["CODER_A"]),
        ("coder-b", "openai", BOTH["CODER_B"]),
    ]
    assert config.warnings == () and config.store.redis and config.listen.host == "0.0.0.0"


async def test_conversations_stay_on_their_server_and_move_when_it_dies(tmp_path: Path) -> None:
    async with FakeUpstream() as a, FakeUpstream() as b:
        bases = {"CODER_A": f"{a.base}/v1", "CODER_B": f"{b.base}/v1"}
        data = yaml.safe_load((FOLDER / "gateway.yaml").read_text()) | {"records": {"path": str(tmp_path / "records.jsonl")}}
        data["store"] = {}  # redis has tests of its own
        for up in (a, b):
            up.script(Whole(message()))
        async with Gateway(config_file._resolve_env(data, "cluster", "", bases | KEYS), tmp_path) as gw:
            history = [{"role": "user", "content": "a long beginning " * 200}]
            for turn in range(4):
                body = ask() | {"model": "coder", "messages": history}
                assert (await gw.post(body, authorization="Bearer sk-desk")).status == 200
                history = [*history, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": f"go on {turn}"}]
            one, other = (a, b) if a.requests else (b, a)
            assert (len(one.requests), len(other.requests)) == (4, 0)
            one.script(Whole({"error": {"message": "out of memory"}}, 503))
            got = await gw.post(ask() | {"model": "coder", "messages": history}, authorization="Bearer sk-desk")
            refused = await gw.post(ask() | {"model": "coder"})
    assert got.status == 200 and len(other.requests) == 1 and refused.status == 401


# --- the page says what is so

ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
COLUMNS = {"vLLM": "vllm", "SGLang": "sglang", "llama-server": "llama-server", "Ollama": "ollama", "our engine": ""}
TABLE = {server: {row[0]: row[place] for row in ROWS[1:]} for place, server in enumerate(ROWS[0]) if server in COLUMNS}


def test_the_page_starts_what_the_compose_file_has() -> None:
    (block,) = re.findall(r"```\n(# on each GPU.*?)```", PAGE, re.S)
    asked = set(re.findall(r"\$\{(\w+)", (FOLDER / "docker-compose.yml").read_text()))
    assert set(re.findall(r"([A-Z][A-Z_]+)=", block)) <= asked and KEYS.keys() | BOTH.keys() <= asked
    assert set(re.findall(r"--profile (\w+)", block)) == {"vllm", "front"}
    assert set(re.findall(r"-f (\S+)", block)) == {"ops/cluster/docker-compose.yml"}
    assert TABLE.keys() == COLUMNS.keys() and {COLUMNS[s] for s in TABLE} - {""} == set(SERVERS)


@pytest.mark.parametrize("server", [s for s, service in COLUMNS.items() if service])
def test_the_options_of_the_page_are_those_of_the_compose_file(server: str) -> None:
    """A server that is started by it reports cached tokens, parses calls and thoughts, and has the name that is asked for."""
    service = SERVICES[COLUMNS[server]]
    command = [part.partition("=")[0] for part in service.get("command", ())]
    named = {option for row in TABLE[server].values() for option in re.findall(r"--[a-z-]+", row)}
    assert named <= set(command) and (named or server == "Ollama")
    assert server == "Ollama" or "coder" in " ".join(service["command"])


def entry(server: str, base: str) -> dict:
    """The `model_list` entry of the page's table."""
    text = TABLE[server]["entry"]
    (kind,) = re.findall(r"`(\w+)/NAME`", text)
    info = yaml.safe_load(found[0]) if (found := re.findall(r"`(model_info: [^`]+)`", text)) else {}
    base = base if "base without `/v1`" in text else f"{base}/v1"
    return {"model_name": server, "litellm_params": {"model": f"{kind}/NAME", "api_base": base}, **info}


@pytest.mark.parametrize("server", COLUMNS)
async def test_each_server_is_told_of_thinking_in_its_words_and_hints_go_to_our_engine_alone(tmp_path: Path, server: str) -> None:
    """The page's entry loads; what a client says of thinking and what the server answers arrives in either's own spelling."""
    async with FakeUpstream() as up:
        up.script(Stream([reasoning("hm", "reasoning"), content("Hi"), finish(), usage(9, 3)]), Whole(message()))
        data = {"model_list": [entry(server, up.base)], "records": {"path": str(tmp_path / "records.jsonl")}}
        async with Gateway(data, tmp_path) as gw:
            body = {"model": server, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
            thought = await gw.post(body | {"stream": True, "thinking": {"type": "enabled"}}, "/v1/messages")
            still = await gw.post(body | {"thinking": {"type": "disabled"}}, "/v1/messages")
    assert thought.status == still.status == 200 and b'"thinking":"hm"' in thought.body
    assert [r.path for r in up.requests] == ["/v1/chat/completions"] * 2
    on, off = [r.json for r in up.requests]
    assert on["model"] == "NAME" and on["stream_options"] == {"include_usage": True}
    if "`reasoning_effort`" in TABLE[server]["thinking is said as"]:
        assert on["reasoning_effort"] == "medium" and off["reasoning_effort"] == "none"
    else:
        assert TABLE[server]["thinking is said as"] == "template arguments"
        assert [b["chat_template_kwargs"] for b in (on, off)] == [{"enable_thinking": True}, {"enable_thinking": False}]
    assert ("moorage" in on) == (TABLE[server]["anchor hints"] == "yes")
