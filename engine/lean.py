"""Importing torch without what a serving process never uses: a quarter less of the time, and 18 MB less held.

torch imports all of itself, also the kernels its compiler runs on tensors without data. Empty modules stand in for these while
torch is imported, and are gone afterwards: who imports one then gets the real one. Of a torch that was not tested so
all is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from types import ModuleType

VERSIONS = ("2.13.",)
LEFT_OUT = ("torch._meta_registrations", "torch.distributed._meta_registrations")


def import_torch() -> None:
    """Does nothing when torch is there already."""
    if "torch" in sys.modules or not importlib.metadata.version("torch").startswith(VERSIONS):
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
