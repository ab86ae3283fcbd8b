"""Which layers lie where beside a fast memory of its own, when one kind of memory cannot take them all. Pure arithmetic.

The link has its rate only from page-locked memory, and of that there may be less than of host memory. The layers in the middle
are locked, one region; those at both ends lie elsewhere: whole in fast memory, or computed where they are, which needs no
locking, whichever makes a token faster. What host memory cannot hold at all is read from the packed file, outermost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.experts.budget import Hardware, Impossible, Load, Mode, fits
from engine.experts.split import best_split, miss_seconds
from engine.memory import gib

UNMEASURED_DISK = 0.1  # of memory's rate: only to rank modes while nothing is known
BUFFERED_LAYERS = 2  # of slots: prefill computes one layer while the next is copied


@dataclass(frozen=True)
class Group:
    """Layers (counting those with experts) that are placed alike. `slots` of fast memory, or of host memory without one."""

    mode: Mode
    layers: tuple[int, ...]
    slots: int
    reason: str


@dataclass(frozen=True)
class Option:
    """One way to place a model. `pin_short`: bytes of its experts in host memory that cannot be page-locked but should be."""

    seconds: float  # a token
    groups: tuple[Group, ...]
    pin_short: int = 0

    @property
    def slots(self) -> int:
        return sum(group.slots for group in self.groups)

    @property
    def reason(self) -> str:
        first, *others = sorted(self.groups, key=lambda g: -len(g.layers))
        if not others:
            return first.reason
        return "; ".join(f"layers {spans(g.layers)} {g.mode}: {g.reason}" for g in (first, *others))


@dataclass(frozen=True)
class _Counts:
    """Layers by where their experts lie, from the middle outwards."""

    moved: int  # page-locked in host memory, misses cross the link
    resident: int
    host: int
    stream: int


def spans(layers: Iterable[int]) -> str:
    """`0-2, 45-47`"""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def arrange(mode: Mode, load: Load, hw: Hardware, miss_rate: float | None = None) -> Option:
    """`mode` for as many layers as can have it, the others as near to it as they can. Raises Impossible with the arithmetic."""
    fits(load.dense + load.cache, hw.fast, "dense weights and caches", "fast memory")
    held = 0 if mode == "stream" else min(load.layers, hw.host // load.layer_bytes)
    if held < load.layers and not hw.packed:
        if mode == "stream":
            raise Impossible(f"the experts are in no packed file: `moorage engine pack` writes one of {gib(load.pool)}")
        fits(load.pool, hw.host, "experts", "host memory")
    if mode != "stream" and not held:
        raise Impossible(f"one layer of experts needs {gib(load.layer_bytes)} of host memory, {gib(hw.host)} are there")
    moved = min(held, hw.lockable // load.layer_bytes) if mode in ("offload", "hybrid") else 0
    if mode in ("offload", "hybrid"):
        if hw.rates is None:
            raise Impossible("link and processor were not measured: run `moorage engine bench bw`")
        if not moved:
            raise Impossible(f"one layer of experts needs {gib(load.layer_bytes)} page-locked, {gib(hw.lockable)} may be")
    # host layers need no link; who has to be near it may lie whole in fast memory instead
    most = held - moved if moved else 0
    least = most if not hw.one_arithmetic else 0  # nothing may be computed in host memory
    tried = [_Counts(moved, resident, held - moved - resident, load.layers - held) for resident in range(least, most + 1)]
    options = [option for counts in tried if (option := _option(mode, counts, load, hw, miss_rate)) is not None]
    if not options:
        left = hw.fast - load.dense - load.cache
        if least:
            short, limit = gib(least * load.layer_bytes), gib(hw.lockable)
            raise Impossible(
                f"{short} of experts are beyond the {limit} that may be page-locked, nothing may be computed in host memory, and "
                f"{gib(left)} of fast memory do not hold them: raise the limit of locked memory"
            )
        need = f"a layer of {load.experts}" if held < load.layers else f"a token needs {load.top_k}"
        raise Impossible(f"{gib(left)} of fast memory are left for experts, {need} of {gib(load.expert_bytes)}")
    return min(options, key=lambda option: option.seconds)


def _option(mode: Mode, counts: _Counts, load: Load, hw: Hardware, miss_rate: float | None) -> Option | None:
    """None when slots do not suffice."""
    slots = (hw.fast - load.dense - load.cache) // load.expert_bytes - counts.resident * load.experts
    dealt = _deal(slots, counts, load)
    if dealt is None:
        return None
    for_moved, for_stream = dealt
    routed = load.top_k * load.expert_bytes
    seconds = load.read / hw.fast_rate + counts.resident * routed / hw.fast_rate + counts.host * routed / hw.computed
    order, own = _order(counts), {}
    short = max(0, (load.layers - counts.stream) * load.layer_bytes - hw.lockable) if counts.moved else 0
    if counts.moved:
        wait, text = _moved(mode, for_moved, counts.moved, load, hw, miss_rate)
        seconds += counts.moved * (routed / hw.fast_rate + wait)
        locked = f"; {gib(counts.moved * load.layer_bytes)} of them page-locked, {gib(short)} short" if short else ""
        own["moved"] = Group(mode, order["moved"], for_moved, text + locked)
    beyond = f"beyond the {gib(hw.lockable)} that may be page-locked, " if short else ""
    if counts.resident:
        text = f"{beyond}{gib(counts.resident * load.layer_bytes)} of fast memory hold them whole"
        own["resident"] = Group("resident", order["resident"], counts.resident * load.experts, text)
    if counts.host:
        text = f"{beyond}experts ({gib(counts.host * load.layer_bytes)}) are computed in host memory"
        own["host"] = Group("host", order["host"], 0, text)
    if counts.stream:
        reading, text = _streamed(for_stream, counts.stream, load, hw, miss_rate)
        seconds += counts.stream * max(routed / hw.fast_rate, reading)
        own["stream"] = Group("stream", order["stream"], for_stream, text)
    return Option(seconds, tuple(sorted(own.values(), key=lambda group: group.layers)), short)


def _deal(slots: int, counts: _Counts, load: Load) -> tuple[int, int] | None:
    """Slots for layers that are moved and streamed: in proportion. A streamed layer cannot be computed without a slot each."""
    least = (load.top_k if counts.moved else 0) + (load.experts if counts.stream else 0)
    if slots < least:
        return None
    if not counts.stream:
        return min(slots, counts.moved * load.experts), 0
    share = slots * counts.stream // (counts.moved + counts.stream)
    streamed = min(max(load.experts, share), counts.stream * load.experts)
    return min(slots - streamed, counts.moved * load.experts), streamed


def _order(counts: _Counts) -> dict[str, tuple[int, ...]]:
    """Layers of each place, the streamed outermost, evenly at both ends; of an odd number the last is at the end."""
    outside = ["stream"] * counts.stream + ["host"] * counts.host + ["resident"] * counts.resident
    places = [*outside[1::2], *["moved"] * counts.moved, *reversed(outside[::2])] if counts.moved else outside
    return {name: tuple(i for i, place in enumerate(places) if place == name) for name in set(places)}


def _moved(mode: Mode, slots: int, layers: int, load: Load, hw: Hardware, miss_rate: float | None) -> tuple[float, str]:
    """Seconds a layer waits for its misses, and what is done about them."""
    misses = misses_a_layer(load, slots, layers, miss_rate)
    whole = math.ceil(misses)
    fetched = whole if mode == "offload" else best_split(whole, hw.rates)
    # a fraction of a miss costs its fraction: misses are an average over tokens
    wait = misses / whole * miss_seconds(whole, fetched, load.expert_bytes, hw.rates) if misses else 0.0
    text = f"{slots} slots hold {slots / (layers * load.experts):.0%} of the experts; {misses:.1f} misses a layer"
    ahead = "" if slots >= BUFFERED_LAYERS * load.experts else f"; {BUFFERED_LAYERS * load.experts} would copy layers ahead"
    return wait, f"{text}, {fetched} fetched{ahead}"


def _streamed(slots: int, layers: int, load: Load, hw: Hardware, miss_rate: float | None) -> tuple[float, str]:
    """Seconds a layer reads from the file, and why it does."""
    reading = (
        misses_a_layer(load, slots, layers, miss_rate) * load.expert_bytes / (hw.disk_rate or hw.host_rate * UNMEASURED_DISK)
    )
    room = f"{gib(slots * load.expert_bytes)} of fast memory hold {slots} of {layers * load.experts} experts"
    short = f"host memory holds {load.layers - layers} of {load.layers} layers ({gib(layers * load.layer_bytes)} short); "
    unmeasured = "" if hw.disk_rate else " (at a rate that was not measured)"
    text = f"{room}; the rest is read from the packed file when needed{unmeasured}"
    return reading, (short if layers < load.layers else "") + text


def misses_a_layer(load: Load, slots: int, layers: int, miss_rate: float | None) -> float:
    """For one token, on average, where `layers` share `slots`."""
    return load.top_k * (1 - slots / (layers * load.experts) if miss_rate is None else miss_rate)
