"""torch, imported when something first asks for it: what computes with the native kernels on a plain checkpoint never does.

Importing it takes longer than all else of a start, and what it holds is more than all else beside the weights. Modules that may
need it say `from engine.lean import torch`. When it is imported, what a serving process never uses is left out: a quarter less of
the time, and 18 MB less held. torch imports all of itself, also the kernels its compiler runs on tensors without data. Empty
modules stand in for these while torch is imported, and are gone afterwards: who imports one then gets the real one. Of a torch
that was not tested so all is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

VERSIONS = ("2.13.",)
LEFT_OUT = ("torch._meta_registrations", "torch.distributed._meta_registrations")


def import_torch() -> None:
    """Does nothing when torch is there already."""
    if "torch" in sys.modules:
        return
    from importlib.metadata import version  # takes 10 ms itself, of a start that never asks

    if not version("torch").startswith(VERSIONS):
        return
    empty = {name: ModuleType(name) for name in LEFT_OUT}
    sys.modules |= empty
    try:
        importlib.import_module("torch")
    finally:
        for name, module in empty.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            parent, _, own = name.rpartition(".")
            if vars(sys.modules.get(parent, sys)).get(own) is module:
                delattr(sys.modules[parent], own)


class _Later:
    """Stands for the module until a name of it is asked for; each name is looked up once. `threads`: for its own work, once it is
    there; 0 = as it likes.
    """

    threads = 0

    def __getattr__(self, name: str) -> Any:
        import_torch()
        module = importlib.import_module("torch")
        if self.threads:
            module.set_num_threads(self.threads)
            self.threads = 0
        found = getattr(module, name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import torch
else:
    torch = _Later()


class _Package(ModuleType):
    """Runs its own code when something is asked for that is none of its modules which are there already."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            with _running:
                if type(self) is _Package and self not in _begun:
                    _begun.append(self)
                    self.__spec__.loader.exec_module(self)
                    self.__class__ = ModuleType
                if name in vars(self):
                    return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


_running = threading.RLock()
_begun: list[ModuleType] = []


def modules_alone(package: str) -> None:
    """Have modules of `package` imported without all that its own code imports. Who asks for more gets the whole.

    `gguf` brings a YAML parser and three writers, half as much as numpy, and a reader needs two of its modules. Does nothing
    when it is there already.
    """
    found = importlib.util.find_spec(package) if package not in sys.modules else None
    if found is not None and found.loader is not None:
        sys.modules[package] = importlib.util.module_from_spec(found)
        sys.modules[package].__class__ = _Package


def here() -> bool:
    """Whether somebody has asked for torch: nothing of it can be at work otherwise."""
    return "torch" in sys.modules


def use_threads(count: int) -> None:
    """How many threads torch may use, now or when it comes."""
    if here():
        torch.set_num_threads(count)
    else:
        torch.threads = count


def threads_of_torch() -> int:
    """What `use_threads` said last, or torch's own choice."""
    return torch.get_num_threads() if here() else torch.threads or 1


def inference() -> AbstractContextManager[object]:
    """`torch.inference_mode()`, if there is a torch to tell."""
    return torch.inference_mode() if here() else contextlib.nullcontext()


def device_full() -> tuple[type[BaseException], ...]:
    """What to catch where a device may have no memory left."""
    return (torch.OutOfMemoryError,) if here() else ()
