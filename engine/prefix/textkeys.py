"""Text keys: the tree matched on what tokens spell, so that a sampled tokenization that is not the canonical one still matches.

What a client sends back is text; encoding it again may cut it differently than sampling did. Where tokens part, the bytes they
spell are compared instead, token by token, until both sides stand at a border again. A special token is an atom: it equals itself
only, so text in a message that merely looks like a special token never matches one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.prefix.radix import Node, RadixTree, common_length

MOST_STEPS = 65536  # token comparisons a look-up may cost; beyond it the rest is prefilled


@dataclass(frozen=True)
class Respelled:
    """`tokens` spell what the prompt does. Before `parted` they are the prompt's own; from prompt token `joined` on, again.

    `shift` = position in `tokens` minus position in the prompt, from `joined` on.
    """

    tokens: np.ndarray
    parted: int
    joined: int
    shift: int

    def offset(self, position: int) -> int | None:
        """Where a prompt position lies in `tokens`; None inside the part that is spelled differently."""
        if position <= self.parted:
            return position
        return position + self.shift if position >= self.joined else None


class TextKeys:
    """`read()[id]` is the bytes of a token, None for a special one; ids beyond it count as special. It is called once, when the
    first token is compared, or by `warm`.
    """

    def __init__(self, read: Callable[[], Sequence[bytes | None]]) -> None:
        self._read = functools.cache(read)

    def warm(self) -> None:
        self._read()

    def respell(self, tree: RadixTree, tokens: np.ndarray) -> Respelled | None:
        """The longest stored sequence that spells a prefix of the prompt, followed by the rest of the prompt.

        None when the tree holds nothing longer under the prompt's own tokens. Only nodes that can be read back count.
        """
        walk = tree.walk(tokens)
        best = _Walker(self, tree, tokens).longest(walk.path, walk.depth)
        if best is None:
            return None
        path, depth, joined = best
        stored = np.concatenate([node.tokens for node in path])[:depth]
        return Respelled(np.concatenate([stored, tokens[joined:]]), walk.depth, joined, depth - joined)

    def bytes_of(self, token: int) -> bytes | None:
        spelling = self._read()
        return spelling[token] if token < len(spelling) else None


@dataclass(frozen=True)
class _Place:
    """Stored position: `inside` tokens of the last node of `path`. Prompt position: `eaten` bytes into token `at`."""

    path: tuple[Node, ...]
    inside: int
    at: int
    eaten: int


class _Walker:
    """Depth-first search over stored continuations that spell the prompt."""

    def __init__(self, keys: TextKeys, tree: RadixTree, tokens: np.ndarray) -> None:
        self._keys, self._tree, self._tokens = keys, tree, tokens
        self._steps = MOST_STEPS
        self._best: tuple[tuple[Node, ...], int, int] | None = None

    def longest(self, path: tuple[Node, ...], depth: int) -> tuple[tuple[Node, ...], int, int] | None:
        inside = depth - path[-1].start if path else 0
        todo = [_Place(path, inside, depth, 0)]
        while todo and self._steps > 0:
            todo += self._next(todo.pop())
        return self._best

    def _next(self, place: _Place) -> list[_Place]:
        """Places one stored token further; runs of equal tokens are taken at once."""
        if place.at >= len(self._tokens):
            return []
        node = place.path[-1] if place.path else self._tree.root
        if place.inside < node.size:
            edges = [(place.path, node, place.inside)]
        else:
            edges = [((*place.path, child), child, 0) for child in node.children.values() if _held(child)]
        found = []
        for path, edge, inside in edges:
            self._steps -= 1
            same = common_length(edge.tokens[inside:], self._tokens[place.at :]) if not place.eaten else 0
            if same:
                found.append(self._reached(_Place(path, inside + same, place.at + same, 0)))
            elif (step := self._step(int(edge.tokens[inside]), place.at, place.eaten)) is not None:
                found.append(self._reached(_Place(path, inside + 1, *step)))
        return found

    def _reached(self, place: _Place) -> _Place:
        if not place.eaten and (self._best is None or place.at > self._best[2]):
            self._best = (place.path, place.path[-1].start + place.inside, place.at)
        return place

    def _step(self, token: int, at: int, eaten: int) -> tuple[int, int] | None:
        """The prompt position behind stored `token`, None when it spells something else."""
        want = self._keys.bytes_of(token)
        if want is None:
            return (at + 1, 0) if not eaten and int(self._tokens[at]) == token else None
        done = 0
        while done < len(want):
            have = self._keys.bytes_of(int(self._tokens[at])) if at < len(self._tokens) else None
            if have is None:
                return None
            size = min(len(have) - eaten, len(want) - done)
            if have[eaten : eaten + size] != want[done : done + size]:
                return None
            done, eaten = done + size, eaten + size
            if eaten == len(have):
                at, eaten = at + 1, 0
        return at, eaten


def _held(node: Node) -> bool:
    """In memory or on disk: a ghost's spelling is of no use."""
    return node.pages is not None or (node.record is not None and node.record.stored)
