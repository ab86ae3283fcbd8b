"""What the command line's verbs share: the error of a user, sizes and paths as users write them."""

from __future__ import annotations

import re
from pathlib import Path


class UserError(Exception):
    """One line for the user: cause and remedy."""


_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


FAST = "With --kernels cuda: device memory for experts, 0 = decide. Else emulates one of this size, e.g. 4G, behind --fast-link."
LINK = "Bytes a second of the emulated link, e.g. 8G."
PIN = "Host memory to page-lock for copies into the emulated memory, e.g. 16G; 0 = all of the experts that are copied."
PLACEMENT = "Placement of the experts: in_place, offload, hybrid, host, stream or resident; impossible ones are refused."


def parse_size(text: str) -> int:
    """`512M`, `4GiB`, `1.5g`, `0` -> bytes. Raises UserError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?\s*", text.lower())
    if not found:
        raise UserError(f"{text!r} is no amount of memory; write it like 512M or 4G")
    return int(float(found[1]) * _UNITS[found[2]])


def check_model_path(path: str) -> None:
    """Raises UserError before anything is started when `path` cannot be a model."""
    model = Path(path)
    if not model.exists():
        raise UserError(f"{path}: no such file or directory; give a Hugging Face model directory or a GGUF file")
    if model.is_dir() and not (model / "config.json").exists() and not list(model.glob("*.gguf")):
        raise UserError(f"{path}: holds neither config.json nor a .gguf file; give the directory that does")
    if model.is_file() and model.suffix != ".gguf":
        raise UserError(f"{path}: a single file must be a .gguf; for safetensors give the directory")


def check_writable(path: Path) -> None:
    """Raises UserError, before a long work, for a file that its result could not be written to. Leaves none behind."""
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror}): name a file in a directory where this user may") from None
