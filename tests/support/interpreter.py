"""Triton's interpreter, made quick enough for tests: a tenth of its time is the kernels."""

from __future__ import annotations

import inspect

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """A call of one kernel function by another patches `triton.language` each time, 2 ms; once a module is enough.

    What the outermost call patched it restores, so modules that use `tl` are left to it; inner patches stay for good.
    """
    patched: set[int] = set()

    def call(self, *args, **kwargs):
        space = self.fn.__globals__
        if id(space) not in patched and not any(value is tl for value in space.values() if inspect.ismodule(value)):
            interpreter._patch_lang(self.fn)
            patched.add(id(space))
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
