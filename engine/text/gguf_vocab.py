"""Builds a `tokenizers` backend from the vocabulary inside a GGUF file.

GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) instead of carrying its rules; the patterns below are those of the original
tokenizer.json files of each family. Supported models: `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE by scores).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from engine.text.bytes_of import SPACE
from engine.text.gguf_metadata import GgufError, read_metadata
from engine.text.tokenizer import SpecialToken, TokenizerError, TokenizerFiles, is_structural

log = logging.getLogger("moorage.text")

# GGUF token types
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
_DIGITS = [r"\p{N}", _GPT2]

# `tokenizer.ggml.pre` -> patterns applied one after the other, each isolating its matches
_PRE: dict[str, list[str]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "roberta-bpe", "modern-bert"), [_GPT2]),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "granite-docling"), _DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "smaug-bpe"), [_LLAMA3]),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), [_LLAMA3]),
    **dict.fromkeys(("qwen2", "stablelm2", "hunyuan", "deepseek-r1-qwen", "megrez", "solar-open"), [_QWEN2]),
    "qwen35": [_QWEN35],
    **dict.fromkeys(("gpt-4o", "llama4"), [_GPT4O]),
    "tekken": [_TEKKEN],
    **dict.fromkeys(("deepseek-v3", "deepseek-r1", "hunyuan-dense"), _DEEPSEEK3),
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"}
# a template's name for a token, without `_token` -> GGUF's
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
# Tokens that end a turn although a file may name only one eos: the spellings of the families' chat formats.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "</s>")


def read_gguf(path: Path) -> TokenizerFiles:
    """Raises TokenizerError when the file is no GGUF, carries no vocabulary, or one of an unsupported kind."""
    try:
        metadata = read_metadata(path, "tokenizer.")
    except (GgufError, OSError) as e:
        raise TokenizerError(f"{path}: not a readable GGUF file ({e}); download it again") from None

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.{key}", default)

    model = get("ggml.model")
    tokens: list[str] | None = get("ggml.tokens")
    if not model or not tokens:
        raise TokenizerError(f"{path}: holds no tokenizer; convert the model with its tokenizer")
    types: list[int] = get("ggml.token_type") or [_NORMAL] * len(tokens)
    if model == "gpt2":
        backend = _bpe(path, tokens, get("ggml.merges") or [], get("ggml.pre", "default"), types)
    elif model == "llama":
        backend = _sentencepiece(tokens, get("ggml.scores") or [], types, get("ggml.add_space_prefix", True))
    else:
        raise TokenizerError(f"{path}: tokenizer model `{model}` is not supported; gpt2 (BPE) and llama (SentencePiece) are")
    specials, plain = _added(tokens, types)
    backend["added_tokens"] = plain
    ids = {s.text: s.id for s in specials}
    named = [get(f"ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    eos = tuple(dict.fromkeys([i for i in named if i is not None] + [ids[t] for t in _TURN_ENDS if t in ids]))
    templates = {"default": get("chat_template")} if get("chat_template") else {}
    named_templates = [k for k in metadata if k.startswith("tokenizer.chat_template.")]
    templates |= {k.rsplit(".", 1)[1]: get(k.removeprefix("tokenizer.")) for k in named_templates}
    add_bos = get("ggml.add_bos_token", model == "llama" or get("ggml.pre") in ("llama-bpe", "llama3", "llama-v3"))
    ids_of = {ours: get(f"ggml.{theirs}_token_id") for ours, theirs in _NAMED.items()}
    known = {f"{ours}_token": tokens[i] for ours, i in ids_of.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    bos = get("ggml.bos_token_id")
    return TokenizerFiles(backend, tuple(specials), bos, eos, bool(add_bos), templates, known, bool(add_bos), str(path))


def token_texts(path: Path) -> tuple[list[str], set[int], set[int]] | None:
    """What tokens of a byte-level vocabulary are written as, which are special, which stand for their own text, without reading
    its merges and building a tokenizer: a sixth of the time. None where that says too little; `read_gguf` has the whole.
    """
    try:
        metadata = read_metadata(path, "tokenizer.ggml.", ("tokenizer.ggml.merges",))
    except (GgufError, OSError):
        return None
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or not tokens or not types or len(tokens) != len(types):
        return None
    odd = [i for i, kind in enumerate(types) if kind not in (_NORMAL, _UNKNOWN, _BYTE)]
    unused = {i for i in odd if types[i] not in (_CONTROL, _USER)}
    if len(set(tokens)) < len(tokens):
        return None  # a tokenizer knows one of two that are written alike
    specials, plain = _added([tokens[i] for i in odd], [types[i] for i in odd])
    for i in unused:  # written, but nothing a tokenizer knows: padding of the vocabulary
        tokens[i] = ""
    while len(tokens) - 1 in unused:
        tokens.pop()
    return tokens, {odd[s.id] for s in specials}, {odd[p["id"]] for p in plain}


def _added(tokens: list[str], types: list[int]) -> tuple[list[SpecialToken], list[dict[str, Any]]]:
    specials, plain = [], []
    for i, (text, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == _CONTROL or (kind == _USER and is_structural(text, False)):
            specials.append(SpecialToken(i, text, kind == _CONTROL))
        elif kind == _USER:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
            plain.append({"id": i, "content": text, **flags})
    return specials, plain


def _vocab(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Every token that plain text may become. Control and unused tokens are left out, so no merge can reach them."""
    keep = {_NORMAL, _UNKNOWN, _BYTE, _USER}
    return {
        t: i
        for i, (t, k) in enumerate(zip(tokens, types, strict=False))
        if k in keep and not (k == _USER and is_structural(t, False))
    }


def _bpe(path: Path, tokens: list[str], merges: list[str], pre: str, types: list[int]) -> dict[str, Any]:
    if not merges:
        raise TokenizerError(f"{path}: the vocabulary has no merges; convert the model again")
    patterns = _PRE.get(pre)
    if patterns is None:
        log.warning(
            "pre-tokenizer %r of %s is not known; using `default`, token borders may differ from the original", pre, path.name
        )
        patterns = _PRE["default"]
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    vocab = _vocab(tokens, types)
    pairs = [tuple(m.split(" ", 1)) for m in merges]
    pairs = [p for p in pairs if len(p) == 2 and p[0] in vocab and p[1] in vocab and p[0] + p[1] in vocab]
    return {
        "version": "1.0",
        # Qwen's own tokenizer.json normalises to NFC; GGUF tools do not, and a file name in NFD must survive a round trip.
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": pairs, "ignore_merges": pre in _IGNORE_MERGES},
    }


def _sentencepiece(tokens: list[str], scores: list[float], types: list[int], prefix: bool) -> dict[str, Any]:
    """SentencePiece BPE: a merge exists wherever two pieces join to a piece; the joined piece's score is its rank."""
    vocab = _vocab(tokens, types)
    merges: list[tuple[float, int, str, str]] = []
    for text, i in vocab.items():
        if types[i] != _NORMAL or len(text) < 2:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[i] if scores else i, i, left, right))
    merges.sort(key=lambda m: (m[0], m[1]))
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    unknown = next((t for t, k in zip(tokens, types, strict=False) if k == _UNKNOWN), None)
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [(left, right) for _, _, left, right in merges],
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": unknown,
        },
    }
