"""Keeps sampled text inside a grammar: token masks for one sequence, from the llguidance library.

Owns which tokens a grammar allows next. Which grammar a request needs is the API's business (`ipc.Grammar` carries it as text).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.ipc import Grammar
from engine.sampling import NoToken, Row
from engine.text.grammar import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class GrammarError(ValueError):
    """A grammar that cannot be used. The message is one line for the user."""


@dataclass(frozen=True)
class Vocabulary:
    """What tokens are made of: `tokens[id]` bytes (b"" where the model has an id and the tokenizer has none)."""

    tokens: Sequence[bytes]
    specials: Sequence[int]  # ids that text never produces; a grammar names them `<like_this>`
    eos: int
    encode: Callable[[str], list[int]]


COMPILED = 64  # grammars kept: an agent sends the same tools with every request


class Grammars:
    """Compiles grammars for one vocabulary, which is read when the first grammar is asked for (or by `warm`)."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def warm(self) -> None:
        """Read the vocabulary. Raises GrammarError."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer, TokenizerWrapper  # not before somebody asks for a grammar

            self._tokenizer = LLTokenizer(TokenizerWrapper(_Wrapped(self._load())))

    def start(self, grammar: Grammar) -> GrammarState:
        """Raises GrammarError."""
        matcher = self._compiled.get(grammar.lark)
        if matcher is None:
            from llguidance import LLMatcher

            self.warm()
            matcher = LLMatcher(self._tokenizer, grammar.lark, log_level=0)
            if matcher.is_error():
                raise GrammarError(f"the grammar cannot be used: {first_line(matcher.get_error())}")
            self._compiled[grammar.lark] = matcher
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar.lark)
        return GrammarState(matcher.deep_copy(), grammar)


class _Wrapped:
    """A `Vocabulary` by the names TokenizerWrapper reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = list(vocabulary.tokens), list(vocabulary.specials)
        self.eos_token_id, self.bos_token_id = vocabulary.eos, None
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


class GrammarState:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: LLMatcher, rule: Grammar) -> None:
        self._matcher, self._rule = matcher, rule
        self._active = rule.after is None

    def restrict(self, row: Row, stop_ids: Sequence[int]) -> None:
        """Make impossible in `row` [V], in place, what the grammar does not allow next. Raises NoToken when it broke.

        `stop_ids` are possible exactly where the grammar may end.
        """
        mask = self.mask()
        if mask is None:
            return
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        forbidden = np.ones(len(row), bool)
        known = min(len(row), len(bits))
        forbidden[:known] = bits[:known] == 0
        forbidden[list(stop_ids)] = not self.may_end
        np.putmask(row, forbidden, -np.inf)

    def mask(self) -> bytes | None:
        """One bit a token, the lowest first: what may come next but for stop tokens; None when all may. Raises NoToken."""
        if not self._active:
            return None
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            text = f"the grammar cannot be followed any further: {first_line(self._matcher.get_error())}"
            raise NoToken(500, "grammar_failed", text)
        return mask

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def observe(self, token: int) -> None:
        if not self._active:
            self._active = token == self._rule.after
            return
        self._matcher.consume_token(token)
        if self._rule.repeat and self._done():
            self._active = False
            self._matcher.reset()

    @property
    def complete(self) -> bool:
        """Nothing may follow: the answer ends here without a stop token."""
        return self._active and self._done()

    def _done(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()
