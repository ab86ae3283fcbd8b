"""What a model will take on this machine, before a weight is read: memory by kind, where experts go, expected decode speed."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine.experts.budget import Hardware, Impossible, Load, Mode
from engine.experts.calibrate import Profile, measure_disk, usable_profile, with_link
from engine.experts.cuda import device_of
from engine.experts.devices import Device, find_devices
from engine.experts.filepool import Pack
from engine.experts.identity import kernel_version, this_machine
from engine.experts.layers import spans
from engine.experts.placement import Placement, place
from engine.experts.pool import bank_bytes
from engine.experts.split import Rates
from engine.experts.streams import Device as StreamDevice
from engine.hostmem import available_bytes
from engine.kernels.ops import Ops, Quant, Weight
from engine.memory import CachePlan, TooLittleMemory, gib, least_room, page_bytes, plan_cache
from engine.models.load import Checkpoint, LoadedModel, held_bytes
from engine.models.spec import ModelSpec, MoeSpec
from engine.nn.batch import PAGE
from engine.nn.experts import Bank
from engine.promises import promised
from engine.protocol import log_line

log = logging.getLogger(__name__)

CONTEXT = 4096  # tokens of conversation the expected speed is stated for, if the model holds so many
# canonical name (without its layer) begins with -> kind of memory, first match counts
KINDS = (
    ("embed", "embeddings"),
    ("head", "embeddings"),
    ("attn.", "attention"),
    ("delta.", "linear attention"),
    ("mlp.", "feed-forward"),
    ("moe.gate_up", "routed experts"),
    ("moe.down", "routed experts"),
    ("moe.", "router and shared expert"),
)
POOL = "routed experts"
DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
}  # as ggml names them


@dataclass(frozen=True)
class Plan:
    kinds: dict[str, int]  # kind of memory -> bytes of weights
    cache: CachePlan | None
    available: int
    load: Load
    placement: Placement | None
    refusal: str  # why there is no placement
    profile: Profile | None
    hardware: Hardware
    devices: tuple[Device, ...]  # accelerators that are here, whether these kernels compute on them or not
    context: int  # tokens the speed is stated for
    promised: int = 0  # to engines that run already; not in `available`
    on_device: bool = False  # the kernels compute on a device

    @property
    def weights(self) -> int:
        return sum(self.kinds.values())


def default_profile() -> Path:
    """Where `moorage bench bw` keeps what it measured. A user without a home, as in a container, has the machine's own folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # neither HOME nor an entry among the users
            base = "/var/cache"
    return Path(base) / "moorage" / "bandwidth.json"


def weight_kinds(checkpoint: Checkpoint, ops: Ops) -> dict[str, int]:
    """Bytes in memory by kind, largest first, widened where `ops` has no kernel for the stored type."""
    sizes: Counter[str] = Counter()
    taken: Counter[str] = Counter()  # rows of a source that several canonical tensors share
    for piece in checkpoint.pieces:
        taken[piece.source] += len(piece.rows or ())
    for piece in checkpoint.pieces:
        share = len(piece.rows) / taken[piece.source] if piece.rows else 1.0
        sizes[kind_of(piece.name)] += round(held_bytes(checkpoint, piece.source, ops) * share)
    return dict(sizes.most_common())


def kind_of(name: str) -> str:
    local = name.partition(".")[2] if name.partition(".")[0].isdigit() else name
    return next((kind for prefix, kind in KINDS if local.startswith(prefix)), "norms")


def load_of(
    spec: ModelSpec, kinds: dict[str, int], embed: int, cache: CachePlan | None, kv_bytes_per_token: float, least_room: int = 0
) -> Load:
    """`embed` bytes of the embedding table: a token reads one row of it, or all of it where it is the output head too."""
    moe = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec)]
    pool = kinds.get(POOL, 0)
    dense = sum(kinds.values()) - pool
    experts = moe[0].experts if moe else 1
    return Load(
        dense=dense,
        cache=cache.total_bytes if cache else 0,
        layers=len(moe),
        experts=experts,
        top_k=moe[0].top_k if moe else 1,
        expert_bytes=pool // (len(moe) * experts) if moe else 1,
        cache_read=round(min(CONTEXT, spec.max_positions) * kv_bytes_per_token),
        unread=0 if spec.tie_embeddings else embed,
        least_room=least_room,
    )


