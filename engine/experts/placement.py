"""Where experts lie and who computes them, decided from sizes and measured rates before anything is loaded. Pure arithmetic.

| mode | experts lie | misses are |
|---|---|---|
| resident | all in fast memory | none |
| in_place | in the one memory there is | none: the pool itself is computed on |
| offload | in host memory, some in fast slots | fetched |
| hybrid | in host memory, some in fast slots | fetched or computed in place, by q* |
| host | in host memory | computed in place |
| stream | in a file, some in slots of host memory | read from the file |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.experts.split import Rates, best_split, miss_seconds
from engine.memory import gib

Mode = Literal["resident", "in_place", "offload", "hybrid", "host", "stream"]
MODES: tuple[Mode, ...] = ("resident", "in_place", "offload", "hybrid", "host", "stream")
UNMEASURED_DISK = 0.1  # of memory's rate: only to rank modes while nothing is known
BUFFERED_LAYERS = 2  # of slots: prefill computes one layer while the next is copied


class Impossible(Exception):
    """A forced mode that this machine cannot run; the message has the arithmetic."""


@dataclass(frozen=True)
class Hardware:
    """Bytes and bytes per second. `fast` 0: no memory of its own beside the processor's. `unified`: fast and host are one.

    `host` and `fast` are what may be used. `packed`: the experts are in a file they can be read from one by one, at `disk_rate`
    (0 = not measured). `expert_rate` is the kernels'
    rate on experts as this model stores them, where it is not the memory's.
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

    @property
    def read(self) -> int:
        """Bytes one token reads beside routed experts."""
        return self.dense - self.unread + self.cache_read

    @property
    def pool(self) -> int:
        return self.layers * self.experts * self.expert_bytes

    @property
    def routed(self) -> int:
        """Bytes of experts one token reads."""
        return self.layers * self.top_k * self.expert_bytes


@dataclass(frozen=True)
class Placement:
    mode: Mode
    slots: int  # experts that fit in fast memory, or in host memory when streaming
    decode_seconds: float  # expected, of one token alone, caches warm
    reason: str
    refused: dict[str, str]  # the other modes: why not, or how slow

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / self.decode_seconds if self.decode_seconds else 0.0


def place(load: Load, hardware: Hardware, forced: Mode | None = None, miss_rate: float | None = None) -> Placement:
    """The fastest mode that fits, or `forced`. Raises Impossible.

    `miss_rate` is the share of expert uses that slots miss; None takes the share of experts without a slot (an even router).
    """
    options: dict[str, tuple[float, int, str]] = {}
    refused: dict[str, str] = {}
    for mode in MODES:
        try:
            options[mode] = _consider(mode, load, hardware, miss_rate)
        except Impossible as problem:
            refused[mode] = str(problem)
    if forced is not None and forced not in options:
        raise Impossible(f"{forced} is impossible here: {refused[forced]}")
    if not options:
        raise Impossible(f"no placement fits: {'; '.join(f'{m}: {why}' for m, why in refused.items())}")
    mode = forced or min(options, key=lambda m: options[m][0])
    seconds, slots, reason = options[mode]
    slower = {m: f"{o[0] / seconds:.1f}x the time a token" for m, o in options.items() if m != mode}
    return Placement(mode, slots, seconds, reason, {**refused, **slower})


def _consider(mode: Mode, load: Load, hw: Hardware, miss_rate: float | None) -> tuple[float, int, str]:
    """Seconds a token, slots, and the reason. Raises Impossible with the arithmetic."""
    if mode in ("resident", "offload", "hybrid"):
        return _with_fast(mode, load, hw, miss_rate)
    if mode == "stream":
        return _stream(load, hw, miss_rate)
    if mode == "in_place" and hw.fast and not hw.unified:
        raise Impossible("the device has a memory of its own: it cannot compute on host memory")
    if mode == "host":
        return _on_host(load, hw)
    need = load.pool + load.dense + load.cache
    _fits(need, hw.host, "weights and caches", "memory")
    rate = hw.fast_rate if hw.unified else hw.host_rate
    seconds = load.read / rate + load.routed / (rate if hw.unified else _expert_rate(hw))
    return seconds, 0, f"everything ({gib(need)}) fits in the {gib(hw.host)} of the one memory: nothing is copied"


def _on_host(load: Load, hw: Hardware) -> tuple[float, int, str]:
    if not hw.fast:
        raise Impossible("there is no fast memory to leave experts out of: in_place is the same")
    if hw.unified:
        raise Impossible("there is one memory: in_place computes on it with the faster device")
    _fits(load.dense + load.cache, hw.fast, "dense weights and caches", "fast memory")
    _fits(load.pool, hw.host, "experts", "host memory")
    seconds = load.read / hw.fast_rate + load.routed / _expert_rate(hw)
    return seconds, 0, f"experts ({gib(load.pool)}) are computed in host memory"


