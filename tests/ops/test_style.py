"""The repository's own rules that a machine can check: lint, format, shell syntax, no file that names its builder's folders."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL = re.compile(r"^#!.*\b(ba)?sh\b")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def shell_scripts() -> list[Path]:
    return [path for path in tracked() if path.stat().st_size < 1 << 20 and SHELL.match(path.open(errors="replace").readline())]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_is_content(command: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_shell_script_parses_and_is_executable() -> None:
    scripts = shell_scripts()
    assert {ROOT / "ops/test", ROOT / ".ci/run"} <= set(scripts)
    for script in scripts:
        run = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert run.returncode == 0, f"{script}: {run.stderr}"
        assert script.stat().st_mode & 0o111, f"{script} is not executable"


def test_shellcheck_is_content() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (Debian's shellcheck)")
    run = subprocess.run(["shellcheck", *shell_scripts()], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_no_file_names_the_folder_it_was_made_in() -> None:
    bad = []
    for path in tracked():
        if path.suffix in (".safetensors", ".gguf", ".json", ".jsonl") or path.stat().st_size > 1 << 20:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if str(ROOT) in line or str(Path.home() / "") + "/" in line:
                bad.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not bad, "\n".join(bad)