def make_plan(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    profile_path: Path | None = None,
    max_context: int = 0,
    kv_bytes: int = 0,
    forced: Mode | None = None,
    available: int | None = None,
    pack: Pack | None = None,
    fast: FastMemory | None = None,
) -> Plan:
    """`pack` holds the routed experts. Raises TooLittleMemory when the smallest cache does not fit beside all but the experts."""
    spec, kinds = checkpoint.spec, weight_kinds(checkpoint, ops)
    others = promised() if available is None else 0
    have = available if available is not None else max(0, (available_bytes() or 0) - others)
    here = this_machine(kernel_version(ops))
    profile = usable_profile(profile_path or default_profile(), here, time.time())
    device, devices = device_of(ops), find_devices()
    unified = any(each.unified for each in devices)
    near = device.memory()[0] if device is not None and not unified else have
    cache = _cache_beside(spec, ops, near, kinds, max_context, kv_bytes)
    embed = sum(held_bytes(checkpoint, p.source, ops) for p in checkpoint.pieces if p.name == "embed")
    load = load_of(spec, kinds, embed, cache, page_bytes(spec, ops.kv_dtype) / PAGE, least_room(spec, ops.kv_dtype, max_context))
    kind = expert_kind(checkpoint)
    machine = hardware(profile, have, kind, pack)
    if device is None and fast is not None:
        machine = beside(machine, fast, profile, kind, load, max(0, have - load.dense - load.cache - fast.size))
    elif device is not None and fast is not None and not unified:
        machine = beside_device(machine, replace(fast, device=device), profile, kind, load, have)
    elif device is not None:
        machine = on_device(machine, device, devices, profile, kind, load)
    try:
        if fast is not None and not (device is not None and unified):
            _has_room(fast, near - load.dense - (0 if pack or device is not None else load.pool))
        placement, refusal = place(load, machine, forced), ""
    except Impossible as problem:
        placement, refusal = None, str(problem)
    context = min(CONTEXT, spec.max_positions)
    used = device is not None
    return Plan(kinds, cache, have, load, placement, refusal, profile, machine, devices, context, others, used)


def _has_room(fast: FastMemory, left: int) -> None:
    """Raises Impossible where `left` bytes beside weights do not hold the slots and a cache: an engine would not start."""
    if fast.size >= left:
        raise Impossible(f"--fast-memory asks for {gib(fast.size)}, {gib(max(0, left))} are available: lower it")


def _cache_beside(
    spec: ModelSpec, ops: Ops, have: int, kinds: dict[str, int], max_context: int, kv_bytes: int
) -> CachePlan | None:
    """The cache beside all weights; where that does not fit, beside all but the routed experts; None if not even they do."""
    pool = kinds.get(POOL, 0)
    room = have - sum(kinds.values())
    try:
        if room > 0:
            return plan_cache(spec, ops.kv_dtype, room, max_context=max_context, kv_bytes=kv_bytes)
    except TooLittleMemory:
        if not pool:
            raise
    room += pool
    return plan_cache(spec, ops.kv_dtype, room, max_context=max_context, kv_bytes=kv_bytes) if room > 0 else None


def hardware(profile: Profile | None, available: int, kind: str, pack: Pack | None = None) -> Hardware:
    """This machine as the planner sees it. Without a profile every rate is 1: modes can be told apart, speeds cannot."""
    packed = pack is not None
    if profile is None:
        return Hardware(host=available, host_rate=1.0, packed=packed)
    measured = next((each for each in kind.split(", ") if each in profile.formats), "")
    return Hardware(
        host=available,
        host_rate=profile.read.rate,
        expert_rate=profile.formats[measured].alone.rate if measured else 0.0,
        packed=packed,
        disk_rate=read_rate(pack) if pack else 0.0,
        rates=profile.rates(measured),
    )


