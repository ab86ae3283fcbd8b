"""What a model asks of memory and what a machine has of it: the numbers that `placement` and `layers` reckon with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.experts.split import Rates
from engine.memory import gib

Mode = Literal["resident", "in_place", "offload", "hybrid", "host", "stream"]
MODES: tuple[Mode, ...] = ("resident", "in_place", "offload", "hybrid", "host", "stream")


class Impossible(Exception):
    """A forced mode that this machine cannot run; the message has the arithmetic."""


@dataclass(frozen=True)
class Hardware:
    """Bytes and bytes per second. `fast` 0: no memory of its own beside the processor's. `unified`: fast and host are one.

    `host` and `fast` are what may be used; `pin` is what of host memory may be page-locked, without which the link has not its
    rate (None: all of it). `packed`: the experts are in a file they can be read from one by one, at `disk_rate` (0 = not
    measured). `expert_rate` is the kernels' rate on experts as this model stores them, where it is not the memory's.
    `one_arithmetic`: the processor's kernels give the bits of those that compute in fast memory.
    """

    host: int
    host_rate: float
    expert_rate: float = 0.0
    fast: int = 0
    fast_rate: float = 0.0
    unified: bool = False
    packed: bool = False
    disk_rate: float = 0.0
    rates: Rates | None = None  # of the link and the processor, for experts as this model stores them
    pin: int | None = None
    one_arithmetic: bool = True

    @property
    def own_memory(self) -> bool:
        """Whether fast memory is another than the processor's."""
        return self.fast > 0 and not self.unified

    @property
    def lockable(self) -> int:
        return self.host if self.pin is None else min(self.pin, self.host)

    @property
    def computed(self) -> float:
        """Rate at which the processor computes experts in host memory."""
        return self.rates.host if self.rates else self.expert_rate or self.host_rate


@dataclass(frozen=True)
class Load:
    """What a model asks of memory. `dense` is everything but routed experts and caches; a token reads all of it."""

    dense: int
    cache: int  # KV pages and recurrent states
    layers: int  # with experts
    experts: int  # a layer
    top_k: int
    expert_bytes: int
    cache_read: int = 0  # of the cache by one token at the context the plan is made for
    unread: int = 0  # of dense: the embedding table, of which a token reads one row
    least_room: int = 0  # beside all weights, for the smallest cache

    @property
    def read(self) -> int:
        """Bytes one token reads beside routed experts."""
        return self.dense - self.unread + self.cache_read

    @property
    def layer_bytes(self) -> int:
        """Of the experts of one layer."""
        return self.experts * self.expert_bytes

    @property
    def pool(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def routed(self) -> int:
        """Bytes of experts one token reads."""
        return self.layers * self.top_k * self.expert_bytes


def fits(need: int, have: int, what: str, where: str) -> None:
    if need > have:
        raise Impossible(f"{what} need {gib(need)}, {where} has {gib(have)}: {gib(need - have)} short")
