"""A checkpoint's config with checked access: a missing or mistyped key is a `ModelError` that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.models.errors import ModelError

REQUIRED: Any = object()


class Config:
    """Read-only view of `config.json` (or of GGUF metadata under the same names). JSON null counts as absent."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self._data = data
        self.source = source

    @property
    def model_type(self) -> str:
        return self.text("model_type")

    def int(self, key: str, default: int | None = REQUIRED) -> int | None:
        """A count or a size: at least 1."""
        return self._positive(key, self._get(key, int, default))

    def natural(self, key: str, default: int | None = REQUIRED) -> int | None:
        """A count that may be 0."""
        value = self._get(key, int, default)
        if value is not None and value < 0:
            raise self._wrong(key, value)
        return value

    def float(self, key: str, default: float | None = REQUIRED) -> float | None:
        """A positive number."""
        value = self._positive(key, self._get(key, (int, float), default))
        return None if value is None else float(value)

    def flag(self, key: str, default: bool = REQUIRED) -> bool:
        return self._get(key, bool, default)

    def text(self, key: str, default: str | None = REQUIRED) -> str | None:
        return self._get(key, str, default)

    def items(self, key: str, default: tuple | None = REQUIRED) -> tuple | None:
        value = self._get(key, (list, tuple), default)
        return None if value is None else tuple(value)

    def values(self) -> list[Any]:
        return list(self._data.values())

    def inner(self, key: str) -> Config:
        """The nested object under `key`, empty if absent."""
        return Config(self._get(key, Mapping, {}), f"{self.source}: {key}")

    def has(self, key: str) -> bool:
        return self._data.get(key) is not None

    def over(self, outer: Config) -> Config:
        """This config, with keys it lacks taken from `outer`."""
        return Config({**outer._data, **{k: v for k, v in self._data.items() if v is not None}}, self.source)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids written as one number or a list."""
        value = self._get(key, (int, list, tuple), ())
        ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not all(type(i) is int and i >= 0 for i in ids):
            raise self._wrong(key, value)
        return ids

    def _get(self, key: str, kind: Any, default: Any) -> Any:
        value = self._data.get(key)
        if value is None:
            if default is REQUIRED:
                raise ModelError(f"{self.source} has no '{key}'; the file is incomplete, fetch it again from the model's source")
            return default
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self._wrong(key, value)
        return value

    def _positive(self, key: str, value: Any) -> Any:
        if value is not None and not 0 < value < math.inf:  # also what is not a number: JSON and GGUF can hold that
            raise self._wrong(key, value)
        return value

    def _wrong(self, key: str, value: Any) -> ModelError:
        return ModelError(f"{self.source}: '{key}' is {value!r}, which cannot be; fetch the file again from the model's source")
