"""Which experts leave the slots first. Policies order keys; `slots` owns where they lie and what is pinned.

A key is `layer * E + expert`. Decode asks for the keys of layer 0, then layer 1, ... and begins again: a loop over more keys than
there are slots, the pattern that plain LRU is worst at; routing is skewed, which counting uses. `moorage experts sim` compares
the policies on recorded traces.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from typing import Protocol

import numpy as np


class Policy(Protocol):
    """The order in which resident keys may leave."""

    name: str

    def use(self, hits: Collection[int], misses: Collection[int]) -> None:
        """A layer asked for these distinct keys of its own; `hits` are resident."""

    def admit(self, key: int) -> None:
        """`key` became resident."""

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        """Up to `count` resident keys to give up, none of them in `keep`, in one pass; they are no longer resident after it."""

    def remove(self, key: int) -> None:
        """`key` left for another reason."""


class Lru:
    """Least recently used."""

    name = "lru"

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def use(self, hits: Collection[int], misses: Collection[int]) -> None:
        for key in hits:
            self._order.move_to_end(key)

    def admit(self, key: int) -> None:
        self._order[key] = None

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        chosen: list[int] = []
        for key in self._order:
            if len(chosen) == count:
                break
            if key not in keep:
                chosen.append(key)
        for key in chosen:
            del self._order[key]
        return chosen

    def remove(self, key: int) -> None:
        del self._order[key]


class Rate:
    """The key asked for at the lowest rate per token leaves first.

    The rate is two exponential averages of "this token used it", in tokens of the key's own layer: a fast one, because a token
    often repeats experts of the token before, and a slow one, because some experts are popular. All keys are counted, resident
    or not, so an expert that was evicted is remembered, and a loop over the layers does not look like a stream of new keys.
    Half-lives and weight: the best of a small grid over synthetic traces between pure popularity and pure repetition.
    """

    name = "rate"
    FAST, SLOW = 2.0 ** (-1 / 1), 2.0 ** (-1 / 64)  # half-lives in tokens
    FAST_WEIGHT = 0.3

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        self._experts = experts
        self._fast, self._slow = np.zeros(layers * experts), np.zeros(layers * experts)
        self._resident = np.zeros(layers * experts, bool)

    def use(self, hits: Collection[int], misses: Collection[int]) -> None:
        keys = [*hits, *misses]
        if not keys:
            return
        first = keys[0] // self._experts * self._experts
        for average, keeps in ((self._fast, self.FAST), (self._slow, self.SLOW)):
            average[first : first + self._experts] *= keeps
            average[keys] += 1 - keeps

    def admit(self, key: int) -> None:
        self._resident[key] = True

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        may_go = self._resident.copy()
        may_go[list(keep)] = False
        keys = np.nonzero(may_go)[0]
        rate = self.FAST_WEIGHT * self._fast[keys] + (1 - self.FAST_WEIGHT) * self._slow[keys]
        if count < len(keys):
            keys = keys[np.argpartition(rate, count)[:count]]
        self._resident[keys] = False
        return keys.tolist()

    def remove(self, key: int) -> None:
        self._resident[key] = False


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue lets one-time keys out quickly, a main queue gives used ones more turns."""

    name = "s3fifo"
    SMALL = 0.1  # of the capacity, as in the paper
    MOST = 3  # uses counted of a key

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        self._small_size = max(1, int(capacity * self.SMALL))
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._ghost_size = max(1, capacity - self._small_size)
        self._uses: Counter[int] = Counter()
        self._gone: set[int] = set()  # removed out of order; dropped from the queues when they come up

    def use(self, hits: Collection[int], misses: Collection[int]) -> None:
        for key in hits:
            self._uses[key] = min(self.MOST, self._uses[key] + 1)

    def admit(self, key: int) -> None:
        if key in self._gone:
            self._drop(key)
        self._uses[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._main.append(key)
        else:
            self._small.append(key)

    def victims(self, count: int, keep: Collection[int]) -> list[int]:
        chosen: list[int] = []
        kept: list[int] = []  # pinned keys met on the way: back in front, in order
        turns = (self.MOST + 2) * (len(self._small) + len(self._main))  # every key is met at most so often
        for _ in range(turns):
            if len(chosen) == count or not (self._small or self._main):
                break
            small = len(self._small) > self._small_size or not self._main
            queue = self._small if small else self._main
            key = queue.popleft()
            if key in self._gone:
                self._gone.discard(key)
            elif key in keep:
                kept.append(key)
            elif small and self._uses[key] > 0:
                self._uses[key] = 0
                self._main.append(key)
            elif not small and self._uses[key] > 0:
                self._uses[key] -= 1
                self._main.append(key)
            else:
                chosen.append(key)
                self._forget(key, remember=small)
        self._main.extendleft(reversed(kept))
        return chosen

    def remove(self, key: int) -> None:
        self._gone.add(key)
        del self._uses[key]

    def _drop(self, key: int) -> None:
        queue = self._small if key in self._small else self._main
        queue.remove(key)
        self._gone.discard(key)

    def _forget(self, key: int, remember: bool) -> None:
        del self._uses[key]
        if remember:
            self._ghost[key] = None
            while len(self._ghost) > self._ghost_size:
                self._ghost.popitem(last=False)


POLICIES: dict[str, type[Policy]] = {p.name: p for p in (Lru, Rate, S3Fifo)}


def make_policy(name: str, capacity: int, layers: int, experts: int) -> Policy:
    """Raises ValueError naming what there is."""
    if name not in POLICIES:
        raise ValueError(f"no eviction policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](capacity, layers, experts)
