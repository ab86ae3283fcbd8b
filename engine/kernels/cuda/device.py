"""Which device the kernels run on, and whether they can."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.kernels.cuda.lang import INTERPRETED

OLDEST = (8, 0)  # bf16 in the tensor unit


class DeviceError(Exception):
    """One line for the user: cause and remedy."""


@dataclass(frozen=True)
class Found:
    device: torch.device
    arch: str


def find_device() -> Found:
    """The current CUDA device, or the processor under Triton's interpreter. Raises DeviceError."""
    if INTERPRETED:
        return Found(torch.device("cpu"), "interpreted")
    if torch.version.cuda is None:
        raise DeviceError(
            "this torch was built without CUDA: install the CUDA build (ops/env.py run --gpu yes) or use --kernels cpu"
        )
    if not torch.cuda.is_available():
        raise DeviceError("torch finds no CUDA device: check nvidia-smi and the driver, or use --kernels cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST:
        name = torch.cuda.get_device_name(device)
        raise DeviceError(f"{name} is sm_{major}{minor}, the kernels need sm_80 or newer: use --kernels cpu")
    if missing := missing_for_launchers():
        raise DeviceError(f"Triton compiles a launcher for each kernel and finds no {missing} or use --kernels cpu")
    return Found(device, f"sm{major}{minor}")


def missing_for_launchers() -> str:
    """What is not there and how to install it; "" when a launcher can be compiled. Else the first request would find out."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "C compiler: install gcc and libc6-dev"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as triton does: where Debian has its headers
    if not (Path(sysconfig.get_path("include", scheme)) / "Python.h").exists():
        return "Python.h: install python3-dev"
    return ""
