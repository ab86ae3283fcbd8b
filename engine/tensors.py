"""Tensors of host memory without torch: what the native kernels read and what loading, batches and caches do with them.

Names and meanings are torch's, as far as they go, so that code can be handed either library: `Library` is what both offer.
Elements of bfloat16 are kept as their bits; nothing is computed on them but `float()`. numpy holds the memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.lean import torch

Library = Any  # this module, or torch
SHARED_COPY = 1 << 20  # bytes from which on several threads copy: less is done before they are awake
ALIGNED = 64  # bytes: of a cache line, and of the widest register


class DType:
    """Goes by torch's name, which identities of stored caches are made from."""

    __slots__ = ("itemsize", "name", "stored")

    def __init__(self, name: str, stored: type[np.generic]) -> None:
        self.name, self.stored, self.itemsize = name, np.dtype(stored), np.dtype(stored).itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


float32, float16 = DType("float32", np.float32), DType("float16", np.float16)
bfloat16 = DType("bfloat16", np.uint16)
uint8, int32 = DType("uint8", np.uint8), DType("int32", np.int32)
_OF = {d.stored: d for d in (float32, float16, uint8, int32)}


class Device:
    """Host memory."""

    type, index = "cpu", None

    def __repr__(self) -> str:
        return "cpu"


CPU = Device()


class Storage:
    """The memory that a tensor and its views share."""

    __slots__ = ("_array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def data_ptr(self) -> int:
        return _address(self._array)

    def nbytes(self) -> int:
        return self._array.nbytes


class Tensor:
    """`array` holds its elements, as `dtype.stored`; `storage` the array it was cut from."""

    __slots__ = ("array", "dtype", "shape", "storage")
    is_cpu, device = True, CPU

    def __init__(self, array: NDArray[Any], dtype: DType, storage: NDArray[Any] | None = None) -> None:
        self.array, self.dtype, self.shape = array, dtype, array.shape
        self.storage = array if storage is None else storage

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)})"

    def __len__(self) -> int:
        return self.shape[0]

    # --- what it is

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def data_ptr(self) -> int:
        return _address(self.array)

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.dtype.itemsize for s in self.array.strides)

    def untyped_storage(self) -> Storage:
        return Storage(self.storage)

    # --- views

    def _view(self, array: NDArray[Any]) -> Tensor:
        return Tensor(array, self.dtype, self.storage)

    def __getitem__(self, at: Any) -> Tensor:
        return self._view(self.array[at])

    def view(self, *shape: Any) -> Tensor:
        """Other sizes, or the same bytes as another dtype. Raises ValueError where only a copy could be."""
        if isinstance(shape[0], DType):
            return Tensor(self.array.view(shape[0].stored), shape[0], self.storage)
        return self._view(self.array.reshape(_sizes(shape), copy=False))

    def reshape(self, *shape: Any) -> Tensor:
        return self._of(self.array.reshape(_sizes(shape)))

    def flatten(self) -> Tensor:
        return self.reshape(-1)

    def transpose(self, one: int, other: int) -> Tensor:
        return self._view(self.array.swapaxes(one, other))

    def as_strided(self, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        steps = [s * self.dtype.itemsize for s in stride]
        return self._view(np.lib.stride_tricks.as_strided(self.array, tuple(shape), steps))

    def split_with_sizes(self, sizes: Iterable[int], dim: int = 0) -> list[Tensor]:
        lead, begin, parts = (slice(None),) * (dim % self.dim()), 0, []
        for size in sizes:
            parts.append(self._view(self.array[(*lead, slice(begin, begin + size))]))
            begin += size
        return parts

    def split(self, sizes: int | Iterable[int], dim: int = 0) -> list[Tensor]:
        whole = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, whole - at) for at in range(0, whole, sizes)]
        return self.split_with_sizes(sizes, dim)

    def expand_as(self, other: Tensor) -> Tensor:
        return self._view(np.broadcast_to(self.array, other.shape))

    def contiguous(self) -> Tensor:
        return self if self.is_contiguous() else self.clone()

    def cpu(self) -> Tensor:
        return self

    def to(self, device: Device) -> Tensor:
        return self

    def numpy(self) -> NDArray[Any]:
        return self.array

    # --- copies

    def _of(self, array: NDArray[Any]) -> Tensor:
        """`array`, a view of this memory or fresh."""
        return Tensor(array, self.dtype, self.storage if np.may_share_memory(array, self.array) else array)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        return Tensor(self.array.take(rows.array, axis=dim), self.dtype)

    def clone(self) -> Tensor:
        out = self.new_empty(self.shape)
        np.copyto(out.array, self.array)
        return out

    def copy_(self, source: Tensor) -> Tensor:
        if source.dtype is not self.dtype:
            raise TypeError(f"{source.dtype} is not copied to {self.dtype}")
        _copy(self.array, source.array)
        return self

    def __setitem__(self, at: Any, source: Tensor) -> None:
        self[at].copy_(source)

    def zero_(self) -> Tensor:
        self.array.fill(0)
        return self

    def new_empty(self, *shape: Any, dtype: DType | None = None) -> Tensor:
        return empty(*shape, dtype=dtype or self.dtype)

    def float(self) -> Tensor:
        if self.dtype is float32:
            return self
        if self.dtype is bfloat16:
            return Tensor((self.array.astype(np.uint32) << 16).view(np.float32), float32)
        return Tensor(self.array.astype(np.float32), float32)

    # --- arithmetic, of float32

    def _numbers(self) -> NDArray[np.float32]:
        if self.dtype is not float32:
            raise TypeError(f"nothing is computed on {self.dtype}")
        return self.array

    def __add__(self, other: Tensor | float) -> Tensor:
        added = other._numbers() if isinstance(other, Tensor) else np.float32(other)
        return Tensor(self._numbers() + added, float32)

    __radd__ = __add__

    def __mul__(self, factor: float) -> Tensor:
        return Tensor(self._numbers() * np.float32(factor), float32)

    def max(self) -> Any:
        return self.array.max()


