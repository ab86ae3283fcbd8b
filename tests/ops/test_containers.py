"""docker-compose.yml and ops/docker: valid by linter and schema, and what every service must have. No Docker engine is used."""

import json
import os
import subprocess
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from .dockerfile import ROOT, load

DOCKERFILES = sorted((ROOT / "ops/docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
ENGINES = [name for name in SERVICES if name.startswith("engine-")]


def node(path: str) -> Path:
    """A file of the npm packages that ops/test installs."""
    file = Path(os.environ.get("MOORAGE_NODE", ROOT / ".cache/node")) / "node_modules" / path
    if not file.exists():
        pytest.skip(f"{path} is not there; ops/test installs it where npm is")
    return file


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_lints_clean(path: Path) -> None:
    run = subprocess.run([node(".bin/dockerfile-utils"), "lint", path], capture_output=True, text=True)
    assert run.returncode == 0 and not run.stdout.strip(), run.stdout + run.stderr


def compose_problems(compose: dict) -> list[str]:
    """What the compose schema says against a file."""
    schema = json.loads(node("dclint/schemas/compose.schema.json").read_text())
    return [f"{list(e.instance_path)}: {e.message}" for e in jsonschema_rs.validator_for(schema).iter_errors(compose)]


def test_compose_file_follows_the_schema() -> None:
    problems = compose_problems(COMPOSE)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("profile", ["cpu", "cuda", "spark"])
def test_each_profile_is_a_whole_service(profile: str) -> None:
    chosen = {name for name, service in SERVICES.items() if profile in service["profiles"]}
    assert chosen == {"gateway", "redis", f"engine-{profile}"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_watched_and_unprivileged(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
    if "build" in service:
        image = load(ROOT / service["build"]["dockerfile"]).image()
        assert image.user not in ("", "root", "0")
    else:
        assert service["user"] != "root"
    named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(("$", ".", "/"))}
    assert named and named <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", ENGINES)
def test_engines_may_lock_memory_and_are_found_as_engine(name: str) -> None:
    assert SERVICES[name]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert SERVICES[name]["networks"]["default"]["aliases"] == ["engine"]
    assert any(volume.endswith(":/models:ro") for volume in SERVICES[name]["volumes"])


def test_volumes_are_directories_the_image_owns() -> None:
    """A named volume takes its owner from the image's directory; without one it would belong to root and be unwritable."""
    for service in SERVICES.values():
        if "build" not in service:
            continue
        owned = load(ROOT / service["build"]["dockerfile"]).image().owned
        for volume in service["volumes"]:
            source, target = volume.rsplit(":", 2)[:2] if volume.endswith(":ro") else volume.rsplit(":", 1)
            assert target in owned, f"{target} of {source} is not made for the user"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_build_argument_has_a_default_and_what_is_copied_is_in_the_context(path: Path) -> None:
    dockerfile = load(path)
    assert dockerfile.arguments["BASE"] == "python:3.12-slim-bookworm"
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for stage in dockerfile.stages:
        for source in stage.copied_from_context():
            assert source.split("/")[0] in allowed, f"{source} is kept out of the build by .dockerignore"
