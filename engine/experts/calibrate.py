"""`bench bw`: how fast this machine reads memory, copies experts and computes them in place, measured with the real kernels.

An idle machine lies for the first seconds, so every figure is repeated until its last rounds agree; what came before is thrown
away and counted. Results are kept with what they were measured on (`identity`); a profile of another machine or other kernels, or
one that is too old, is not used, and the log says why.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine.experts.filepool import PIECE, READERS
from engine.experts.identity import Machine
from engine.experts.split import Rates
from engine.hostmem import huge
from engine.kernels.blocks import MX_GROUP, NV_GROUP, f8_blocks, mxfp4_blocks, nvfp4_blocks
from engine.kernels.ops import Ops, Quant, Weight
from engine.lean import torch
from engine.protocol import log_line

log = logging.getLogger(__name__)

AGREE = 3  # rounds in a row that must be within CLOSE of each other
CLOSE = 0.05
ROUNDS = 40  # at most; a machine under load never settles, and that is then reported
ROUND_S = 0.1  # a round repeats its work for at least so long: far above the clock's and the scheduler's grain
MAX_AGE_S = 90 * 86400  # kernels, firmware and cooling change; a season is long enough
# One expert of a 30B-A3B model; HIDDEN and INTER are multiples of every block size. The pool must not fit any cache.
HIDDEN, INTER, TOP_K = 2048, 768, 8
POOL_BYTES = 768 << 20
READ_BYTES = 512 << 20
MIN_PIECES = 64  # of a file whose read rate is measured: fewer would be read again and again from the disk's own cache
# Where the float16 scales of a ggml block lie, in bytes from its start.
SCALES_AT = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q2_K": (80, 82), "Q3_K": (108,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ3_XXS": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
OWN = {"F8_E4M3": (128, 132), "NVFP4_SCALED": (128, 76), "MXFP4": (32, 17)}  # elements and bytes of `kernels/blocks.py`'s blocks
# What checkpoints call a format whose numbers and scales are another's: one kernel, the same bytes.
CALLED = {"DS_FP4": "MXFP4", "FP8": "F8_E4M3", "NVFP4": "NVFP4_SCALED"}
HALF = 126  # e8m0: an exponent of -1


@dataclass(frozen=True)
class Figure:
    """Median of the last AGREE rounds in bytes per second; `cold` rounds were thrown away; `steady` False: it never settled."""

    rate: float
    cold: int
    steady: bool


def settle(measure: Callable[[], float], rounds: int = ROUNDS) -> Figure:
    """Repeat `measure` (bytes per second) until the last AGREE rounds agree within CLOSE."""
    seen: list[float] = []
    while len(seen) < rounds:
        seen.append(measure())
        last = sorted(seen[-AGREE:])
        if len(last) == AGREE and last[-1] - last[0] <= CLOSE * last[-1]:
            return Figure(last[AGREE // 2], len(seen) - AGREE, True)
    return Figure(sorted(seen[-AGREE:])[len(seen[-AGREE:]) // 2], max(0, len(seen) - AGREE), False)


def timed(work: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second of `work`, which returns the bytes it went through, repeated for ROUND_S."""
    began, moved = clock(), 0
    while clock() - began < ROUND_S:
        moved += work()
    return moved / (clock() - began)


@dataclass(frozen=True)
class FormatRates:
    """Stored bytes a second through the expert kernel, one token: alone, and while the link copies."""

    alone: Figure
    shared: Figure


@dataclass(frozen=True)
class KernelRates:
    """Stored bytes a second through the expert kernel of a format, one token: alone, while copies come; `link`: those copies."""

    alone: Figure
    shared: Figure
    link: Figure


@dataclass(frozen=True)
class DeviceRates:
    """Bytes a second. `link`: from page-locked memory by bytes of a copy, two given to the device at once; `read`: within its
    memory, read and written bytes."""

    name: str
    link: dict[int, Figure]
    read: Figure
    formats: dict[str, KernelRates]

    def link_of(self, expert_bytes: int) -> float:
        """Of experts of this size: that of the largest measured copy that is not larger."""
        fitting = [size for size in self.link if size <= expert_bytes]
        return self.link[max(fitting, default=min(self.link))].rate