@dataclass(frozen=True)
class FastMemory:
    """A fast memory for experts: bytes for slots, and how much of host memory counts as page-locked (0: all).

    `device`'s, or one that this machine emulates behind a link of so many bytes per second: the processor computes then, and
    dense weights and caches count as if they lay in it too.
    """

    size: int
    link: float
    pin: int = 0
    device: StreamDevice | None = None


def beside(machine: Hardware, fast: FastMemory, profile: Profile | None, kind: str, load: Load, host: int) -> Hardware:
    """`machine` with an emulated fast memory, and `host` bytes of host memory for experts."""
    linked = hardware(with_link(profile, fast.link) if profile else None, host, kind)
    return replace(
        linked,
        fast=load.dense + load.cache + fast.size,
        fast_rate=machine.host_rate,
        packed=machine.packed,
        disk_rate=machine.disk_rate,
        pin=fast.pin or None,
    )


def beside_device(machine: Hardware, fast: FastMemory, profile: Profile | None, kind: str, load: Load, host: int) -> Hardware:
    """`machine` with slots in a device's memory, beside what lies there already, and `host` bytes of host memory for experts."""
    found = on_device(replace(machine, host=host), fast.device, (), profile, kind, load)
    return replace(found, fast=load.dense + load.cache + fast.size, pin=fast.pin or None)


def on_device(
    machine: Hardware, device: StreamDevice, devices: Sequence[Device], profile: Profile | None, kind: str, load: Load
) -> Hardware:
    """`machine` with the device that the kernels compute on: its free memory, or the one memory there is; its measured rates."""
    rates = profile.device if profile else None
    measured = next((each for each in kind.split(", ") if rates and each in rates.formats), "")
    read = rates.formats[measured].alone.rate if measured else rates.read.rate if rates else machine.host_rate
    if any(each.unified for each in devices):
        return replace(machine, fast=machine.host, fast_rate=read, unified=True)
    free, _ = device.memory()
    link = profile.device_rates(measured, load.expert_bytes) if profile else None
    return replace(
        machine, fast=free, fast_rate=read, rates=link or _unmeasured(machine, devices or find_devices()), one_arithmetic=False
    )


def _unmeasured(machine: Hardware, devices: Sequence[Device]) -> Rates:
    """What copies may be reckoned with before `bench bw` has run: the slot's nominal rate, or host memory's."""
    link = max((each.link for each in devices), default=0.0)
    log.warning(log_line("device link not measured", hint="moorage engine bench bw --kernels cuda"))
    return Rates(link or machine.host_rate, machine.host_rate, 0.0)


def read_rate(pack: Pack) -> float:
    """Bytes per second of reads at random; 0 when it is too small to measure."""
    try:
        return measure_disk(pack.path).rate
    except (OSError, ValueError) as problem:
        log.info(log_line("pack read rate not measured", why=str(problem)))
        return 0.0


def expert_kind(checkpoint: Checkpoint) -> str:
    """The type most expert bytes are stored in, by its ggml name."""
    sizes: Counter[str] = Counter()
    for piece in checkpoint.pieces:
        if kind_of(piece.name) == POOL:
            kind = checkpoint.kind(piece.source)
            sizes[DTYPES.get(str(kind), str(kind))] += checkpoint.nbytes(piece.source)
    return sizes.most_common(1)[0][0] if sizes else ""


def stored_bytes(weights: Iterable[Weight]) -> int:
    """Memory of loaded weights; parts of a joined matrix are views of it and count once."""
    tensors = [w.data if isinstance(w, Quant) else w for w in weights]
    storages = ((t.untyped_storage(), t) for t in tensors)
    return sum({s.data_ptr(): s.nbytes() if t.is_contiguous() else t.nbytes for s, t in storages}.values())


@dataclass(frozen=True)
class Shape:
    """The routed experts of a model that is loaded: in memory, or in a file with some of them in memory."""

    layers: int
    experts: int
    expert_bytes: int
    pool_bytes: int
    kind: str
    slots: int = 0  # bytes of memory for experts that are in a file
    disk_rate: float = 0.0  # bytes per second of the file; 0 = not measured
    packed: bool = False  # all in memory, but from a pack: not among the loaded weights


