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

from dataclasses import dataclass

from engine.experts.budget import MODES, Hardware, Impossible, Load, Mode, fits
from engine.experts.layers import UNMEASURED_DISK, Group, Option, arrange, misses_a_layer
from engine.memory import gib

TWO_ARITHMETICS = (
    "the device's kernels and the processor's do not add in the same order: an answer would depend on which experts lay in fast "
    "memory"
)


@dataclass(frozen=True)
class Placement:
    """`mode` is that of the layers in the middle; `groups` has every layer once."""

    mode: Mode
    slots: int  # experts that fit in fast memory, or in host memory when streaming
    decode_seconds: float  # expected, of one token alone, caches warm
    reason: str
    refused: dict[str, str]  # the other modes: why not, or how slow
    groups: tuple[Group, ...]
    pin_short: int  # bytes of page-locked memory that would place all layers alike

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / self.decode_seconds if self.decode_seconds else 0.0


def place(load: Load, hardware: Hardware, forced: Mode | None = None, miss_rate: float | None = None) -> Placement:
    """The fastest mode that fits, or `forced`. Raises Impossible.

    `miss_rate` is the share of expert uses that slots miss; None takes the share of experts without a slot (an even router).
    """
    options: dict[str, Option] = {}
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
    mode = forced or min(options, key=lambda m: options[m].seconds)
    best = options[mode]
    slower = {m: f"{o.seconds / best.seconds:.1f}x the time a token" for m, o in options.items() if m != mode}
    return Placement(mode, best.slots, best.seconds, best.reason, {**refused, **slower}, best.groups, best.pin_short)


def _consider(mode: Mode, load: Load, hw: Hardware, miss_rate: float | None) -> Option:
    """Raises Impossible with the arithmetic."""
    if mode in ("resident", "offload", "hybrid") and not hw.own_memory:
        raise Impossible("fast and host memory are one" if hw.unified else "there is no fast memory beside host memory")
    if mode in ("hybrid", "host") and hw.own_memory and not hw.one_arithmetic:
        raise Impossible(TWO_ARITHMETICS)
    if mode == "resident":
        return _resident(load, hw)
    if mode == "host" and not hw.own_memory:
        one = "there is one memory: in_place computes on it with the faster device"
        raise Impossible(one if hw.unified else "there is no fast memory to leave experts out of: in_place is the same")
    if mode == "in_place":
        return _in_place(load, hw)
    if mode == "stream" and not hw.own_memory:
        return _stream(load, hw, miss_rate)
    return arrange(mode, load, hw, miss_rate)


def _resident(load: Load, hw: Hardware) -> Option:
    need = load.dense + load.cache + load.pool
    fits(load.dense + load.cache, hw.fast, "dense weights and caches", "fast memory")
    fits(need, hw.fast, "everything", "fast memory")
    text = f"everything ({gib(need)}) fits in {gib(hw.fast)} of fast memory"
    return _alike("resident", load, load.layers * load.experts, text, (load.read + load.routed) / hw.fast_rate)


def _in_place(load: Load, hw: Hardware) -> Option:
    if hw.own_memory:
        raise Impossible("the device has a memory of its own: it cannot compute on host memory")
    need = load.pool + load.dense + load.cache
    fits(need, hw.host, "weights and caches", "memory")
    rate = hw.fast_rate if hw.unified else hw.host_rate
    seconds = load.read / rate + load.routed / (rate if hw.unified else hw.computed)
    return _alike(
        "in_place",
        load,
        0,
        f"everything ({gib(need)}) fits in the {gib(hw.host)} of the one memory: nothing is copied",
        seconds,
    )


def _stream(load: Load, hw: Hardware, miss_rate: float | None) -> Option:
    """With slots of host memory."""
    slots = stream_slots(load, hw)
    if slots < load.experts:
        need = load.dense + load.cache + load.layer_bytes
        raise Impossible(f"one layer of experts beside weights and caches needs {gib(need)} of {gib(hw.host)}")
    if not hw.packed:
        raise Impossible(f"the experts are in no packed file: `moorage engine pack` writes one of {gib(load.pool)}")
    misses, share = misses_a_layer(load, slots, load.layers, miss_rate), slots / (load.layers * load.experts)
    reading = load.layers * misses * load.expert_bytes / (hw.disk_rate or hw.host_rate * UNMEASURED_DISK)
    # experts that are there are computed while others come
    seconds = load.read / hw.host_rate + max(load.routed / hw.computed, reading)
    room = f"{gib(slots * load.expert_bytes)} of memory hold {slots} of {load.layers * load.experts} experts ({share:.0%})"
    unmeasured = "" if hw.disk_rate else " (at a rate that was not measured)"
    text = f"{room}; the rest is read from the packed file when needed{unmeasured}"
    return _alike("stream", load, slots, text, seconds)


def _alike(mode: Mode, load: Load, slots: int, reason: str, seconds: float) -> Option:
    """All layers placed alike."""
    return Option(seconds, (Group(mode, tuple(range(load.layers)), slots, reason),))


def stream_slots(load: Load, hw: Hardware) -> int:
    """Experts that host memory holds beside weights and caches."""
    return min(load.layers * load.experts, (hw.host - load.dense - load.cache) // load.expert_bytes)


def would_fit(load: Load, hardware: Hardware) -> str:
    """What would make everything fit in the memory there is; "" when it does."""
    have = max(hardware.fast, hardware.host) if hardware.fast else hardware.host
    short = load.pool + load.dense + max(load.cache, load.least_room) - have
    if short <= 0:
        return ""
    bits = f"experts stored in {(load.pool - short) / load.pool:.0%} of their present size" if short < load.pool else ""
    packing = ""
    if load.layers and not hardware.packed and not hardware.fast and stream_slots(load, hardware) >= load.experts:
        held = stream_slots(load, hardware) / (load.layers * load.experts)
        packing = f"the experts packed into a file (`moorage engine pack`, {held:.0%} of them in memory at a time)"
    return ", or ".join(text for text in (f"{gib(short)} more memory", bits, packing) if text)
