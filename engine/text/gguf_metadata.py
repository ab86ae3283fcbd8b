"""Reads the key/value part of a GGUF file.

The `gguf` package builds several numpy arrays for each string; a vocabulary of 150K tokens and merges takes it ten seconds. This
reader takes a fraction of one and touches no tensor.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

# GGUF value types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # arrays of arrays; real files have one level


class GgufError(ValueError):
    """The file is no GGUF or is damaged. One line."""


def read_metadata(path: Path, prefix: str = "", without: Collection[str] = ()) -> dict[str, Any]:
    """Keys that start with `prefix` and their values, as Python values; arrays of strings of keys in `without` are stepped over
    and empty. Raises GgufError, OSError.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) < 24:
            raise GgufError("the file is shorter than a GGUF header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).all(prefix, without)


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._size = data, 4, len(data)
        if data[:4] != b"GGUF":
            raise GgufError("the file does not begin with GGUF")
        self._order, self._step_over = "<", False
        version = self._scalar("I")
        if version & 0xFFFF == 0:  # written on a big-endian machine
            self._order = ">"
            version = struct.unpack(">I", struct.pack("<I", version))[0]
        if version not in (2, 3):
            raise GgufError(f"GGUF version {version} is not supported; 2 and 3 are")

    def all(self, prefix: str, without: Collection[str]) -> dict[str, Any]:
        self._scalar("Q")  # tensors
        out: dict[str, Any] = {}
        for _ in range(self._scalar("Q")):
            key = self._string()
            kind = self._scalar("I")
            self._step_over = key in without
            value = self._value(kind, 0)
            if key.startswith(prefix):
                out[key] = value
        return out

    def _take(self, size: int) -> int:
        """Move on by `size` bytes; returns where they begin."""
        start = self._at
        if size > self._size - start:
            raise GgufError("the file ends inside its metadata: it is truncated")
        self._at = start + size
        return start

    def _scalar(self, code: str) -> Any:
        code = self._order + code
        return struct.unpack_from(code, self._data, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        size = self._scalar("Q")
        start = self._take(size)
        return self._data[start : start + size].decode("utf-8", "replace")

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise GgufError(f"metadata value of unknown type {kind}")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in _SCALARS:
            code = f"{self._order}{count}{_SCALARS[inner]}" if count <= self._size else ""
            if not code:
                raise GgufError("the file ends inside its metadata: it is truncated")
            return list(struct.unpack_from(code, self._data, self._take(struct.calcsize(code))))
        if inner == _STRING:
            return self._pass(count) if self._step_over else self._strings(count)
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """The hot loop: 300K strings of a large vocabulary."""
        data, at, size, length = self._data, self._at, self._size, struct.Struct(self._order + "Q")
        out: list[str] = []
        for _ in range(count):
            if at + 8 > size:
                raise GgufError("the file ends inside its metadata: it is truncated")
            end = at + 8 + length.unpack_from(data, at)[0]
            if end > size:
                raise GgufError("the file ends inside its metadata: it is truncated")
            out.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self._at = at
        return out

    def _pass(self, count: int) -> list[str]:
        at, length_at = self._at, struct.Struct(self._order + "Q").unpack_from
        try:
            for _ in range(count):
                at += 8 + length_at(self._data, at)[0]
        except (struct.error, OverflowError):
            at = self._size + 1
        if at > self._size:
            raise GgufError("the file ends inside its metadata: it is truncated")
        self._at = at
        return []
