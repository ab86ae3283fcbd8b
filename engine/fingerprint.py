"""What a checkpoint is, in 16 bytes: the identity under which computed tokens are kept on disk.

Small files (config, tokenizer, template) count whole. Weight files count by name, size, modification time and samples spread
over them: reading thirty gigabytes at every start would cost more than the cache saves, and a file that was changed in between
has a new time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

SMALL = 32 << 20  # bytes: the largest tokenizer.json files are below this
SAMPLE, EVERY = 64 << 10, 16 << 20  # bytes read, every so many bytes
IGNORED = frozenset((".md", ".png", ".jpg", ".lock"))


def checkpoint_parts(model: str | Path) -> dict[str, str]:
    """File name -> digest, for every file of a checkpoint that its answers may depend on. Raises OSError."""
    return {path.name: _digest(path) for path in _files(Path(model))}


def _files(model: Path) -> Iterator[Path]:
    if model.is_file():
        yield model
        return
    for path in sorted(model.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.suffix not in IGNORED:
            yield path


def _digest(path: Path) -> str:
    status = path.stat()
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if status.st_size <= SMALL and path.suffix not in (".safetensors", ".gguf", ".bin"):
            digest.update(file.read())
        else:
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
            for at in (*range(0, status.st_size, EVERY), max(0, status.st_size - SAMPLE)):
                file.seek(at, os.SEEK_SET)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()
