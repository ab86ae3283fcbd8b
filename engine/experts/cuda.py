"""`streams.Device` on torch.cuda. Not yet run on a GPU: its calls are tested against a made-up runtime (tests/engine/experts).

What each call relies on, from torch's documentation and source:
- `copy_(non_blocking=True)` between a device tensor and a host tensor of one type, both without gaps, is one cudaMemcpyAsync on
  the current stream. From page-locked memory it returns at once; from other memory it is right too, but waits.
- Host memory of torch's own page-locked allocator that such a copy used is not handed out again before the copy is done.
- Device memory that was freed may be handed out again to the stream that it was allocated on before that stream's kernels are
  done with it: another stream must be ordered behind them (`mark`).
- `Event.synchronize` lets other threads of Python run; a `blocking` event sleeps instead of spinning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.experts.streams import Mark, Pair
from engine.lean import torch


def device_of(ops: object, cuda: Any = None) -> Cuda | None:
    """The device that these kernels compute on; None for the processor's."""
    where = getattr(ops, "device", None)
    return Cuda(where.index or 0, cuda) if where is not None and where.type == "cuda" else None


class Cuda:
    """One device: the current stream of the caller for kernels, a stream of its own for copies."""

    apart = True

    def __init__(self, index: int = 0, cuda: Any = None, new: Any = torch) -> None:
        cuda = cuda or torch.cuda
        self._cuda, self._new = cuda, new
        self.where = torch.device("cuda", index)
        self._copies = cuda.Stream(self.where)

    @property
    def name(self) -> str:
        return self._cuda.get_device_name(self.where)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return self._new.empty(tuple(shape), dtype=dtype, device=self.where)
        except torch.OutOfMemoryError as problem:
            raise MemoryError(f"the device has no room for {tuple(shape)} {dtype}") from problem

    def pinned(self, size: int) -> torch.Tensor:
        try:
            return self._new.empty(size, dtype=torch.uint8, pin_memory=True)  # cudaHostAlloc: begins on a page
        except RuntimeError as problem:  # torch has no class of its own for it
            raise MemoryError(f"{size} bytes cannot be page-locked ({problem})") from problem

    def copy(self, pairs: Sequence[Pair], after: Iterable[Mark] = ()) -> Mark:
        landed = self._cuda.Event(blocking=True)  # who waits for megabytes leaves its core to the kernels meanwhile
        with self._cuda.stream(self._copies):
            for mark in after:
                self._copies.wait_event(mark)
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            landed.record(self._copies)
        return landed

    def mark(self) -> Mark:
        reached = self._cuda.Event()
        reached.record(self._cuda.current_stream(self.where))
        return reached

    def to_device(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.pin_memory().to(self.where, non_blocking=True) for tensor in tensors]

    def to_host(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        out = [self._new.empty(tuple(t.shape), dtype=t.dtype, pin_memory=True) for t in tensors]
        for to, source in zip(out, tensors, strict=True):
            to.copy_(source, non_blocking=True)
        self.mark().synchronize()  # spins: nothing can be decided before the router's choice is known
        return out

    def finish(self) -> None:
        self._cuda.synchronize(self.where)
        self._cuda.empty_cache()

    def memory(self) -> tuple[int, int]:
        return self._cuda.mem_get_info(self.where)
