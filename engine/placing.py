"""Where a loaded model's experts lie, and the executor over them: in memory, on a device, behind an emulated link, in a pack."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.config import EngineConfig
from engine.experts import mapped
from engine.experts.budget import Impossible
from engine.experts.filepool import Pack
from engine.experts.inplace import MappedExperts
from engine.experts.layers import spans
from engine.experts.locking import Locked, lock_banks
from engine.experts.pool import data_of
from engine.experts.recording import Recording
from engine.experts.streams import HERE, Device
from engine.experts_control import ExpertParts
from engine.kernels.ops import Ops, Weight
from engine.mapped import MappedFile
from engine.memory import CachePlan, gib
from engine.models.load import LoadedModel
from engine.models.spec import MoeSpec
from engine.nn.experts import Experts, InPlace, expert_banks
from engine.packing import stream_experts
from engine.plan import FastMemory, Placed, file_shape, host_shape, place_loaded, read_rate
from engine.protocol import log_line
from engine.tensors import library_of
from engine.tiers import Kernels, Source, Ways, read_banks, run_groups

log = logging.getLogger(__name__)

Progress = Callable[[float, str], None]
# Where a checkpoint's experts are loaded to: beside all other weights, to host memory for copies to a device, to the one memory
# of processor and device, nowhere (they are in a pack).
Held = Literal["kernels", "host", "one memory", "pack"]


@dataclass(frozen=True)
class Placing:
    """What decides where experts lie. `slots` of each pool of `pack`, in host memory."""

    config: EngineConfig
    loaded: LoadedModel
    ops: Ops
    cache: CachePlan
    pack: Pack | None
    slots: Sequence[int]
    progress: Progress
    held: Held = "kernels"
    device: Device | None = None  # that `ops` computes on

    @property
    def host_bytes(self) -> int:
        """Host memory for experts that come from the pack."""
        return sum(count * pool.expert_bytes for count, pool in zip(self.slots, self.pack.pools, strict=True)) if self.pack else 0

    @property
    def routers(self) -> list[Weight]:
        layers = enumerate(self.loaded.spec.layers)
        return [self.loaded.weights[f"{i}.moe.router"] for i, layer in layers if isinstance(layer.ffn, MoeSpec)]


def place_experts(what: Placing, fast: FastMemory | None) -> ExpertParts | None:
    """None for a model that has none. Raises Impossible, OSError, MemoryError."""
    if not any(isinstance(layer.ffn, MoeSpec) for layer in what.loaded.spec.layers):
        return None
    if fast is not None:
        return beside_fast_memory(what, fast)
    if what.pack:
        return streamed(what)
    return on_one_memory(what) if what.held == "one memory" else in_memory(what)


def in_memory(what: Placing) -> ExpertParts:
    """Experts computed where they lie: in host memory, or all in a device's."""
    banks = expert_banks(what.loaded.spec, what.loaded.weights)
    whole = FastMemory(host_shape(banks).pool_bytes, 0.0, device=what.device) if what.device else None
    placed = place_loaded(
        what.loaded, what.ops, what.cache, host_shape(banks), whole, what.config.placement or ("resident" if whole else None)
    )
    return expert_parts(InPlace(banks, what.ops), placed)


def on_one_memory(what: Placing) -> ExpertParts:
    """A device computes on host memory, which is its own too."""
    banks = expert_banks(what.loaded.spec, what.loaded.weights)
    placed = place_loaded(
        what.loaded, what.ops, what.cache, host_shape(banks), unified=True, forced=what.config.placement or "in_place"
    )
    return expert_parts(mapped.in_place(banks, what.ops), placed)


def packed_in_place(what: Placing) -> tuple[ExpertParts, tuple[MappedFile, ...]]:
    executor = MappedExperts(what.pack, what.ops, library_of(data_of(what.loaded.weights["embed"])))
    shape = replace(host_shape(executor.banks), kind=what.pack.stored_as, packed=True)
    placed = place_loaded(what.loaded, what.ops, what.cache, shape, forced=what.config.placement or None)
    return expert_parts(executor, placed), (executor.file,)


def streamed(what: Placing) -> ExpertParts:
    """Experts read from a pack into slots, which are full when this returns."""
    what.progress(0.0, "reading experts")
    executor, rate = stream_experts(what.pack, what.ops, what.slots, what.config.expert_policy, what.routers)
    try:
        size = executor.capacity * executor.slot_bytes
        placed = place_loaded(
            what.loaded, what.ops, what.cache, file_shape(what.pack, size, rate), forced=what.config.placement or None
        )
        if placed.found.mode != "stream":
            raise Impossible(f"{placed.found.mode}: start without --experts-pack, everything is loaded then")
        executor.preload(_counted(what.progress, size))
    except BaseException:
        executor.close()
        raise
    return expert_parts(executor, placed)


def beside_fast_memory(what: Placing, fast: FastMemory) -> ExpertParts:
    """Experts placed by groups of layers; all slots are full when this returns."""
    what.progress(0.0, "placing experts")
    pack, ops, config = what.pack, what.ops, what.config
    loaded = {} if pack else dict(enumerate(expert_banks(what.loaded.spec, what.loaded.weights)))
    shape = file_shape(pack, what.host_bytes, read_rate(pack)) if pack else host_shape(list(loaded.values()))
    placed = place_loaded(what.loaded, ops, what.cache, shape, fast, config.placement or None)
    groups = placed.found.groups
    held = [n for group in groups if group.mode != "stream" for n in group.layers]
    size = sum(group.slots for group in groups) * shape.expert_bytes + (len(held) * placed.load.layer_bytes if pack else 0)
    count = _counted(what.progress, size)
    banks = loaded or read_banks(pack, held, count)
    ways = Ways(placed.hardware.rates, shape.disk_rate, config.expert_policy, fast.link)
    copied = [banks[n] for group in groups if group.mode in ("offload", "hybrid") for n in group.layers]
    locked = lock_banks(copied, placed.hardware.lockable)
    executor = run_groups(groups, Source(banks, pack, what.routers), Kernels(ops, what.device or HERE), ways)
    executor.preload(count)
    return expert_parts(executor, placed, locked)


def _counted(progress: Progress, size: int) -> Callable[[int], None]:
    done = 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        progress(min(1.0, done / max(1, size)), "reading experts")

    return count


def expert_parts(executor: Experts, placed: Placed, locked: Locked | None = None) -> ExpertParts:
    found = placed.status() | (locked or Locked()).status()
    log.info(log_line("experts", mode=found["mode"], pool=found["pool_bytes"], reason=found["reason"]))
    if len(placed.found.groups) > 1:
        for group in placed.found.groups:
            log.info(log_line("experts of layers", layers=spans(group.layers), mode=group.mode, reason=group.reason))
    if placed.found.pin_short:
        locked, short = gib(placed.hardware.lockable), gib(placed.found.pin_short)
        log.warning(log_line("page-locked memory is short", budget=locked, short=short, hint="layers at both ends lie elsewhere"))
    recording = Recording(executor, int(found["layers"]), int(found["experts"]))
    return ExpertParts(recording, found)
