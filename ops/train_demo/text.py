"""Tokenizer, template rendering and loss masks.

The tokenizer is byte-level BPE behind the Qwen pre-tokenizer. Its merges are learned with words cut away from the space,
quote or slash before them, so a name has the same tokens wherever it stands: copying is then a lookup, not a respelling.
Only frequent prose words get a form with the leading space, as the last merges, so they never change a name's pieces.
"""

from __future__ import annotations

import collections
import json
import os
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from . import names
from .dialogues import LONG, MAIN, Dialogue, make_dialogue

HERE = Path(__file__).parent
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
VOCAB = 4608
PROSE_WORDS = 512
QWEN_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LEARN_PATTERN = r"\p{Han}+|(?:(?!\p{Han})\p{L})+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPACE = "\u0120"  # the byte-level alphabet's letter for a space


def json_for_template(value, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """transformers' tojson: plain JSON, no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def load_template(path: Path = HERE / "chat_template.jinja"):
    """The chat template compiled the way transformers compiles it."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = json_for_template
    env.globals["raise_exception"] = raise_exception
    return env.from_string(path.read_text(encoding="utf-8"))


def render(template, d: Dialogue) -> str:
    return template.render(messages=d.messages(), tools=d.tool_schemas or None, add_generation_prompt=False)


def corpus(count: int, seed: int) -> list[str]:
    """Generated dialogues, then Python's own standard library so that code and prose are not all bytes."""
    rng, template = random.Random(seed), load_template()
    texts = [render(template, make_dialogue(rng, LONG if i % 10 == 0 else MAIN)) for i in range(count)]
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    return texts + [p.read_text(encoding="utf-8", errors="ignore")[:6000] for p in library[:60]]


def learn_merges(texts: list[str], size: int) -> list[tuple[str, str]]:
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LEARN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=2
    )
    for special in SPECIALS:
        texts = [t.replace(special, "\n") for t in texts]
    learner.train_from_iterator(texts, trainer)
    return [tuple(m) for m in json.loads(learner.to_str())["model"]["merges"]]


def prose_words(texts: list[str], known: set[str]) -> list[str]:
    """The most frequent words that follow a space and are no part of a generated name."""
    taken = set(names.TRAIN_WORDS) | set(names.HELD_WORDS) | set(names.TOP_DIRS)
    counts: collections.Counter = collections.Counter()
    for text in texts:
        for piece in text.split(" ")[1:]:
            word = ""
            for ch in piece:
                if not (ch.isascii() and ch.isalpha()):
                    break
                word += ch
            if word and word.lower() not in taken and word in known:
                counts[word] += 1
    return [w for w, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:PROSE_WORDS]]


def train_tokenizer(seed: int = 7, count: int = 6000) -> Tokenizer:
    texts = corpus(count, seed)
    merges = learn_merges(texts, VOCAB - PROSE_WORDS - len(SPECIALS))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [a + b for a, b in merges]
    prose = prose_words(texts, set(tokens))
    merges += [(SPACE, word) for word in prose]
    tokens += [SPACE + word for word in prose]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(list(SPECIALS))
    return tok


class Encoder:
    """Renders dialogues to token ids with a mask over what the assistant writes."""

    def __init__(self, tok: Tokenizer):
        self.tok, self.template = tok, load_template()
        self.id = {s: tok.token_to_id(s) for s in SPECIALS}
        self.head = tok.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
        self.off = tok.encode("<think>\n\n</think>\n\n", add_special_tokens=False).ids
        self.on = tok.encode("<think>\n", add_special_tokens=False).ids

    def prompt(self, messages: list[dict], tools: list[dict], thinking: bool) -> list[int]:
        text = self.template.render(messages=messages, tools=tools or None, add_generation_prompt=True, enable_thinking=thinking)
        return self.tok.encode(text, add_special_tokens=False).ids

    def example(self, d: Dialogue) -> tuple[list[int], list[int]]:
        """Token ids, and 1 where the token is the assistant's own (its turn end included)."""
        ids = self.tok.encode(render(self.template, d), add_special_tokens=False).ids
        mask, i, end = [0] * len(ids), 0, self.id["<|im_end|>"]
        while i < len(ids):
            if ids[i : i + len(self.head)] != self.head:
                i += 1
                continue
            i += len(self.head)
            for opener in (self.off, self.on):
                if ids[i : i + len(opener)] == opener:
                    i += len(opener)
                    break
            stop = ids.index(end, i)
            mask[i : stop + 1] = [1] * (stop + 1 - i)
            i = stop + 1
        return ids, mask
