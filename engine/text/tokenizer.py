"""Text <-> tokens for one checkpoint. Owns which texts are special tokens and how raw bytes come out of a token id.

Special tokens are hard borders: text between two of them is encoded on its own, so the encoding of a long prompt is the
concatenation of its pieces and each piece can be cached (`engine.text.prompt`). The vocabulary machinery is the `tokenizers`
library; this file adds the split at special tokens, because what a *user* wrote must never become one of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from engine.text.bytes_of import TokenBytes
from engine.text.literals import any_of


class TokenizerError(ValueError):
    """The tokenizer of a checkpoint cannot be used. The message is one line with cause and remedy."""


class TooLong(ValueError):
    """A text of at least `tokens` tokens, more than was allowed."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


# A text with more characters than this for each allowed token is counted in slices first: prose has about four, and encoding
# twenty megabytes to find out that they do not fit takes a minute and a half, in which nobody else's text is encoded.
CHARS_PER_TOKEN = 4
SLICE = 1 << 16  # characters
CUT = 64  # tokens that cutting a word into two slices may add


@dataclass(frozen=True)
class SpecialToken:
    id: int
    text: str
    control: bool  # hidden from output; False for markers that are ordinary added tokens (Qwen's <think>, <tool_call>)
    lstrip: bool = False  # the token swallows whitespace on its left / right
    rstrip: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """What a loader found: the backend without special tokens, and everything around it."""

    backend: dict[str, Any]  # tokenizer.json content; `added_tokens` holds only those that are plain text
    specials: tuple[SpecialToken, ...]
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    templates: dict[str, str] = field(default_factory=dict)  # "default", "tool_use", ...
    named: dict[str, str] = field(default_factory=dict)  # "eos_token" and the like -> text, as templates know them
    chat_bos: bool = False  # put bos before a conversation whose template does not write it
    source: str = ""


# Bracketed added tokens that are HTML elements are text (Gemma has <table>, <h1>, ... in its vocabulary).
_HTML = re.compile(
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code|pre|a|img|p|br|ul|ol|li|div|span)>"
)
_BRACKETED = re.compile(r"[<\[{｜].*[>\]}｜]", re.DOTALL)


def is_structural(text: str, special: bool) -> bool:
    """True if an added token structures a conversation, so that a user's text must never be encoded as it.

    Added tokens that are runs of spaces, newlines or HTML elements are plain text.
    """
    return special or (bool(_BRACKETED.fullmatch(text)) and not _HTML.fullmatch(text))