@dataclass(frozen=True)
class Profile:
    machine: Machine
    read: Figure  # STREAM-like read of host memory, all threads
    link: Figure | None  # copies into fast memory; None where there is none
    formats: dict[str, FormatRates]
    disk: Figure | None  # reads of whole experts from a file, past the page cache; None where none was named
    measured_at: float  # seconds since 1970
    device: DeviceRates | None = None  # None where none computes

    def rates(self, kind: str) -> Rates | None:
        """What `split` needs for experts stored as `kind`; None when that was not measured."""
        if self.link is None or kind not in self.formats:
            return None
        own = self.formats[kind]
        return Rates(self.link.rate, own.alone.rate, own.shared.rate)

    def device_rates(self, kind: str, expert_bytes: int) -> Rates | None:
        """The same for experts that are copied to the device, which computes meanwhile; the processor computes none of them."""
        if self.device is None or kind not in self.device.formats:
            return None
        link = min(self.device.link_of(expert_bytes), self.device.formats[kind].link.rate)
        host = self.formats[kind].alone.rate if kind in self.formats else self.read.rate
        return Rates(link, host, max(0.0, host - link))


# --- measuring


class ExpertLoop:
    """A pool of random experts of one format; each call computes one token through TOP_K experts, other ones every time."""

    def __init__(self, ops: Ops, kind: str, pool_bytes: int = POOL_BYTES) -> None:
        self._ops = ops
        size = _stored_bytes(kind, 2 * INTER * HIDDEN) + _stored_bytes(kind, HIDDEN * INTER)
        self._experts = max(2 * TOP_K, pool_bytes // size)
        self.expert_bytes = size
        self.gate_up = ops.prepare(random_weight(kind, self._experts, 2 * INTER, HIDDEN))
        self.down = ops.prepare(random_weight(kind, self._experts, HIDDEN, INTER))
        self._x, self._weights, self._at = torch.randn(1, HIDDEN), torch.full((1, TOP_K), 1 / TOP_K), 0

    def __call__(self) -> int:
        ids = (torch.arange(self._at, self._at + TOP_K) % self._experts).int()[None]
        self._at = (self._at + TOP_K) % self._experts
        self._ops.moe(self._x, ids, self._weights, self.gate_up, self.down, "silu")
        return TOP_K * self.expert_bytes


class Copying:
    """While entered, a thread copies expert after expert as fast as it can: the link at work. `rate` afterwards."""

    def __init__(self, source: Weight) -> None:
        self._from = source.data if isinstance(source, Quant) else source
        self._to = torch.empty_like(self._from[:8])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._moved, self._began, self.rate = 0, 0.0, 0.0

    def __enter__(self) -> Copying:
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.rate = self._moved / (time.perf_counter() - self._began)

    def _work(self) -> None:
        at = 0
        while not self._stop.is_set():
            self._moved += self.copy(at)
            at += 1

    def copy(self, at: int) -> int:
        piece = self._from[at % len(self._from)]
        self._to[at % 8].copy_(piece)
        return piece.nbytes


def measure_read(ops: Ops) -> Figure:
    """Reads every byte of a buffer larger than the caches with all threads of the kernels."""
    buffer = torch.ones(READ_BYTES // 4)
    native = getattr(ops, "_ops", None)
    read = (lambda: native.stream_read(buffer)) if native is not None else (lambda: buffer.sum())

    def once() -> int:
        read()
        return buffer.nbytes

    return settle(lambda: timed(once))


def measure_format(ops: Ops, kind: str, pool_bytes: int = POOL_BYTES) -> tuple[FormatRates, Figure]:
    """The expert kernel alone and beside copies, and the copies alone."""
    loop = ExpertLoop(ops, kind, pool_bytes)
    alone = settle(lambda: timed(loop))
    copier, at = Copying(loop.gate_up), iter(range(1 << 62))
    link = settle(lambda: timed(lambda: copier.copy(next(at))))
    with copier:
        shared = settle(lambda: timed(loop))
    return FormatRates(alone, shared), link


def measurable_disk(file: Path, piece: int = PIECE) -> int:
    """Its bytes. Raises OSError, ValueError for a file whose read rate cannot be measured: too small, or with no direct reads."""
    size = file.stat().st_size
    if size < MIN_PIECES * piece:
        raise ValueError(f"it has {size / 2**20:.1f} MiB, at least {MIN_PIECES * piece >> 20} are needed")
    os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    return size


def measure_disk(file: Path, piece: int = PIECE) -> Figure:
    """Reads of `piece` bytes at random places past the page cache, as many at once as a pack is read with.

    Raises OSError, ValueError for a file that is too small.
    """
    size = measurable_disk(file, piece)
    handle, buffers = os.open(file, os.O_RDONLY | os.O_DIRECT), [huge(piece) for _ in range(READERS)]

    def read(number: int) -> int:
        chance, moved, until = random.Random(number), 0, time.perf_counter() + ROUND_S
        into = [memoryview(buffers[number])[:piece]]
        while time.perf_counter() < until:
            moved += os.preadv(handle, into, chance.randrange(size // piece) * piece)
        return moved

    try:
        with ThreadPoolExecutor(READERS) as readers:
            return settle(lambda: timed(lambda: sum(readers.map(read, range(READERS)))))
    finally:
        os.close(handle)


def random_weight(kind: str, experts: int, rows: int, cols: int) -> Weight:
    """Random experts [experts, rows, cols] stored as `kind`; one tile of rows is repeated, which no kernel notices."""
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    if kind in dtypes:
        return (torch.randn(16, cols) / 8).to(dtypes[kind]).repeat(experts, rows // 16, 1)
    if kind in OWN:
        return _small_floats(kind, experts, rows, cols)
    per_block, size = _block(kind)
    blocks = torch.randint(0, 256, (16, cols // per_block, size), dtype=torch.uint8)
    for offset in SCALES_AT[kind]:  # finite scales of a sane size: NaN and denormals would be slower than weights are
        blocks[..., offset : offset + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return Quant(blocks.view(16, -1).repeat(experts, rows // 16, 1), kind, cols)


def _small_floats(kind: str, experts: int, rows: int, cols: int) -> Quant:
    """The formats of fp8 and fp4 checkpoints."""
    if kind == "F8_E4M3":
        tile = f8_blocks((torch.randn(16, cols) / 8).to(torch.float8_e4m3fn), torch.tensor(0.5))
    else:
        numbers = torch.randint(0, 256, (16, cols // 2), dtype=torch.uint8)
        if kind == "MXFP4":
            tile = mxfp4_blocks(numbers, torch.full((16, cols // MX_GROUP), HALF, dtype=torch.uint8))
        else:
            scales = torch.full((16, cols // NV_GROUP), 0.5).to(torch.float8_e4m3fn)
            tile = nvfp4_blocks(numbers, scales, torch.tensor(0.1))
    return Quant(tile.data.repeat(experts, rows // 16, 1), kind, cols)


def measurable(ops: Ops) -> list[str]:
    """Formats with a kernel here, narrow enough to be stored in."""
    types = getattr(ops, "quant_types", None) or ()
    return ["BF16", "F16", *(kind for kind in (*SCALES_AT, *OWN) if kind in types)]


def kernel_of(name: str) -> str:
    """The format under which the kernels know `name`: `ds_fp4` -> `MXFP4`."""
    return CALLED.get(name.upper(), name.upper())


def also_called(kind: str) -> str:
    """` (DS_FP4)`, or nothing."""
    names = ", ".join(name for name, own in CALLED.items() if own == kind)
    return f" ({names})" if names else ""


def _block(kind: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    if kind in OWN:
        return OWN[kind]
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def _stored_bytes(kind: str, elements: int) -> int:
    per_block, size = _block(kind)
    return elements // per_block * size


# --- keeping


class Unusable(Exception):
    """Why a stored profile does not count here. One line."""


def save_profile(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(asdict(profile), indent=2) + "\n")
    os.replace(fresh, path)


def read_profile(path: Path, here: Machine, now: float) -> Profile:
    """Raises Unusable for a profile that is missing, unreadable, of another machine, or old."""
    try:
        raw = json.loads(path.read_text())
        profile = Profile(
            Machine(**raw["machine"]),
            Figure(**raw["read"]),
            Figure(**raw["link"]) if raw["link"] else None,
            {k: FormatRates(Figure(**v["alone"]), Figure(**v["shared"])) for k, v in raw["formats"].items()},
            Figure(**raw["disk"]) if raw["disk"] else None,
            float(raw["measured_at"]),
            _read_device(raw["device"]) if raw.get("device") else None,
        )
    except FileNotFoundError:
        raise Unusable("nothing was measured yet") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise Unusable(f"{path} cannot be read ({type(problem).__name__}: {problem})") from None
    differs = here.differs(profile.machine)
    if differs:
        raise Unusable(f"it was measured on another machine or with other kernels ({'; '.join(differs)})")
    age = now - profile.measured_at
    if not -86400 < age < MAX_AGE_S:
        raise Unusable(f"it is {age / 86400:.0f} days old")
    return profile


def _read_device(raw: dict) -> DeviceRates:
    """Names of JSON objects are text, sizes of copies numbers."""
    formats = {k: KernelRates(*(Figure(**v[name]) for name in ("alone", "shared", "link"))) for k, v in raw["formats"].items()}
    link = {int(size): Figure(**figure) for size, figure in raw["link"].items()}
    return DeviceRates(raw["name"], link, Figure(**raw["read"]), formats)


def usable_profile(path: Path, here: Machine, now: float) -> Profile | None:
    """The stored profile, or None with the reason in the log."""
    try:
        return read_profile(path, here, now)
    except Unusable as problem:
        log.warning(log_line("bandwidth profile not used", why=str(problem), hint="run `moorage engine bench bw`"))
        return None


def with_link(profile: Profile, rate: float) -> Profile:
    """The same machine with an emulated link of `rate` bytes per second."""
    return replace(profile, link=Figure(rate, 0, True))
