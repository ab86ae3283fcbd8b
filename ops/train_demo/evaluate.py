"""Play held-out dialogues to the end, greedily and without constraints, and count what was right.

    python -m ops.train_demo.evaluate --model ops/demo_model --out ops/demo_model/eval.json

The last round of each dialogue is played closed-loop: the model's own calls go back into the conversation with the
simulated results, as a client would do. A call the simulation does not know ends the dialogue as failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from .decode import Decoder
from .dialogues import MAIN, Dialogue, Mix, make_dialogue
from .model import Model
from .reply import Reply, fits_schema, parse_reply, states
from .shape import Shape
from .text import Encoder

SEED = 20261202  # never used in training, whose seeds are small; 20261129 to 20261201 served to compare recipes
LIMIT = 140  # tokens a turn
AT_ONCE = 24 * 1024  # tokens prefilled together
PLAYED: Mix = replace(MAIN, rounds=(1, 1, 1, 2, 3))
BARS = {"json_valid": 0.98, "right_tool": 0.95, "right_arguments": 0.90, "right_answer": 0.85, "thinking_obeyed": 1.0}


@dataclass
class Play:
    """One dialogue being played: what was said so far and which expected step comes next."""

    dialogue: Dialogue
    messages: list[dict] = field(default_factory=list)
    at: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        earlier = replace(self.dialogue, rounds=self.dialogue.rounds[:-1])
        self.messages = earlier.messages() + [{"role": "user", "content": self.dialogue.rounds[-1].user}]

    def expected(self) -> list[dict]:
        steps = self.dialogue.rounds[-1].steps
        if self.at >= len(steps):
            return []
        return [c["function"] for c in self.dialogue.call_message(steps[self.at])["tool_calls"]]

    def advance(self, reply: Reply, tally: Counter) -> None:
        """Count one assistant turn and move on."""
        last, expected = self.dialogue.rounds[-1], self.expected()
        tally["turns"] += 1
        tally["thinking_obeyed"] += reply.obeyed
        tally["calls"] += len(reply.calls) + reply.broken
        tally["json_valid"] += len(reply.calls)
        tally["schema_valid"] += sum(fits_schema(c, self.dialogue.tool_schemas) for c in reply.calls)
        if expected:
            tally["call_turns"] += 1
            tally["right_tool"] += not reply.broken and [c["name"] for c in reply.calls] == [c["name"] for c in expected]
            tally["expected_calls"] += len(expected)
            tally["right_arguments"] += sum(c in reply.calls for c in expected)
            self.over = reply.broken > 0 or list(reply.calls) != expected
        else:
            tally["answer_turns"] += 1
            tally["no_needless_call"] += not reply.calls and not reply.broken
            right = not reply.calls and not reply.broken and all(states(reply.content, f) for f in last.facts)
            tally["right_answer"] += right
            tally["exact_answer"] += right and reply.content == last.answer
            self.over = True
        if not self.over:
            self.messages.append(reply.message())
            self.messages += [{"role": "tool", "content": r} for r in last.steps[self.at].results]
            self.at += 1


def play_all(plays: list[Play], decoder: Decoder, enc: Encoder) -> dict[str, Counter]:
    """Tallies by skill; every dialogue counts once in `dialogues`."""
    tallies: dict[str, Counter] = {}
    for p in plays:
        tallies.setdefault(p.dialogue.rounds[-1].skill, Counter())["dialogues"] += 1
    while active := [p for p in plays if not p.over]:
        prompts = [enc.prompt(p.messages, p.dialogue.tool_schemas, p.dialogue.thinking) for p in active]
        longest = max(map(len, prompts))
        for p, ids in zip(active, decoder.generate_all(prompts, LIMIT, max(1, AT_ONCE // longest)), strict=True):
            tallies[p.dialogue.rounds[-1].skill]["ended"] += len(ids) < LIMIT
            text = enc.tok.decode(ids, skip_special_tokens=False)
            p.advance(parse_reply(text, p.dialogue.thinking), tallies[p.dialogue.rounds[-1].skill])
    return tallies


def figures(t: Counter) -> dict:
    """Shares of a tally. An unfinished dialogue counts as a wrong answer."""

    def share(part: str, whole: str) -> float | None:
        return round(t[part] / t[whole], 4) if t[whole] else None

    return {
        "dialogues": t["dialogues"],
        "turns": t["turns"],
        "json_valid": share("json_valid", "calls"),
        "schema_valid": share("schema_valid", "calls"),
        "right_tool": share("right_tool", "call_turns"),
        "right_arguments": share("right_arguments", "expected_calls"),
        "right_answer": share("right_answer", "dialogues"),
        "thinking_obeyed": share("thinking_obeyed", "turns"),
        "turns_ended": share("ended", "turns"),
        "no_needless_call": share("no_needless_call", "answer_turns"),
        "exact_answer": share("exact_answer", "dialogues"),
    }


def total(tallies: dict[str, Counter]) -> Counter:
    return sum(tallies.values(), Counter())


def load(path: Path) -> tuple[Model, Encoder]:
    """A shipped checkpoint: bf16 weights, computed in fp32."""
    model = Model(Shape())
    model.load_state_dict({k: v.float() for k, v in load_file(path / "model.safetensors").items()})
    return model, Encoder(Tokenizer.from_file(str(path / "tokenizer.json")))


def weights_sum(path: Path) -> str:
    """Which weights a report is about."""
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


def play_group(path: Path, zh: bool, thinking: bool, each: int, seed: int) -> dict[str, Counter]:
    """One language and thinking mode; the unit that is spread over processes."""
    torch.set_num_threads(1)
    model, enc = load(path)
    decoder, rng = Decoder(model, {enc.id["<|im_end|>"], enc.id["<|endoftext|>"]}), random.Random(seed + 2 * zh + thinking)
    plays = [Play(make_dialogue(rng, PLAYED, held_out=True, zh=zh, thinking=thinking)) for _ in range(each)]
    return play_all(plays, decoder, enc)


def evaluate(path: Path, each: int, seed: int = SEED, workers: int = 2) -> dict:
    """`each` dialogues for every language and thinking mode."""
    report: dict = {"weights": weights_sum(path), "seed": seed, "greedy": True, "constrained": False, "groups": {}}
    by_skill: dict[str, Counter] = {}
    groups = [(zh, thinking) for zh in (False, True) for thinking in (False, True)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        played = pool.map(play_group, *zip(*((path, zh, thinking, each, seed) for zh, thinking in groups), strict=True))
        for (zh, thinking), tallies in zip(groups, played, strict=True):
            report["groups"][f"{'zh' if zh else 'en'}_thinking_{'on' if thinking else 'off'}"] = figures(total(tallies))
            for skill, tally in tallies.items():
                by_skill.setdefault(skill, Counter()).update(tally)
    report["overall"] = figures(total(by_skill))
    report["skills"] = {skill: figures(by_skill[skill]) for skill in sorted(by_skill)}
    report["bars"] = BARS
    report["passed"] = all((report["overall"][k] or 0) >= v for k, v in BARS.items())
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--seed", type=int, default=SEED)
    a = parser.parse_args()
    report = evaluate(a.model, a.each, a.seed)
    text = json.dumps(report, indent=1)
    print(text)
    if a.out:
        a.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
