"""Reads our own Dockerfiles as far as tests need it: stages, copies, and the command, user and environment of the image."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Stage:
    """One FROM and what follows it: (instruction, argument text) in order."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [text for word, text in self.instructions if word == name]

    def copies(self) -> list[tuple[str, str, str]]:
        """(stage or "", source, target) of every COPY; relative targets are under the WORKDIR of that place."""
        out, workdir = [], Path("/")
        for word, text in self.instructions:
            if word == "WORKDIR":
                workdir = Path(text)
            if word == "COPY":
                parts = shlex.split(text)
                stage = parts.pop(0).removeprefix("--from=") if parts[0].startswith("--from=") else ""
                *sources, target = parts
                for source in sources:
                    whole = workdir / target
                    as_folder = target.endswith("/") or len(sources) > 1
                    out.append((stage, source, str(whole / Path(source).name if as_folder else whole)))
        return out

    def copied_from_context(self) -> list[str]:
        return [source for stage, source, _ in self.copies() if not stage]


@dataclass
class Image:
    """What a container of the last stage starts with."""

    command: list[str]
    user: str
    workdir: str
    env: dict[str, str]
    owned: list[str]  # directories made for the user
    copies: list[tuple[str, str, str]]


@dataclass
class Dockerfile:
    arguments: dict[str, str]  # those before the first FROM
    stages: list[Stage]

    def image(self) -> Image:
        last = self.stages[-1]
        env = dict(pair.split("=", 1) for text in last.all("ENV") for pair in shlex.split(text))
        owned = [
            name
            for text in last.all("RUN")
            for found in re.findall(r"install -d -o moorage -g moorage ([^&]+)", text)
            for name in found.split()
        ]
        return Image(
            command=json.loads(last.all("ENTRYPOINT")[-1]) + json.loads(last.all("CMD")[-1]),
            user=(last.all("USER") or [""])[-1],
            workdir=last.all("WORKDIR")[-1],
            env=env,
            owned=owned,
            copies=last.copies(),
        )


def load(path: Path) -> Dockerfile:
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(str.strip, text.splitlines()):
        word, rest = line.strip().split(None, 1)
        if word == "FROM":
            stages.append(Stage(base=rest))
        elif stages:
            stages[-1].instructions.append((word, rest.strip()))
        else:
            name, _, value = rest.partition("=")
            arguments[name] = value
    return Dockerfile(arguments, stages)
