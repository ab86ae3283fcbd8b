"""Each image's exact entry command and health check, run in a sandbox that holds only what the Dockerfile copies.

Stands in for a container where no Docker engine is: the environment comes from the Dockerfile's own line in a clean venv, the
files are those of its COPY lines at their paths, the user is not root, and there is no network but loopback.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.harness import DEMO_MODEL

from .dockerfile import ROOT, Image, load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
UID = "10001"

# $1 = health command, the rest = entry command. Ends 0 once the health check passed and the process then stopped on SIGTERM.
WATCH = r"""
health=$1; shift
"$@" & pid=$!
for _ in $(seq 600); do
    kill -0 $pid 2>/dev/null || { wait $pid; echo "ended with $? before it was healthy"; exit 1; }
    if sh -c "$health" 2>/dev/null; then echo HEALTHY; kill -TERM $pid; wait $pid; exit 0; fi
    sleep 0.2
done
echo "never healthy"; kill -KILL $pid; exit 1
"""


@pytest.fixture(scope="module")
def sandbox() -> list[str]:
    """bwrap with the base image's part: a system, loopback, an unprivileged user."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed (Debian's bubblewrap)")
    base = ["bwrap", "--unshare-all", "--die-with-parent", "--uid", UID, "--gid", UID, "--clearenv", "--tmpfs", "/"]
    base += [
        "--ro-bind",
        "/usr",
        "/usr",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        "--setenv",
        "PATH",
        "/usr/bin:/bin",
    ]
    for name in ("lib", "lib64", "bin", "sbin"):
        link = Path("/", name)
        base += ["--symlink", os.readlink(link), str(link)] if link.is_symlink() else []
    base += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    base += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    if subprocess.run([*base, "true"], capture_output=True).returncode:
        pytest.skip("this machine forbids the namespaces that bubblewrap needs")
    return base


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def lend_torch(venv: Path) -> None:
    """Put the torch of the tests' environment into an empty venv: unpacking its gigabyte once more would prove nothing."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (target,) = venv.glob("lib/python*/site-packages")
    ours = importlib.metadata.distribution("torch")
    for name in sorted({file.parts[0] for file in ours.files if file.parts[0] not in ("..", "__pycache__")}):
        source = Path(ours.locate_file(name))
        if source.is_dir():
            shutil.copytree(source, target / name, copy_function=link, symlinks=True)
        else:
            link(str(source), str(target / name))


def make_venv(dockerfile: str, folder: Path) -> Path:
    """Run the Dockerfile's own install line with /opt/moorage moved into `folder`."""
    if "engine" in dockerfile:
        lend_torch(folder)
    (line,) = [run for run in load(ROOT / dockerfile).stages[0].all("RUN") if "--packages-only" in run]
    command = line.replace("/opt/moorage", str(folder)).replace("${GPU}", "no")
    python, *arguments = shlex.split(command)
    assert python == "python3"
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return folder


def mounts(image: Image, venv: Path, writable: Path) -> list[str]:
    """bwrap options that put every copied file where the image has it."""
    options = ["--ro-bind", str(venv), "/opt/moorage"]
    for stage, source, target in image.copies:
        if source == "/opt/moorage":
            continue
        here = DEMO_MODEL if source == "ops/demo_model" else ROOT / (source.removeprefix("/src/") if stage else source)
        options += ["--ro-bind", str(here), target]
    for index, directory in enumerate(image.owned):
        (writable / str(index)).mkdir()
        options += ["--bind", str(writable / str(index)), directory]
    for name, value in image.env.items():
        options += ["--setenv", name, value]
    return [*options, "--chdir", image.workdir]


def run_image(sandbox: list[str], service: str, tmp_path: Path) -> subprocess.CompletedProcess:
    dockerfile = COMPOSE[service]["build"]["dockerfile"]
    image = load(ROOT / dockerfile).image()
    venv = make_venv(dockerfile, tmp_path / "venv")
    (tmp_path / "volumes").mkdir()
    health = shlex.join(COMPOSE[service]["healthcheck"]["test"][1:])
    command = [*sandbox, *mounts(image, venv, tmp_path / "volumes"), "sh", "-c", WATCH, "watch", health, *image.command]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("service", ["gateway", "engine-cpu"])
def test_image_starts_gets_healthy_and_stops(sandbox, tmp_path, service: str) -> None:
    run = run_image(sandbox, service, tmp_path)
    assert run.returncode == 0 and "HEALTHY" in run.stdout, run.stdout + run.stderr
    assert "Traceback" not in run.stderr, run.stderr