def host_shape(banks: Sequence[Bank]) -> Shape:
    kind = banks[0].gate_up
    name = kind.type if isinstance(kind, Quant) else DTYPES[str(kind.dtype)]
    pool = sum(bank_bytes(b) for b in banks)
    return Shape(len(banks), banks[0].experts, pool // sum(b.experts for b in banks), pool, name)


def file_shape(pack: Pack, slots: int, disk_rate: float) -> Shape:
    """`slots` in bytes."""
    pool = pack.expert_bytes
    return Shape(pack.layers, pack.experts, pool // (pack.layers * pack.experts), pool, pack.stored_as, slots, disk_rate)


@dataclass(frozen=True)
class Placed:
    """The placement of a model that runs, and the numbers behind it."""

    found: Placement
    load: Load
    hardware: Hardware
    shape: Shape
    profile: Profile | None
    context: int

    def status(self) -> dict[str, object]:
        """As `/v1/experts/status` shows it."""
        found, load, shape = self.found, self.load, self.shape
        known = self.profile is not None and (shape.disk_rate > 0 or not shape.slots)
        return {
            "mode": found.mode,
            "reason": found.reason,
            "others": found.refused,
            "groups": groups_status(found, load),
            "pin_budget_bytes": self.hardware.lockable if self.hardware.own_memory else None,
            "pin_short_bytes": found.pin_short,
            "pool_bytes": shape.pool_bytes,
            "expert_bytes": shape.expert_bytes,
            "layers": shape.layers,
            "experts": shape.experts,
            "top_k": load.top_k,
            "stored_as": shape.kind,
            "bytes_per_token": load.read + load.routed,
            "at_context": self.context,
            "expected_decode_tok_s": found.tokens_per_second if known else None,
            "disk_bytes_per_s": shape.disk_rate or None,
            "profile": asdict(self.profile) if self.profile else None,
            "devices": [asdict(device) for device in find_devices()],
        }


def groups_status(found: Placement, load: Load) -> list[dict[str, object]]:
    return [
        {
            "layers": spans(group.layers),
            "mode": group.mode,
            "bytes": len(group.layers) * load.layer_bytes,
            "slots": group.slots,
            "reason": group.reason,
        }
        for group in found.groups
    ]


def place_loaded(
    loaded: LoadedModel,
    ops: Ops,
    cache: CachePlan,
    shape: Shape,
    fast: FastMemory | None = None,
    forced: Mode | None = None,
    unified: bool = False,
) -> Placed:
    """`unified`: a device computes, in the processor's memory. Raises Impossible for a mode that this machine cannot run."""
    spec, weights = loaded.spec, stored_bytes(loaded.weights.values())
    profile = usable_profile(default_profile(), this_machine(kernel_version(ops)), time.time())
    moe = next(layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec))
    load = Load(
        dense=weights - (0 if shape.slots or shape.packed else shape.pool_bytes),
        cache=cache.total_bytes,
        layers=shape.layers,
        experts=shape.experts,
        top_k=moe.top_k,
        expert_bytes=shape.expert_bytes,
        cache_read=round(min(CONTEXT, spec.max_positions) * page_bytes(spec, ops.kv_dtype) / PAGE),
        unread=0 if spec.tie_embeddings else stored_bytes([loaded.weights["embed"]]),
    )
    have = weights + cache.total_bytes + (shape.pool_bytes if shape.packed else shape.slots)  # it is all there already
    machine = hardware(profile, have, shape.kind)
    if shape.slots:
        machine = replace(machine, packed=True, disk_rate=shape.disk_rate)
    if unified:
        machine = replace(machine, fast=machine.host, fast_rate=machine.host_rate, unified=True)
    if fast is not None:
        behind = beside if fast.device is None else beside_device
        machine = behind(machine, fast, profile, shape.kind, load, shape.slots or shape.pool_bytes)
        found = place(load, machine, forced)
    else:
        found = place(load, machine, forced or ("stream" if shape.slots else "in_place"))
    return Placed(found, load, machine, shape, profile, min(CONTEXT, spec.max_positions))