def _with_fast(mode: Mode, load: Load, hw: Hardware, miss_rate: float | None) -> tuple[float, int, str]:
    if not hw.fast or hw.unified:
        raise Impossible("there is no fast memory beside host memory" if not hw.unified else "fast and host memory are one")
    _fits(load.dense + load.cache, hw.fast, "dense weights and caches", "fast memory")
    left = hw.fast - load.dense - load.cache
    slots = min(load.layers * load.experts, left // load.expert_bytes)
    base = (load.read + load.routed) / hw.fast_rate
    if mode == "resident":
        _fits(load.dense + load.cache + load.pool, hw.fast, "everything", "fast memory")
        return base, slots, f"everything ({gib(load.dense + load.cache + load.pool)}) fits in {gib(hw.fast)} of fast memory"
    _fits(load.pool, hw.host, "experts", "host memory")
    if slots < load.top_k:
        raise Impossible(
            f"{gib(left)} of fast memory are left for experts, a token needs {load.top_k} of {gib(load.expert_bytes)}"
        )
    if hw.rates is None:
        raise Impossible("link and processor were not measured: run `moorage engine bench bw`")
    misses = _misses(load, slots, miss_rate)
    fetched = math.ceil(misses) if mode == "offload" else best_split(math.ceil(misses), hw.rates)
    # a fraction of a miss costs its fraction: misses are an average over tokens
    share = misses / math.ceil(misses) if misses else 0.0
    wait = share * miss_seconds(math.ceil(misses), fetched, load.expert_bytes, hw.rates) if misses else 0.0
    text = f"{slots} slots hold {slots / (load.layers * load.experts):.0%} of the experts; {misses:.1f} misses a layer"
    ahead = "" if slots >= BUFFERED_LAYERS * load.experts else f"; {BUFFERED_LAYERS * load.experts} would copy layers ahead"
    return base + load.layers * wait, slots, f"{text}, {fetched} fetched{ahead}"


def _stream(load: Load, hw: Hardware, miss_rate: float | None) -> tuple[float, int, str]:
    if hw.fast and not hw.unified:
        raise Impossible("streaming into a separate fast memory is not supported")
    slots = stream_slots(load, hw)
    if slots < load.experts:
        need = load.dense + load.cache + load.experts * load.expert_bytes
        raise Impossible(f"one layer of experts beside weights and caches needs {gib(need)} of {gib(hw.host)}")
    if not hw.packed:
        raise Impossible(f"the experts are in no packed file: `moorage engine pack` writes one of {gib(load.pool)}")
    misses, share = _misses(load, slots, miss_rate), slots / (load.layers * load.experts)
    reading = load.layers * misses * load.expert_bytes / (hw.disk_rate or hw.host_rate * UNMEASURED_DISK)
    # experts that are there are computed while others come
    seconds = load.read / hw.host_rate + max(load.routed / _expert_rate(hw), reading)
    room = f"{gib(slots * load.expert_bytes)} of memory hold {slots} of {load.layers * load.experts} experts ({share:.0%})"
    unmeasured = "" if hw.disk_rate else " (at a rate that was not measured)"
    return seconds, slots, f"{room}; the rest is read from the packed file when needed{unmeasured}"


def stream_slots(load: Load, hw: Hardware) -> int:
    """Experts that host memory holds beside weights and caches."""
    return min(load.layers * load.experts, (hw.host - load.dense - load.cache) // load.expert_bytes)


def _expert_rate(hw: Hardware) -> float:
    """At which the processor computes experts in host memory."""
    return hw.rates.host if hw.rates else hw.expert_rate or hw.host_rate


def _misses(load: Load, slots: int, miss_rate: float | None) -> float:
    """A layer's misses for one token, on average."""
    return load.top_k * (1 - slots / (load.layers * load.experts) if miss_rate is None else miss_rate)


def _fits(need: int, have: int, what: str, where: str) -> None:
    if need > have:
        raise Impossible(f"{what} need {gib(need)}, {where} has {gib(have)}: {gib(need - have)} short")


def would_fit(load: Load, hardware: Hardware) -> str:
    """What would make everything fit in the memory there is; "" when it does."""
    short = load.pool + load.dense + load.cache - (hardware.host if not hardware.fast else max(hardware.fast, hardware.host))
    if short <= 0:
        return ""
    bits = f"experts stored in {(load.pool - short) / load.pool:.0%} of their present size" if short < load.pool else ""
    packing = ""
    if load.layers and not hardware.packed and not hardware.fast and stream_slots(load, hardware) >= load.experts:
        held = stream_slots(load, hardware) / (load.layers * load.experts)
        packing = f"the experts packed into a file (`moorage engine pack`, {held:.0%} of them in memory at a time)"
    return ", or ".join(text for text in (f"{gib(short)} more memory", bits, packing) if text)
