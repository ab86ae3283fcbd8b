"""Triton's interpreter, made quick enough for tests and right about bf16."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Once a process."""
    _patch_once()
    _round()


def _patch_once() -> None:
    """A launch, and each call of one function by another, patches `triton.language` anew, 2 ms: here once a module, for good."""
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function) -> SimpleNamespace:
        if id(function.__globals__) not in patched:
            patch(function)
            patched.add(id(function.__globals__))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


def _round() -> None:
    """float32 becomes the nearest bf16, as on a device; the interpreter cuts bits off."""
    convert = interpreter._convert_float

    def convert_right(data, source, target, mode):
        if source == tl.bfloat16 and target == tl.float32:
            return data.view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16:
            bits = np.ascontiguousarray(data).view(np.uint32)
            nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            return np.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest).astype(np.uint16)
        return convert(data, source, target, mode)

    interpreter._convert_float = convert_right
