"""A Hugging Face directory of safetensors shards: its config, the tensors in it, and reading them without keeping them mapped."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.kernels.ops import Weight
from engine.lean import torch
from engine.mapped import MappedFile, map_file
from engine.models import scaled
from engine.models.config import Config
from engine.models.errors import ModelError, unreadable
from engine.models.families import build_spec, family_of
from engine.models.names import Piece, place, split, unnumbered
from engine.models.scaled import Scaled
from engine.models.spec import ModelSpec
from engine.tensors import Library

INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # by their names
STORED = DTYPES | {  # numbers and scales of quantized matrices too
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "U8": "uint8",
    "I8": "int8",
}
_LAYER = re.compile(r"layers\.(\d+)\.")
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")  # longest first


class SafetensorsCheckpoint:
    """Opened and checked; nothing is read yet. Raises ModelError."""

    format = "safetensors"

    def __init__(self, directory: Path, library: Library = torch) -> None:
        self._directory, self.library = directory, library
        self._config = read_config(directory)
        self._family = family_of(self._config.model_type, self._config.source)
        self.spec: ModelSpec = model_spec(self._config, directory)
        self._files: dict[str, str] = {}  # tensor -> shard
        self._where: dict[str, _Where] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        self._scaled: dict[str, Scaled] = {}
        self._skipped: list[str] = []
        self.pieces = self._scan()
        if self._scaled:
            self.library = torch  # puts scales and numbers together
        self._open: dict[str, MappedFile] = {}

    @property
    def skipped(self) -> list[str]:
        """Names of tensors that are left out because the family says so."""
        return self._skipped

    def shape(self, source: str) -> tuple[int, ...]:
        return self._scaled[source].shape if source in self._scaled else self._shapes[source][0]

    def kind(self, source: str) -> torch.dtype | str:
        return self._scaled[source].kind if source in self._scaled else getattr(self.library, self._shapes[source][1])

    def nbytes(self, source: str) -> int:
        if source in self._scaled:
            return self._scaled[source].nbytes
        shape, dtype = self._shapes[source]
        return math.prod(shape) * getattr(self.library, dtype).itemsize

    def read(self, piece: Piece) -> Weight:
        """A view of the mapped file; a matrix with separate scales as blocks of its own."""
        if piece.source in self._scaled:
            return self._scaled[piece.source].read(self._tensor)
        return self._tensor(piece.source)

    def _tensor(self, name: str) -> torch.Tensor:
        shard, where = self._files[name], self._where[name]
        try:
            if shard not in self._open:
                self._open[shard] = map_file(self._directory / shard)
            if where.dtype not in STORED:
                raise OSError(f"tensor '{name}' is stored as {where.dtype}")
            raw = self.library.frombuffer(
                self._open[shard].memory, dtype=self.library.uint8, count=where.end - where.begin, offset=where.begin
            )
            return raw.view(getattr(self.library, STORED[where.dtype])).view(where.shape)
        except (OSError, ValueError) as error:
            raise unreadable(self._directory / shard, error) from error

    @property
    def files(self) -> tuple[MappedFile, ...]:
        return tuple(self._open.values())

    def whole(self, pieces: list[Piece]) -> Weight | None:
        """A canonical tensor where it lies in the mapped file; None for one that has to be put together."""
        first = pieces[0]
        if len(pieces) > 1 or first.rows is not None or first.turned or first.expert is not None or first.source in self._scaled:
            return None
        return self._tensor(first.source)

    def let_go(self, pieces: list[Piece]) -> None:
        """These were copied out of the files and shall not be resident twice."""
        for piece in pieces:
            scaled_matrix = self._scaled.get(piece.source)
            for name in scaled_matrix.sources if scaled_matrix else (piece.source,):
                where = self._where[name]
                self._open[self._files[name]].let_go(where.begin, where.end)

    def _scan(self) -> list[Piece]:
        headers = {}
        for shard in _shards(self._directory):
            for name, where in _tensors(self._directory / shard).items():
                self._files[name], self._where[name], headers[name] = shard, where, (where.shape, where.dtype)
        try:
            self._scaled = scaled.find(headers)
        except ModelError as error:
            raise ModelError(f"{self._directory}: {error}") from error
        parts_of_others = {source for matrix in self._scaled.values() for source in matrix.sources}
        pieces = []
        for name in {**headers, **self._scaled}:
            if name in self._scaled or name not in parts_of_others:
                pieces += self._place(name, headers.get(name))
        return pieces

    def _place(self, name: str, header: scaled.Header | None) -> list[Piece]:
        """Where a tensor goes; nowhere when it is left out. `header` is None for a scaled matrix that goes by another name."""
        local = next((name[len(p) :] for p in PREFIXES if name.startswith(p)), name)
        if self._predicts_ahead(local):
            self._skipped.append(name)
            return []
        piece = place(name, local, self._family.NAMES)
        parts = [piece] if piece else split(name, local, getattr(self._family, "SPLITS", {}), self.spec)
        if parts and not (parts[0].name == "head" and self.spec.tie_embeddings):
            if name not in self._scaled:
                shape, kind = header
                self._shapes[name] = (shape, self._dtype(name, kind))
            return parts
        if parts or any(unnumbered(local).startswith(prefix) for prefix in self._family.SKIP) or name.endswith(scaled.UNUSED):
            self._skipped.append(name)
            return []
        raise ModelError(
            f"{self._directory / self._files.get(name, '')}: tensor '{name}' is not part of a {self._config.model_type} model as "
            f"config.json describes it; the checkpoint is of another kind or quantized in a way that is not supported"
        )

    def _predicts_ahead(self, local: str) -> bool:
        """Multi-token prediction heads that are stored as further layers."""
        number, layers = _LAYER.match(local), len(self.spec.layers)
        heads = max(self._config.ids("num_nextn_predict_layers") + self._config.ids("num_mtp_layers"), default=0)
        return number is not None and layers <= int(number[1]) < layers + heads

    def _dtype(self, name: str, kind: str) -> str:
        if kind not in DTYPES:
            raise ModelError(
                f"{self._directory}: tensor '{name}' is stored as {kind}, which is not supported; "
                f"use a BF16, F16 or F32 checkpoint or a GGUF file"
            )
        return DTYPES[kind]


def read_config(directory: Path) -> Config:
    """`config.json` as one flat view: a nested `text_config` first, the outer keys behind it."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} is not a model: it has neither config.json nor a .gguf file; give the directory of a checkpoint"
        )
    outer = Config(_json(path), str(path))
    method = outer.inner("quantization_config").text("quant_method", "unknown")
    if outer.has("quantization_config") and method not in scaled.METHODS:
        raise ModelError(
            f"{path}: quantization '{method}' is not supported; supported: {', '.join(scaled.METHODS)}; "
            f"or use the BF16 checkpoint or a GGUF file of this model"
        )
    if not outer.has("text_config"):
        return outer
    return outer.inner("text_config").over(outer)


