"""ops/cluster: the compose file follows the schema and asks for little; its gateway configuration serves from two servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gateway import config_file
from tests.support.fake_upstream import FakeUpstream, Whole, message
from tests.support.gateway import Gateway, ask

from .dockerfile import ROOT, load
from .test_containers import compose_problems

FOLDER = ROOT / "ops/cluster"
COMPOSE = yaml.safe_load((FOLDER / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
SERVERS = sorted(SERVICES.keys() - {"gateway", "redis"})
KEYS = {"DESK_KEY": "sk-desk", "NIGHTLY_KEY": "sk-night"}
BOTH = {"CODER_A": "http://10.0.0.11:8000/v1", "CODER_B": "http://10.0.0.12:8000/v1"}


def test_the_compose_file_follows_the_schema() -> None:
    assert compose_problems(COMPOSE) == []


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
