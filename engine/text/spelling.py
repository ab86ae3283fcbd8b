"""What each token of a checkpoint spells, for who compares tokens and encodes nothing: read at once, spelled when asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.text.bytes_of import byte_alphabet

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer


class Spelling:
    """`self[id]` -> the bytes of a token, None for a special one. A vocabulary has 150K tokens and a server meets few."""

    def __init__(self, size: int, spell: Callable[[int], bytes | None]) -> None:
        self._size, self._spell = size, spell
        self._known: dict[int, bytes | None] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, token: int) -> bytes | None:
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]


def read_spelling(model: str, tokenizer: Callable[[], Tokenizer]) -> Spelling:
    """From a GGUF file's own list where that is enough, else from the tokenizer. Raises TokenizerError."""
    quick = _of_gguf(Path(model))
    return quick if quick is not None else _of_tokenizer(tokenizer())


def _of_tokenizer(tokenizer: Tokenizer) -> Spelling:
    specials = tokenizer.special_ids
    return Spelling(tokenizer.vocab_size, lambda token: None if token in specials else tokenizer.token_bytes(token))


def _of_gguf(path: Path) -> Spelling | None:
    from engine.text.gguf_vocab import token_texts

    found = token_texts(path) if path.is_file() else None
    if found is None:
        return None
    texts, specials, plain = found
    alphabet = byte_alphabet()

    def spell(token: int) -> bytes | None:
        if token in specials:
            return None
        text = texts[token]
        own = token in plain or not all(character in alphabet for character in text)
        return text.encode() if own else bytes(alphabet[character] for character in text)

    return Spelling(len(texts), spell)