class Tokenizer:
    """Encodes and decodes for one checkpoint. Immutable after construction and safe to share between threads."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self.plain = _backend(files.backend)
        self._plain_rest = _without_first_prefix(files.backend) or self.plain
        self.specials = {s.text: s for s in files.specials}
        self.special_ids = {s.id: s for s in files.specials}
        self.control_ids = frozenset(s.id for s in files.specials if s.control)
        self.bos_id, self.eos_ids = files.bos_id, files.eos_ids
        self._split = re.compile(f"({any_of(self.specials)})") if self.specials else None
        self.vocab_size = 1 + max(_last_id(self.plain, files.backend), max(self.special_ids, default=-1))
        self._bytes = TokenBytes(self.plain, files.backend, {s.id: s.text for s in files.specials})

    def id_of(self, text: str) -> int | None:
        """The id of the special token spelled `text`, if there is one."""
        found = self.specials.get(text)
        return found.id if found else None

    def pieces(self, text: str) -> list[tuple[str, SpecialToken | None]]:
        """Split at special tokens: `[(plain text, None) | (token text, SpecialToken)]`, in order, without empty pieces."""
        if self._split is None:
            return [(text, None)] if text else []
        parts = self._split.split(text)
        out: list[tuple[str, SpecialToken | None]] = []
        for i, part in enumerate(parts):
            if i % 2:
                out.append((part, self.specials[part]))
                continue
            if i and self.specials[parts[i - 1]].rstrip:
                part = part.lstrip()
            if i + 1 < len(parts) and self.specials[parts[i + 1]].lstrip:
                part = part.rstrip()
            if part:
                out.append((part, None))
        return out

    def encode_plain(self, text: str, first: bool = False) -> list[int]:
        """Encode text in which nothing is a special token. `first` = it starts the prompt (some vocabularies prefix a space)."""
        if not text:
            return []
        backend = self.plain if first else self._plain_rest
        return backend.encode(text, add_special_tokens=False).ids

    def check_length(self, text: str, most: int) -> None:
        """Raises TooLong when plain `text` is longer than `most` tokens by far, at the cost of about `most` tokens."""
        count = 0
        for at in range(0, len(text) if len(text) > max(SLICE, CHARS_PER_TOKEN * most) else 0, SLICE):
            count += max(0, len(self.encode_plain(text[at : at + SLICE])) - CUT)
            if count > most:
                raise TooLong(count)

    def encode(self, text: str, add_bos: bool | None = None, most: int | None = None) -> list[int]:
        """Encode text in which special-token texts are special tokens (raw prompts of `/v1/completions`).

        With `most`, raises TooLong soon for a text that is longer by far.
        """
        out: list[int] = []
        for part, special in self.pieces(text):
            if most is not None:
                self.check_length(part, most - len(out))
                if len(out) > most:
                    raise TooLong(len(out))
            out += [special.id] if special else self.encode_plain(part, first=not out)
        add = self.files.add_bos if add_bos is None else add_bos
        if add and self.bos_id is not None and out[:1] != [self.bos_id]:
            out.insert(0, self.bos_id)
        return out

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for. Special tokens give their text; ids outside the vocabulary give b""."""
        return self._bytes[token]

    def decode(self, tokens: list[int], skip_control: bool = False) -> str:
        """Text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        skip = self.control_ids if skip_control else frozenset()
        raw = b"".join(self._bytes[t] for t in tokens if t not in skip)
        text = raw.decode("utf-8", "replace")
        return text[1:] if self._bytes.strips_first_space and text.startswith(" ") else text


def _backend(content: dict[str, Any]) -> Backend:
    """What a `tokenizer.json` of this content is. A BPE model with merges as pairs and no tokens but its own, as read from a GGUF
    file, is made without writing and parsing JSON: half of the time.
    """
    model, added = content["model"], content.get("added_tokens") or []
    vocab, merges = model.get("vocab"), model.get("merges")
    pairs = isinstance(merges, list) and isinstance(next(iter(merges), None), tuple)
    if model.get("type") != "BPE" or not pairs or any(token["content"] not in vocab for token in added):
        return Backend.from_buffer(msgspec.json.encode(content))
    around = {**content, "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    backend = Backend.from_buffer(msgspec.json.encode(around))
    options = {key: value for key, value in model.items() if key not in ("type", "vocab", "merges")}
    backend.model = BPE(vocab=vocab, merges=merges, **options)
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    backend.add_tokens([AddedToken(token["content"], **{flag: token[flag] for flag in flags}) for token in added])
    return backend


def _last_id(backend: Backend, content: dict[str, Any]) -> int:
    """The largest id of `backend`, -1 for none."""
    vocab = content["model"].get("vocab")
    ids = vocab.values() if isinstance(vocab, dict) else backend.get_vocab(with_added_tokens=False).values()
    return max(max(ids, default=-1), max(backend.get_added_tokens_decoder(), default=-1))


def _without_first_prefix(backend: dict[str, Any]) -> Backend | None:
    """A copy whose Metaspace does not prefix a space, for pieces that do not start the prompt. None if not needed."""
    pre = backend.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", [pre])
    if not any(p.get("type") == "Metaspace" and p.get("prepend_scheme") == "first" for p in parts):
        return None
    copy = json.loads(json.dumps(backend))
    pre = copy["pre_tokenizer"]
    for part in pre.get("pretokenizers", [pre]):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
    return Backend.from_str(json.dumps(copy))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load from a Hugging Face directory (tokenizer.json) or a GGUF file.

    Raises TokenizerError with one line when there is no tokenizer, or one of a kind that is not supported.
    """
    path = Path(path)
    if path.is_dir() and not (path / "tokenizer.json").exists():
        inside = sorted(path.glob("*.gguf"))
        if not inside:
            raise TokenizerError(
                f"{path}: no tokenizer.json; save the tokenizer in its fast form (tokenizer.json) beside the weights"
            )
        path = inside[0]
    if path.is_dir():
        from engine.text.hf_files import read_hf

        return _built(read_hf(path))
    if not path.exists():
        raise TokenizerError(f"{path}: no such file or directory")
    from engine.text.gguf_vocab import read_gguf

    return _built(read_gguf(path))


def _built(files: TokenizerFiles) -> Tokenizer:
    try:
        return Tokenizer(files)
    except Exception as e:  # the library raises bare exceptions for what it does not know
        raise TokenizerError(f"{files.source}: the tokenizers library cannot use this tokenizer ({e})") from None
