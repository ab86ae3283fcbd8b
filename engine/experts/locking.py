"""Page-locking host memory that a link copies from: without it a device's copies have not the link's rate, and the system may
move the pages. As much as the limits allow; what is short costs speed, never an answer.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from engine.experts.pool import data_of
from engine.lean import torch
from engine.memory import gib
from engine.nn.experts import Bank
from engine.protocol import log_line

log = logging.getLogger(__name__)

Lock = Callable[[int, int], str]  # (address, bytes) -> why not, "" when it is done
HINT = "raise the limit of locked memory: ulimit -l, LimitMEMLOCK= of a service, --ulimit memlock=-1 of a container"


@dataclass(frozen=True)
class Locked:
    """`bytes` of host memory are page-locked `by` mlock or cudaHostRegister; `short`: what of it could not be, and `why`."""

    bytes: int = 0
    short: int = 0
    by: str = ""
    why: str = ""

    def status(self) -> dict[str, object]:
        return {"locked_bytes": self.bytes, "lock_short_bytes": self.short, "locked_by": self.by or None}


def lock_banks(banks: Iterable[Bank], budget: int, lock: tuple[str, Lock] | None = None) -> Locked:
    """Lock `banks`, `budget` bytes of them at most, in their order, until the system refuses. Says aloud what is short."""
    by, lock = lock or this_machines()
    weights = [data_of(weight) for bank in banks for weight in (bank.gate_up, bank.down)]
    done, why = 0, ""
    for data in weights:
        if done + data.nbytes > budget:
            break
        why = lock(data.data_ptr(), data.nbytes)
        if why:
            break
        done += data.nbytes
    short = min(budget, sum(data.nbytes for data in weights)) - done if why else 0
    if why:
        log.warning(log_line("page-locked memory is short", locked=gib(done), short=gib(short), by=by, why=why, hint=HINT))
    elif done:
        log.info(log_line("page-locked", size=gib(done), by=by))
    return Locked(done, short, by if done else "", why)


def this_machines(cuda: Any = None) -> tuple[str, Lock]:
    """Registered with the device where there is one (not yet run on one), else locked by the system alone."""
    cuda = cuda or torch.cuda
    if not cuda.is_available():
        raise_limit()
        return "mlock", mlock
    register = cuda.cudart().cudaHostRegister

    def registered(address: int, size: int) -> str:
        code = int(register(address, size, 0))
        return f"cudaHostRegister failed with error {code}" if code else ""

    return "cudaHostRegister", registered


def mlock(address: int, size: int) -> str:
    call = ctypes.CDLL(None, use_errno=True).mlock
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    if call(address, size) == 0:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = f"{gib(limit)} may be locked" if limit != resource.RLIM_INFINITY else "no limit is set"
    return f"{os.strerror(ctypes.get_errno())}: {allowed}"


def raise_limit() -> None:
    """To the hard limit, which needs no right."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
