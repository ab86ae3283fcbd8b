"""Token id -> the bytes it stands for, for byte-level BPE and for SentencePiece-style vocabularies with byte fallback."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "▁"  # SentencePiece's visible space


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable alphabet: the character that stands for each byte in a byte-level vocabulary."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in keep}
    extra = 0
    for b in range(256):
        if b not in keep:
            table[chr(256 + extra)] = b
            extra += 1
    return table


def _types(node: Any) -> set[str]:
    """Names of all components in a tokenizer.json section (decoder, pre_tokenizer, normalizer), nested ones included."""
    if isinstance(node, list):
        return set().union(*map(_types, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    found = {node["type"]} if isinstance(node.get("type"), str) else set()
    for key in ("decoders", "pretokenizers", "normalizers"):
        found |= _types(node.get(key, []))
    return found


class TokenBytes:
    """`self[id]` -> bytes. Filled lazily: a vocabulary has 150K entries and a server meets few of them."""

    def __init__(self, backend: Backend, content: dict[str, Any], specials: dict[int, str]) -> None:
        kinds = _types(content.get("decoder")) | _types(content.get("pre_tokenizer")) | _types(content.get("normalizer"))
        self.byte_level = "ByteLevel" in kinds
        replace_space = SPACE in str(content.get("normalizer")) or "Metaspace" in kinds or SPACE in str(content.get("decoder"))
        self._space = replace_space and not self.byte_level
        # A prefixed space on the first token is taken away again by the decoder (`Strip`, or Metaspace itself).
        self.strips_first_space = self._space and ("Strip" in _types(content.get("decoder")) or "Metaspace" in kinds)
        self._backend, self._specials = backend, specials
        self._added = {i: str(t.content) for i, t in backend.get_added_tokens_decoder().items()}
        self._alphabet = byte_alphabet()
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._compute(token)
        return found

    def _compute(self, token: int) -> bytes:
        text = self._specials.get(token) or self._added.get(token)
        if text is not None:
            return text.encode()
        text = self._backend.id_to_token(token) if 0 <= token < 2**32 else None
        if text is None:
            return b""
        if self.byte_level:
            return bytes(self._alphabet[c] for c in text) if all(c in self._alphabet for c in text) else text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        if byte:
            return bytes([int(byte[1], 16)])
        return (text.replace(SPACE, " ") if self._space else text).encode()
