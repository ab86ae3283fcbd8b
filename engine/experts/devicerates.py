"""`bench bw` on a device: its link by size of copies, alone and beside kernels, its memory, and its expert kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from engine.experts.calibrate import (
    HIDDEN,
    INTER,
    POOL_BYTES,
    TOP_K,
    DeviceRates,
    Figure,
    KernelRates,
    random_weight,
    settle,
    timed,
)
from engine.experts.filepool import PIECE
from engine.experts.pool import data_of
from engine.experts.streams import Device, Mark
from engine.kernels.ops import Ops, Quant
from engine.lean import torch

SIZES = (64 << 10, 512 << 10, PIECE, 16 << 20)  # of one copy: below a piece of a pack, a piece, a large expert
SOURCE_BYTES = 256 << 20  # page-locked, larger than the processor's caches
TOKENS = 16  # computed between two waits: a kernel is shorter than a wait


class Copies:
    """Copies of `size` bytes to the device, one queued behind the one under way."""

    def __init__(self, device: Device, size: int, source_bytes: int = SOURCE_BYTES) -> None:
        self._device, self._size = device, size
        self._from = device.pinned(max(size, source_bytes // size * size)).view(-1, size)
        self._to = device.empty((4, size), torch.uint8)
        self._ready = device.mark()  # its memory may have been another's
        self._before: Mark | None = None
        self._at = 0

    def __call__(self) -> int:
        pair = self._to[self._at % 4], self._from[self._at % len(self._from)]
        mark = self._device.copy([pair], [self._ready])
        before, self._before = self._before, mark
        self._at += 1
        if before is not None:
            before.synchronize()
        return self._size

    def finish(self) -> None:
        if self._before is not None:
            self._before.synchronize()
            self._before = None


class DeviceLoop:
    """Random experts in the device's memory; each call computes TOKENS tokens, each through TOP_K other experts, and waits."""

    def __init__(self, device: Device, ops: Ops, kind: str, pool_bytes: int = POOL_BYTES) -> None:
        self._device, self._ops = device, ops
        one = [random_weight(kind, 1, *shape) for shape in ((2 * INTER, HIDDEN), (HIDDEN, INTER))]
        self.expert_bytes = sum(data_of(weight).nbytes for weight in one)
        self._experts = max(2 * TOP_K, pool_bytes // self.expert_bytes)
        self._gate_up, self._down = (self._filled(weight) for weight in one)
        self._x, self._weights = device.to_device(torch.randn(1, HIDDEN), torch.full((1, TOP_K), 1 / TOP_K))
        every = torch.arange(self._experts // TOP_K * TOP_K, dtype=torch.int32).view(-1, 1, TOP_K)
        (self._ids,) = device.to_device(every)
        self._at = 0

    def _filled(self, like):
        """Experts like this one, all of the same bytes, which no kernel notices."""
        data = data_of(like)
        out = self._device.empty((self._experts, *data.shape[1:]), data.dtype)
        out.copy_(self._device.to_device(data)[0].expand(out.shape))
        return Quant(out, like.type, like.cols) if isinstance(like, Quant) else out

    def __call__(self) -> int:
        self.begin()
        self._device.mark().synchronize()
        return TOKENS * TOP_K * self.expert_bytes

    def begin(self) -> None:
        """Give the device its work, without waiting for it."""
        for _ in range(TOKENS):
            ids = self._ids[self._at % len(self._ids)]
            self._at += 1
            self._ops.moe(self._x, ids, self._weights, self._gate_up, self._down, "silu")


class Meanwhile:
    """While entered, a thread does `work` again and again."""

    def __init__(self, work: Callable[[], int]) -> None:
        self._work, self._stop = work, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._work()


def measure_link(device: Device, size: int) -> Figure:
    copies = Copies(device, size)

    def once() -> float:
        rate = timed(copies)
        copies.finish()
        return rate

    return settle(once)


def measure_read(device: Device, size: int = SOURCE_BYTES) -> Figure:
    """Both halves of a buffer of the device, copied within it."""
    buffer = device.empty((2, size), torch.uint8)

    def work() -> int:
        buffer[0].copy_(buffer[1])
        device.mark().synchronize()
        return 2 * size

    return settle(lambda: timed(work))


def measure_kernels(device: Device, ops: Ops, kind: str, pool_bytes: int = POOL_BYTES) -> KernelRates:
    loop, copies = DeviceLoop(device, ops, kind, pool_bytes), Copies(device, PIECE)
    alone = settle(lambda: timed(loop))
    with Meanwhile(copies):
        shared = settle(lambda: timed(loop))
    copies.finish()
    with Meanwhile(loop):
        beside = settle(lambda: timed(copies))
    copies.finish()
    return KernelRates(alone, shared, beside)


def measure_device(
    device: Device, ops: Ops, name: str, kinds: Sequence[str], say: Callable[[str, Figure], None], pool_bytes: int = POOL_BYTES
) -> DeviceRates:
    """All of it; `say` gets each figure as it is known."""
    read = measure_read(device)
    say(f"{name} memory", read)
    link, formats = {}, {}
    for size in SIZES:
        link[size] = measure_link(device, size)
        say(f"copies of {size >> 10} KiB to it", link[size])
    for kind in kinds:
        formats[kind] = found = measure_kernels(device, ops, kind, pool_bytes)
        say(f"{kind} experts on it", found.alone)
        say(f"{kind} beside copies", found.shared)
        say(f"copies beside {kind}", found.link)
    return DeviceRates(name, link, read, formats)
