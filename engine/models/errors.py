"""The one exception this room shows to users."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class ModelError(Exception):
    """A model that cannot be loaded. The message is one line: what is wrong and what to do about it."""


def unreadable(path: Path, error: object) -> ModelError:
    """What to tell about a file that a reader of its format gave up on."""
    cause = " ".join(str(error).split())
    if path.exists() and not os.access(path, os.R_OK):  # who opened it may have told it as a file that is not there
        return ModelError(f"{path} may not be read by this user (permission denied): give it the right to, e.g. chmod +r")
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return ModelError(f"{path} cannot be mapped ({cause}); raise this process's limit of address space (ulimit -v)")
    return ModelError(f"{path} is truncated or corrupt ({cause}); download it again")
