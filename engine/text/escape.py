"""Keeps special-token text that users wrote from becoming a special token.

Before a template renders, a mark (U+FDD0, a Unicode noncharacter) is put inside every special-token text found in messages
and tools, so that no such text can match in the rendered prompt; after the rendered prompt was split at its real special
tokens, the marks are taken out of the plain text between them.
"""

from __future__ import annotations

import re
from typing import Any

from engine.text.literals import any_of

MARK, _ESC, _ESC_MARK, _ESC_ESC = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_RESERVED = re.compile(f"[{MARK}{_ESC}]")
_MARKED = re.compile(f"{_ESC}{_ESC_MARK}|{_ESC}{_ESC_ESC}|{MARK}")


class Escaper:
    """`escape` marks, `unescape` removes. unescape(escape(x)) == x for every x, and no special text occurs in escape(x)."""

    def __init__(self, specials: list[str]) -> None:
        texts = sorted((s for s in specials if s), key=len, reverse=True)
        # A text may end with the beginning of a special token whose rest comes from what the template writes next.
        heads = {s[:n] for s in texts for n in range(1, len(s))}
        self._inside = re.compile(any_of(texts)) if texts else None
        self._heads = frozenset(heads)
        self._longest_head = max(map(len, heads), default=0)

    def escape(self, text: str) -> str:
        if _RESERVED.search(text):
            text = _RESERVED.sub(lambda m: _ESC + (_ESC_MARK if m[0] == MARK else _ESC_ESC), text)
        if self._inside is None:
            return text
        cuts, at = set(), 0
        while found := self._inside.search(text, at):  # not finditer: special texts may overlap
            at = found.start() + 1
            cuts.add(at)
        for n in range(min(self._longest_head, len(text)), 0, -1):
            if text[-n:] in self._heads:
                cuts.add(len(text) - n + 1)
        if not cuts:
            return text
        out, last = [], 0
        for cut in sorted(cuts):
            out += [text[last:cut], MARK]
            last = cut
        return "".join(out) + text[last:]

    def escape_all(self, value: Any) -> Any:
        """`escape` on every string of a JSON-like value, keys included."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, list):
            return [self.escape_all(v) for v in value]
        if isinstance(value, dict):
            return {self.escape(k) if isinstance(k, str) else k: self.escape_all(v) for k, v in value.items()}
        return value

    @staticmethod
    def unescape(text: str) -> str:
        if MARK not in text and _ESC not in text:
            return text
        return _MARKED.sub(lambda m: "" if m[0] == MARK else MARK if m[0][1] == _ESC_MARK else _ESC, text)