class Copiers:
    """Threads that share large copies: one alone touches fresh memory at a fraction of its rate."""

    count = 1
    _pool: ThreadPoolExecutor | None = None

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        with ThreadPoolExecutor(max(1, count), "copy") as self._pool:
            self.count = count
            try:
                yield
            finally:
                self.count, self._pool = 1, None

    def copy(self, to: NDArray[Any], source: NDArray[Any]) -> None:
        share = -(-len(to) // self.count)
        parts = [slice(at, at + share) for at in range(0, len(to), share)]
        list(self._pool.map(lambda part: np.copyto(to[part], source[part]), parts))


copiers = Copiers()


def _copy(to: NDArray[Any], source: NDArray[Any]) -> None:
    if copiers.count > 1 and to.nbytes >= SHARED_COPY and to.ndim:
        copiers.copy(to, source)
    else:
        np.copyto(to, source)


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape


def empty(*shape: Any, dtype: DType = float32) -> Tensor:
    sizes = _sizes(shape)
    size = math.prod(sizes) * dtype.itemsize
    raw = np.empty(size + ALIGNED, np.uint8)
    begin = -_address(raw) % ALIGNED
    return Tensor(raw[begin : begin + size].view(dtype.stored).reshape(sizes), dtype)


def frombuffer(memory: Any, *, dtype: DType, count: int = -1, offset: int = 0) -> Tensor:
    return Tensor(np.frombuffer(memory, dtype.stored, count, offset), dtype)


def from_numpy(array: NDArray[Any]) -> Tensor:
    return Tensor(array, _OF[array.dtype])


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return Tensor(np.concatenate([part.array for part in parts], axis=dim), parts[0].dtype)


def library_of(tensor: Any) -> Library:
    """The library that `tensor` is of."""
    return sys.modules[__name__] if isinstance(tensor, Tensor) else torch


def dtype_in(library: Library, dtype: Any) -> Any:
    """`dtype`, of either library, as `library`'s."""
    return getattr(library, str(dtype).removeprefix("torch."))


def to_torch(tensor: Any) -> torch.Tensor:
    """The same memory as a tensor of torch."""
    if not isinstance(tensor, Tensor):
        return tensor
    whole = torch.from_numpy(tensor.array)
    return whole.view(dtype_in(torch, tensor.dtype)) if tensor.dtype is bfloat16 else whole
