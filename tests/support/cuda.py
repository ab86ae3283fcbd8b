"""The GPU set for tests: the same bodies in Triton's interpreter on the processor, and on a device.

Which of the two a process can do is decided when triton is imported: `ops/gpu_test` runs those marked `gpu` in one that has a
device. Tests make their tensors in host memory; `Carrier` brings them to where the kernels compute, and what was written back.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.support.interpreter import mend

MODES = ("interpreted", pytest.param("gpu", marks=pytest.mark.gpu))


def interpreting() -> bool:
    """Whether this process interprets kernels; of the other kind it can run none."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def cuda_kernels(mode: str):
    """`CudaOps` as `mode` says, or the test is skipped with the reason in one line."""
    pytest.importorskip("triton", reason="triton is not installed: ops/test installs it")
    if (mode == "interpreted") != interpreting():
        pytest.skip(
            "kernels are interpreted here: ./ops/gpu_test" if mode == "gpu" else "kernels run on a device here: ./ops/test"
        )
    from engine.kernels.cuda.device import DeviceError
    from engine.kernels.cuda.ops import CudaOps

    if interpreting():
        mend()
    try:
        return CudaOps()
    except DeviceError as problem:
        pytest.skip(str(problem))


class Carrier:
    """`carrier(function)` takes and gives tensors of host memory, whatever device `function` computes on.

    Whole storages travel, so that gaps, offsets and what two tensors share stay as they are; in the interpreter too, where they
    are copied to host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, function: Callable) -> Callable:
        def carried(*args: Any, **kwargs: Any) -> Any:
            moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            out = function(*_each(args, lambda t: self._there(t, moved)), **_each(kwargs, lambda t: self._there(t, moved)))
            for here, there in moved.values():
                here.copy_(there)
            return _each(out, lambda t: t.to("cpu", copy=True))

        return carried

    def _there(self, tensor: torch.Tensor, moved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        _, there = moved.setdefault(whole.data_ptr(), (whole, whole.to(self._device, copy=True)))
        new = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return new.set_(there.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class Carried:
    """`ops` for tensors of host memory."""

    def __init__(self, ops: Any) -> None:
        self._ops, self._carrier = ops, Carrier(ops.device)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return self._carrier(found) if callable(found) else found


def _each(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` with every tensor changed, in whatever holds it."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init}
        if any(isinstance(part, torch.Tensor) for part in parts.values()):
            return type(tree)(**_each(parts, change))
        return tree  # a specification
    if isinstance(tree, Mapping):
        return {name: _each(part, change) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_each(part, change) for part in tree)
    return tree
