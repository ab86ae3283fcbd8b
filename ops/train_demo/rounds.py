"""What a dialogue is made of: a round is one user request, the tool steps it takes, and the answer."""

from __future__ import annotations

from dataclasses import dataclass

from .toolbox import Call


@dataclass(frozen=True)
class Step:
    """One assistant turn that calls tools: a brief thought, the calls, and what the tools return."""

    thought: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """`facts` are the strings a right answer must contain; `title` is the request in a few words."""

    skill: str
    user: str
    steps: tuple[Step, ...]
    thought: str
    answer: str
    facts: tuple[str, ...]
    title: str

    @property
    def kinds(self) -> set[str]:
        return {call.kind for step in self.steps for call in step.calls}
