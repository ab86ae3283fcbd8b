"""Write the committed cases: single assistant turns from held-out dialogues, which tests/e2e sends through gateway and engine.

    python -m ops.train_demo.cases --model ops/demo_model --out tests/data/demo_dialogues.jsonl

Each line: id, skill, language, thinking, messages, tools, and what to expect (calls, or facts in the answer). Only turns the
given checkpoint gets right in fp32 are kept: they are a regression test of the engine, not a second evaluation.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch

from .decode import Decoder
from .dialogues import Dialogue, make_dialogue
from .evaluate import LIMIT, PLAYED, load
from .reply import parse_reply, states

SEED = 4021


def turns(d: Dialogue) -> Iterator[dict]:
    """The assistant turns of the last round, each with the messages before it."""
    last = d.rounds[-1]
    before = d.opening() + [m for r in d.rounds[:-1] for m in d.round_messages(r)]
    said = d.round_messages(last)
    for i, message in enumerate(said):
        if message["role"] == "assistant":
            calls = [c["function"] for c in message.get("tool_calls", ())]
            facts = [] if calls else list(last.facts)
            yield {
                "skill": last.skill,
                "language": "zh" if d.zh else "en",
                "thinking": d.thinking,
                "messages": before + said[:i],
                "tools": d.tool_schemas,
                "expect": {"calls": calls, "facts": facts, "answer": message["content"]},
            }


def candidates(seed: int, count: int) -> list[dict]:
    rng = random.Random(seed)
    cases: list[dict] = []
    for i in range(count):
        d = make_dialogue(rng, PLAYED, held_out=True, zh=i % 2 == 1, thinking=i % 4 >= 2)
        cases.append(rng.choice(list(turns(d))))
    return cases


def right_cases(path: Path, seed: int, count: int) -> list[dict]:
    """Cases the checkpoint passes, spread over skills, languages and modes."""
    model, enc = load(path)
    cases = candidates(seed, count * 3)
    prompts = [enc.prompt(c["messages"], c["tools"], c["thinking"]) for c in cases]
    kept: list[dict] = []
    seen: dict[tuple, int] = {}
    decoder = Decoder(model, {enc.id["<|im_end|>"], enc.id["<|endoftext|>"]})
    for case, ids in zip(cases, decoder.generate_all(prompts, LIMIT), strict=True):
        reply = parse_reply(enc.tok.decode(ids, skip_special_tokens=False), case["thinking"])
        right = (
            list(reply.calls) == case["expect"]["calls"]
            and reply.obeyed
            and all(states(reply.content, f) for f in case["expect"]["facts"])
        )
        sort = (case["skill"], bool(case["expect"]["calls"]))
        if right and len(kept) < count and seen.get(sort, 0) < 2:
            seen[sort] = seen.get(sort, 0) + 1
            kept.append({"id": f"{case['skill']}-{len(kept)}"} | case)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40)
    a = parser.parse_args()
    torch.set_num_threads(1)
    cases = right_cases(a.model, SEED, a.count)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text("".join(json.dumps(c, ensure_ascii=False) + "\n" for c in cases), encoding="utf-8")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
