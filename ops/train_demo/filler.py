"""Text that means nothing to the task: what stands between an agent's question and the tool it should choose.

Real agents send manuals, environment blocks, schemas, logs and files of ten thousand tokens. A model that only saw short
prompts answers those with one letter for ever, so training and the long evaluation stretch their dialogues with this.
Python's own help texts are the prose; every fifth of them is kept for held-out dialogues.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pydoc_data.topics import topics

from .names import Names, spread

TOPICS = tuple(topics[key] for key in sorted(topics))
TRAIN_TOPICS = tuple(text for i, text in enumerate(TOPICS) if i % 5)
HELD_TOPICS = tuple(text for text in TOPICS[::5] if text not in TRAIN_TOPICS)  # some topics share a text
SCRIPTS = (
    (0xA1, 0x17F),
    (0x391, 0x3C9),
    (0x410, 0x44F),
    (0x4E00, 0x9FA5),
    (0x3041, 0x30FF),
    (0x2190, 0x25FF),
    (0x1F300, 0x1F64F),
)
LINKS = spread("the a of to in and or for with when if then you must should can not is are use before after each only")
HAN = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成"
    "会可主发年动同工也能下过子说产种面而方后多定行学法所民得经"
)


def help_text(n: Names, size: int) -> str:
    """A stretch of whole lines from one help text."""
    text = n.rng.choice(HELD_TOPICS if n.held_out else TRAIN_TOPICS)
    start = text.find("\n", n.rng.randrange(max(1, len(text) - size))) + 1
    return text[start : start + size]


def prose(n: Names, size: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) < size:
        words.append(n.rng.choice(LINKS) if n.rng.random() < 0.5 else n.word() + n.rng.choice(("", "", "", ",", ".", ":")))
    return " ".join(words)


def bullets(n: Names, size: int) -> str:
    lines = [f"{'#' * n.rng.randint(1, 3)} {n.word().capitalize()} {n.word()}"]
    while sum(map(len, lines)) < size:
        mark = n.rng.choice(("- ", "* ", "  - ", f"{len(lines)}. "))
        lines.append(mark + n.rng.choice(("**{}**: ", "`{}` ", "")).format(n.ident(2)) + prose(n, n.rng.randint(20, 120)))
    return "\n".join(lines)


def block(n: Names, size: int) -> str:
    """An XML-like block of settings and lines."""
    name, lines = n.word(), []
    while sum(map(len, lines)) < size:
        key = n.ident(2)
        lines.append(n.rng.choice((f"  <{key}>{n.value()}</{key}>", f"{key}: {n.value()}", prose(n, 60))))
    return f"<{name}>\n" + "\n".join(lines) + f"\n</{name}>"


def code(n: Names, size: int) -> str:
    lines: list[str] = []
    while sum(map(len, lines)) < size:
        name, arg, other = n.ident(2), n.word(), n.ident(2)
        lines.append(
            n.rng.choice(
                (
                    f"def {name}({arg}, {other}=None):\n    if {arg} != {n.value()!r}:\n        return {other}",
                    f"{name} = {other}[{n.rng.randint(0, 99)}]  # {prose(n, 20)}",
                    f"    for {arg} in {name}.{other}():\n        print(f'{{{arg}}}')",
                    f"export const {name} = ({arg}) => {{ return {other}; }}",
                    f"$ {arg} --{other} {n.path()}",
                    f"| {name} | {n.value()} | {arg} |",
                )
            )
        )
    return "```\n" + "\n".join(lines) + "\n```"


def log_lines(n: Names, size: int) -> str:
    rng, lines = n.rng, []
    while sum(map(len, lines)) < size:
        stamp = f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        lines.append(
            f"{stamp} {rng.choice(('INFO', 'WARN', 'ERROR'))} [{n.ident()}] {n.path()}:{rng.randint(1, 900)} {n.value()}"
        )
    return "\n".join(lines)


def json_text(n: Names, size: int) -> str:
    item: dict = {}
    while len(json.dumps(item)) < size:
        item[n.ident(2)] = n.rng.choice((n.value(), n.rng.randint(0, 9999), [n.word(), n.word()], {n.word(): prose(n, 30)}, True))
    return json.dumps(item, indent=n.rng.choice((None, 2)), ensure_ascii=False)


def listing(n: Names, size: int) -> str:
    lines: list[str] = []
    while sum(map(len, lines)) < size:
        lines.append(n.path() if n.rng.random() < 0.8 else " ".join(n.rng.choice("0123456789abcdef") for _ in range(12)))
    return "\n".join(lines)


def symbols(n: Names, size: int) -> str:
    """Characters of many scripts, so that no byte of the vocabulary is new to the model."""
    text: list[str] = []
    while len(text) < size // 2:
        if n.rng.random() < 0.3:
            text += n.rng.choices(HAN, k=n.rng.randint(3, 15)) + ["。"]
        else:
            low, high = n.rng.choice(SCRIPTS)
            text += [chr(n.rng.randint(low, high)) for _ in range(n.rng.randint(1, 6))] + [n.rng.choice((" ", "\n", "…", "—"))]
    return "".join(text)


KINDS: tuple[tuple[Callable[[Names, int], str], int], ...] = (
    (help_text, 8),
    (prose, 3),
    (bullets, 5),
    (block, 3),
    (code, 3),
    (log_lines, 1),
    (json_text, 2),
    (listing, 1),
    (symbols, 1),
)


def filler(n: Names, size: int) -> str:
    """About `size` characters of mixed text."""
    makers, weights = zip(*KINDS, strict=True)
    parts: list[str] = []
    while (left := size - sum(map(len, parts))) > 0:
        parts.append(n.rng.choices(makers, weights)[0](n, min(left, n.rng.randint(60, 1500))))
    return "\n\n".join(parts)


def shares(rng: random.Random, total: int, count: int) -> list[int]:
    """`total` cut into `count` random parts."""
    weights = [rng.random() ** 2 + 0.02 for _ in range(count)]
    return [int(total * w / sum(weights)) for w in weights]