def model_spec(config: Config, directory: Path) -> ModelSpec:
    """The family's spec with the ids that end a generation, from both places they are written in."""
    from dataclasses import replace

    spec = build_spec(config)
    ids = list(config.ids("eos_token_id"))
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids += Config(_json(generation), str(generation)).ids("eos_token_id")
    return replace(spec, eos_ids=tuple(dict.fromkeys(ids)))


def _json(path: Path) -> dict:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); fetch the file again") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds no JSON object; fetch the file again")
    return data


def _shards(directory: Path) -> list[str]:
    """The files that make up the checkpoint: those of the index, or the only one there is."""
    if (directory / INDEX).is_file():
        index = Config(_json(directory / INDEX), str(directory / INDEX))
        shards = sorted({str(shard) for shard in index.inner("weight_map").values()})
        for shard in shards:
            if not (directory / shard).is_file():
                raise ModelError(f"{directory}: shard {shard} named in {INDEX} is missing; download it again")
        return shards
    found = sorted(p.name for p in directory.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if len(found) == 1:
        return found
    if found:
        raise ModelError(f"{directory} has {len(found)} safetensors files but no {INDEX}; download the index too")
    if list(directory.glob("*.bin")) or list(directory.glob("*.pt*")):
        raise ModelError(
            f"{directory} has only pickled weights, which are never read because they can run code; convert to safetensors"
        )
    raise ModelError(f"{directory} has a config.json but no safetensors files; download the weights")


@dataclass(frozen=True)
class _Where:
    """A tensor's place in its file, in bytes."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: str


def _tensors(path: Path) -> dict[str, _Where]:
    """Every tensor of a file. Opening it with the library verifies that the header fits and covers the file exactly."""
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise unreadable(path, error) from error
    header.pop("__metadata__", None)
    base = 8 + size
    return {
        name: _Where(base + entry["data_offsets"][0], base + entry["data_offsets"][1], tuple(entry["shape"]), entry["dtype"])
        for name, entry in header.items()
    }
