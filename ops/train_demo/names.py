"""Random identifiers, paths and values: everything a dialogue asks the model to copy.

Training and held-out dialogues draw their words from disjoint lists and their syllables from different sets, so a
held-out name can only be right if it was copied from the context.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WORDS = Path(__file__).parent / "words"


def spread(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TRAIN_WORDS = spread((WORDS / "train.txt").read_text(encoding="utf-8"))
HELD_WORDS = spread((WORDS / "held_out.txt").read_text(encoding="utf-8"))

TRAIN_ONSETS = spread("b d f g k l m n p r s t v z br dr gr kr pl st tr")
HELD_ONSETS = spread("c h j l m n p r s t w x y bl cl fl gl pr sk sp")
VOWELS = spread("a e i o u ai ou ee")
LETTERS = "abcdefghijklmnopqrstuvwxyz" * 3 + "aeiou" * 3 + "aeinrst"
CODAS = ["", "", "", "n", "r", "l", "s", "x", "m", "k"]

EXTENSIONS = spread("py ts js go rs json toml yaml md txt cfg ini csv log sql sh html css java c h")
CODE_EXTENSIONS = spread("py ts js go rs java c")
CONFIG_EXTENSIONS = spread("json toml yaml cfg ini txt conf env")
TOP_DIRS = spread("src lib app docs tests config scripts data pkg etc tools core api web")

TRAIN_SURNAMES, TRAIN_GIVEN = "王李张刘陈杨赵黄周吴", "伟芳娜敏静丽强磊军洋勇艳杰娟涛明超"
HELD_SURNAMES, HELD_GIVEN = "徐孙胡朱高林何郭马罗", "平辉健玲桂英华玉萍红鹏飞雪梅浩宇晨"
HAN = (0x4E00, 0x9FA5)  # the unified ideographs of Unicode 1.1
CITIES = (
    ("Beijing", "北京"),
    ("Shanghai", "上海"),
    ("Paris", "巴黎"),
    ("London", "伦敦"),
    ("Tokyo", "东京"),
    ("Berlin", "柏林"),
    ("Madrid", "马德里"),
    ("Cairo", "开罗"),
    ("Sydney", "悉尼"),
    ("Toronto", "多伦多"),
    ("Shenzhen", "深圳"),
    ("Hangzhou", "杭州"),
    ("Rome", "罗马"),
    ("Oslo", "奥斯陆"),
    ("Lima", "利马"),
)


@dataclass(frozen=True)
class Names:
    """A source of fresh names. The random generator inside is the only thing that advances."""

    rng: random.Random
    held_out: bool = False
    noise: float = 0.0  # share of words made of random letters, so that rare tokens are seen in training too

    def syllables(self) -> str:
        onsets = HELD_ONSETS if self.held_out else TRAIN_ONSETS
        pick = self.rng.choice
        return "".join(pick(onsets) + pick(VOWELS) + pick(CODAS) for _ in range(self.rng.choice((1, 2, 2, 3))))

    def word(self) -> str:
        if self.noise and self.rng.random() < self.noise:
            return "".join(self.rng.choice(LETTERS) for _ in range(self.rng.randint(2, 8)))
        if self.rng.random() < 0.5:
            return self.rng.choice(HELD_WORDS if self.held_out else TRAIN_WORDS)
        return self.syllables()

    def ident(self, most: int = 3) -> str:
        """A variable, function or key name in one of the usual spellings."""
        parts = [self.word() for _ in range(self.rng.randint(1, most))]
        style = self.rng.random()
        if style < 0.6:
            name = "_".join(parts)
        elif style < 0.75:
            name = parts[0] + "".join(p.capitalize() for p in parts[1:])
        elif style < 0.85:
            name = "".join(p.capitalize() for p in parts)
        elif style < 0.93:
            name = "_".join(parts).upper()
        else:
            name = "-".join(parts)
        return name + (str(self.rng.randint(0, 99)) if self.rng.random() < 0.15 else "")

    def filename(self, extensions: Sequence[str] = EXTENSIONS) -> str:
        joint = self.rng.choice("__-")
        stem = joint.join(self.word() for _ in range(self.rng.choice((1, 1, 2))))
        if self.rng.random() < 0.12:
            stem += str(self.rng.randint(1, 2030))
        return f"{stem}.{self.rng.choice(extensions)}"

    def directory(self) -> str:
        rng = self.rng
        parts = [rng.choice(TOP_DIRS) if rng.random() < 0.5 else self.word()]
        parts += [self.word() for _ in range(rng.choice((0, 0, 1, 1, 2)))]
        root = rng.random()
        prefix = "" if root < 0.6 else "./" if root < 0.7 else "/" if root < 0.85 else f"/home/{self.word()}/"
        return prefix + "/".join(parts)

    def path(self, extensions: Sequence[str] = EXTENSIONS) -> str:
        if self.rng.random() < 0.25:
            return self.filename(extensions)
        return f"{self.directory()}/{self.filename(extensions)}"

    def value(self) -> str:
        """A setting's value: number, word, version, switch, address or hash."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.35:
            return str(rng.choice((rng.randint(0, 9), rng.randint(10, 99), rng.randint(100, 9999), rng.randint(10000, 65000))))
        if kind < 0.6:
            return self.ident(2)
        if kind < 0.7:
            return f"{rng.randint(0, 9)}.{rng.randint(0, 30)}.{rng.randint(0, 20)}"
        if kind < 0.78:
            return rng.choice(("true", "false", "on", "off", "none"))
        if kind < 0.86:
            return f"{self.word()}.{self.word()}.{rng.choice(('com', 'org', 'net', 'io'))}"
        if kind < 0.93:
            return "".join(rng.choice("0123456789abcdef") for _ in range(rng.choice((6, 8))))
        return f"{rng.randint(0, 99)}.{rng.randint(0, 99)}"

    def person(self, zh: bool) -> str:
        if not zh:
            return self.word().capitalize()
        if self.noise and self.rng.random() < self.noise:  # characters of three byte tokens, or a name of them is never closed
            return "".join(chr(self.rng.randint(*HAN)) for _ in range(self.rng.randint(2, 4)))
        surnames, given = (HELD_SURNAMES, HELD_GIVEN) if self.held_out else (TRAIN_SURNAMES, TRAIN_GIVEN)
        return self.rng.choice(surnames) + "".join(self.rng.choice(given) for _ in range(self.rng.choice((1, 2))))

    def city(self, zh: bool) -> str:
        return self.rng.choice(CITIES)[1 if zh else 0]

    def distinct(self, make, count: int) -> list:
        """`count` different results of `make`."""
        found: list = []
        while len(found) < count:
            item = make()
            if item not in found:
                found.append(item)
        return found
