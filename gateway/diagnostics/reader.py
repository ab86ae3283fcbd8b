"""Reading record files: rotated and compressed ones too, oldest first; a torn or foreign line is counted, never fatal."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import zstandard

_NUMBER = re.compile(r"\.(\d{6,})(\.zst)?$")


class Reader:
    """`records()` yields what the files at `path` hold. `skipped` counts lines that are no records, once it has ended."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.skipped = 0

    def files(self) -> list[Path]:
        """The rotated files of `path` by number, then `path` itself. Raises FileNotFoundError when there is none."""
        numbered: dict[int, Path] = {}  # for a moment both forms of a file are there; they hold the same records
        for path in sorted(self._path.parent.glob(self._path.name + ".*")):
            if match := _NUMBER.search(path.name):
                numbered.setdefault(int(match[1]), path)
        found = [numbered[n] for n in sorted(numbered)] + ([self._path] if self._path.is_file() else [])
        if not found:
            raise FileNotFoundError(f"no records at {self._path}")
        return found

    def records(self, containing: bytes = b"") -> Iterator[dict[str, Any]]:
        """Records in the order they were written; with `containing` only lines that hold these bytes are parsed."""
        self.skipped = 0
        for path in self.files():
            with _open(path) as lines:
                for line in lines:
                    if containing and containing not in line:
                        continue
                    if (record := _parse(line)) is not None:
                        yield record
                    elif line.strip():
                        self.skipped += 1


def _open(path: Path) -> io.BufferedIOBase:
    try:
        file = path.open("rb")
    except FileNotFoundError:  # it was compressed since we looked
        path = path.with_name(path.name + ".zst")
        file = path.open("rb")
    if path.suffix != ".zst":
        return file
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=True))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("id"), str) else None


def body(record: dict[str, Any]) -> dict[str, Any] | None:
    """The chat body that went to the upstream, or the one received when nothing was sent; None when it was not kept."""
    for side in (record.get("sent"), record.get("received")):
        if not isinstance(side, dict) or not isinstance(side.get("body"), str):
            continue
        text = side["body"]
        try:
            value = orjson.loads(base64.b64decode(text) if side.get("encoding") == "base64" else text)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


def session(record: dict[str, Any]) -> str:
    found = record.get("session")
    return str(found.get("id") or "") if isinstance(found, dict) else ""
