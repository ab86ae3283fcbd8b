"""Streaming tokens -> text, O(1) a token. A multi-byte character comes out only when its last byte has arrived."""

from __future__ import annotations

import codecs

from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """One per choice of one request. Control tokens give no text unless listed in `keep` (markers the parser needs)."""

    def __init__(self, tokenizer: Tokenizer, keep: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.control_ids - keep
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Text that became complete with this token; "" while a character is still open."""
        if token in self._hidden:
            return ""
        if token in self._tokenizer.special_ids:  # an atom: bytes of a cut character before it can never be completed
            return self.flush() + self._tokenizer.special_ids[token].text
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left: U+FFFD if the stream stopped inside a character, else ""."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
