"""One memory of processor and device: the device computes on experts where they were loaded.

Host memory that is registered with the device has an address there too; a tensor of torch over that address aliases the host's.
Not yet run on a GPU: tested against a made-up driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from engine.experts.locking import HINT, Lock, lock_banks
from engine.experts.pool import bank_bytes, data_of
from engine.kernels.ops import Ops, Quant, Weight
from engine.lean import torch
from engine.memory import gib
from engine.nn.experts import Bank, InPlace

Address = Callable[[int], int]  # of registered host memory -> on the device; raises OSError


def in_place(banks: Sequence[Bank], ops: Ops, lock: tuple[str, Lock] | None = None, address: Address | None = None) -> InPlace:
    """`ops` of a device on the pool itself, all of which is registered. Raises OSError with how much could not be."""
    size = sum(bank_bytes(bank) for bank in banks)
    locked = lock_banks(banks, size, lock)
    if locked.short:
        raise OSError(
            f"{gib(locked.short)} of {gib(size)} of experts cannot be registered with the device ({locked.why}): {HINT}"
        )
    return InPlace(mapped(banks, address or drivers_address()), ops)


class OnDevice:
    """Bytes at an address of the device as torch asks for them (CUDA array interface, version 3); holds whose they are."""

    def __init__(self, address: int, size: int, owner: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",  # the interface has no name for bfloat16: bytes, viewed as what they are
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        self.owner = owner


def mapped(banks: Iterable[Bank], address: Address, new: Any = None) -> list[Bank]:
    """`banks`, which are registered with the device (`locking`), as tensors of the device on the same bytes. Raises OSError."""

    new = new or torch

    def weight(own: Weight) -> Weight:
        data = data_of(own)
        alias = new.as_tensor(OnDevice(address(data.data_ptr()), data.nbytes, data), device="cuda")
        alias = alias.view(data.dtype).view(data.shape)
        return Quant(alias, own.type, own.cols) if isinstance(own, Quant) else alias

    return [replace(bank, gate_up=weight(bank.gate_up), down=weight(bank.down)) for bank in banks]


def drivers_address(driver: Any = None) -> Address:
    """As the driver tells it, for the device that is current in this thread."""
    driver = driver or ctypes.CDLL("libcuda.so.1")
    call = driver.cuMemHostGetDevicePointer_v2
    call.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint)
    call.restype = ctypes.c_int

    def address(host: int) -> int:
        found = ctypes.c_uint64()
        code = call(ctypes.byref(found), host, 0)
        if code:
            raise OSError(f"the device cannot see host memory (cuMemHostGetDevicePointer: error {code}): is it registered?")
        return found.value

    return address
