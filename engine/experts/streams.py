"""What experts need of the memory their slots lie in: room, copies that go on by themselves, and marks to wait for.

A device works through two streams, each in its own order: kernels (and all that torch does with the device's tensors), and copies
of experts. Only marks order one stream, or the processor, behind the other. `Cuda` (`cuda.py`) is a device; `Here` is host
memory itself, where everything has happened when a call returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from engine.lean import torch

Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # (to, from), of one shape and type, each without gaps


class Mark(Protocol):
    """A place in the order of a stream."""

    def synchronize(self) -> None:
        """Until everything before it is done. Raises what went wrong there (RuntimeError)."""


class Device(Protocol):
    apart: bool  # its memory is not the processor's, and its kernels run beside the processor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device. Raises MemoryError."""

    def pinned(self, size: int) -> torch.Tensor:
        """`size` bytes of page-locked host memory that begin on a page. Raises MemoryError."""

    def copy(self, pairs: Sequence[Pair], after: Iterable[Mark] = ()) -> Mark:
        """Copy between host and device in the stream of copies, behind `after`; any thread may call it.

        Host memory must stay as it is until the mark that is returned; it should be page-locked.
        """

    def mark(self) -> Mark:
        """Behind every kernel this thread has begun."""

    def to_device(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Small ones, for kernels begun later; the host's may change at once."""

    def to_host(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """As they are behind every kernel this thread has begun, for which it waits."""

    def finish(self) -> None:
        """Wait for everything, and give memory that nothing holds back to the device."""

    def memory(self) -> tuple[int, int] | None:
        """Its free and all bytes; None where it has no memory of its own."""


class Past:
    """The mark of what has happened."""

    def synchronize(self) -> None:
        pass


PAST = Past()


class Here:
    """Host memory as the memory of slots: nothing has to be moved or waited for."""

    apart = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, pairs: Sequence[Pair], after: Iterable[Mark] = ()) -> Mark:
        for to, source in pairs:
            to.copy_(source)
        return PAST

    def mark(self) -> Mark:
        return PAST

    def to_device(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(tensors)

    def to_host(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(tensors)

    def finish(self) -> None:
        pass

    def memory(self) -> None:
        return None


HERE = Here()
