"""The packed file: all routed experts of a model in run-time layout, one record an expert. Writing it; `filepool` reads it.

A pack is a directory: `experts.bin`, records on 4 KiB borders in key order (gate_up, then down, then padding), equal in size
within a layer, and `index.json`: what they are, of which checkpoint, which layers are complete, a checksum of every record. The
index is replaced after each layer is on disk, so an interrupted `write_pack` goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from engine import tensors
from engine.experts.pool import data_of
from engine.kernels.ops import Quant, Weight
from engine.memory import gib
from engine.nn.experts import Bank
from engine.tensors import library_of

BLOCK = 4096  # direct reads must begin and end on the disk's blocks; no disk has larger ones
VERSION = 2  # 1: all layers of one kind, CRC-32
FLOATS = {"bf16": tensors.bfloat16, "f16": tensors.float16, "f32": tensors.float32}


class PackError(Exception):
    """A pack that cannot be written or used. One line for the user."""


@dataclass(frozen=True)
class Part:
    """One matrix of an expert: `kind` is bf16, f16, f32 or a ggml type, `rows` x `cols` weights in `bytes` bytes."""

    kind: str
    rows: int
    cols: int
    bytes: int


@dataclass(frozen=True)
class Kind:
    """What an expert of some layers is. Quantized files mix types: Q4_K_M stores some layers' down matrices as Q6_K."""

    gate_up: Part
    down: Part

    @property
    def bytes(self) -> int:
        return self.gate_up.bytes + self.down.bytes

    @property
    def record(self) -> int:
        return -(-self.bytes // BLOCK) * BLOCK


@dataclass(frozen=True)
class Index:
    source: str  # identity of the checkpoint
    layers: int
    experts: int
    act: str
    kinds: tuple[Kind, ...] = ()
    layout: tuple[int, ...] = ()  # kind of each layer on disk
    checksums: tuple[int, ...] = field(default=(), repr=False)  # XXH3 of each record on disk
    version: int = VERSION

    @property
    def done(self) -> int:
        return len(self.layout)

    @property
    def complete(self) -> bool:
        return self.done == self.layers

    def offset(self, layer: int) -> int:
        """Where the records of `layer` begin, in bytes."""
        return sum(self.kinds[kind].record for kind in self.layout[:layer]) * self.experts

    @property
    def size(self) -> int:
        """Bytes of the layers on disk."""
        return self.offset(self.done)

    def with_layer(self, kind: Kind, checksums: list[int]) -> Index:
        kinds = self.kinds if kind in self.kinds else (*self.kinds, kind)
        layout = (*self.layout, kinds.index(kind))
        return replace(self, kinds=kinds, layout=layout, checksums=(*self.checksums, *checksums))


def read_index(directory: Path) -> Index:
    """Raises PackError."""
    path = directory / "index.json"
    try:
        raw = json.loads(path.read_text())
        version = raw.get("version")
        if version != VERSION:
            raise PackError(f"{directory} was packed as version {version}, this engine reads {VERSION}: pack again")
        index = msgspec.convert(raw, Index)
    except FileNotFoundError:
        raise PackError(f"{directory} is no pack: it has no index.json; make one with `moorage engine pack`") from None
    except OSError as problem:
        raise closed(path, problem) from None
    except (ValueError, AttributeError, msgspec.ValidationError) as problem:
        raise PackError(f"{path} cannot be read ({problem}); remove {directory} and pack again") from None
    if not _is_sound(index):
        raise PackError(f"{path} is damaged: remove {directory} and pack again")
    return index


def closed(path: Path, problem: OSError) -> PackError:
    """What to tell about a file that may be sound but cannot be opened."""
    return PackError(f"{path} cannot be opened ({problem.strerror or problem}): is it there, and may this user read it?")


def _is_sound(index: Index) -> bool:
    """Whether its numbers go together."""
    counted = len(index.checksums) == index.done * index.experts and index.done <= index.layers and index.experts > 0
    return counted and set(range(len(index.kinds))).issuperset(index.layout) and all(_is_expert(kind) for kind in index.kinds)


def _is_expert(kind: Kind) -> bool:
    up, down = kind.gate_up, kind.down
    sizes = (
        min(up.rows, up.cols, up.bytes, down.rows, down.cols, down.bytes) > 0
        and up.cols == down.rows
        and up.rows == 2 * down.cols
    )
    return sizes and all(
        part.bytes == part.rows * part.cols * FLOATS[part.kind].itemsize if part.kind in FLOATS else part.bytes % part.rows == 0
        for part in (up, down)
    )


def write_pack(
    directory: Path, source: str, layers: int, bank: Callable[[int], Bank], progress: Callable[[int, int], None]
) -> Index:
    """Pack `layers` banks, or what an interrupted call left to do. `progress` gets bytes done and bytes in all.

    Raises PackError: banks that differ, too little space, another model's pack in the way. OSError from the disk.
    """
    first = bank(0)
    with _alone(directory):
        return _write_rest(directory, Index(source, layers, first.experts, first.act), first, bank, progress)


def _write_rest(
    directory: Path, want: Index, first: Bank, bank: Callable[[int], Bank], progress: Callable[[int, int], None]
) -> Index:
    index, layers = _begin(directory, want, _kind(first)), want.layers
    if index.complete:
        progress(index.size, index.size)
        return index
    _check_space(directory, _kind(first).record * index.experts * (layers - index.done))
    with open(directory / "experts.bin", "r+b" if index.done else "wb") as file:
        file.truncate(index.size)
        file.seek(index.size)
        for layer in range(index.done, layers):
            whole = bank(layer) if layer else first
            rest = _kind(whole).record * index.experts * (layers - layer)  # if those after it are like it
            _check_space(directory, rest)
            progress(index.size, index.size + rest)
            sums = _write_layer(file, whole, index, layer)
            file.flush()
            os.fsync(file.fileno())
            index = index.with_layer(_kind(whole), sums)
            _write_index(directory, index)
    progress(index.size, index.size)
    return index


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """The directory is there, and nobody else packs into it: two would cut the file under each other."""
    if directory.exists() and not directory.is_dir():
        raise PackError(f"{directory} is a file, and a pack is a directory: give an empty or a new one")
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
        yield
    except BlockingIOError:
        raise PackError(f"another process packs into {directory}: wait for it, or give another directory") from None
    finally:
        os.close(handle)


def _begin(directory: Path, want: Index, first: Kind) -> Index:
    """What an interrupted call left, or `want`."""
    if not (directory / "index.json").exists():
        if any(directory.iterdir()):
            raise PackError(f"{directory} is not empty and no pack: give an empty or a new directory")
        return want
    have = read_index(directory)
    if replace(have, kinds=(), layout=(), checksums=()) != want or have.kinds[:1] != (first,):
        raise PackError(f"{directory} holds another model's pack, or this one changed: remove it or give another directory")
    try:
        size = (directory / "experts.bin").stat().st_size
    except OSError as problem:
        raise closed(directory / "experts.bin", problem) from None
    if size < have.size:
        raise PackError(f"{directory}/experts.bin is shorter than its index says: remove {directory} and pack again")
    return have


def _check_space(directory: Path, need: int) -> None:
    free = shutil.disk_usage(directory).free
    if need > free:
        raise PackError(f"{directory}: {gib(need)} are still to be written, the disk has {gib(free)} free")


def _write_layer(file, bank: Bank, want: Index, layer: int) -> list[int]:
    if (bank.experts, bank.act) != (want.experts, want.act):
        raise PackError(f"layer {layer} has {bank.experts} experts, layer 0 has {want.experts}: such a model cannot be packed")
    kind = _kind(bank)
    sums, padding = [], bytes(kind.record - kind.bytes)
    up, down = (_bytes(w) for w in (bank.gate_up, bank.down))
    for expert in range(bank.experts):
        record = b"".join((up[expert].tobytes(), down[expert].tobytes(), padding))
        file.write(record)
        sums.append(xxhash.xxh3_64_intdigest(record))
    return sums


def _write_index(directory: Path, index: Index) -> None:
    fresh = directory / "index.json.tmp"
    with fresh.open("w") as file:
        json.dump(asdict(index), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, directory / "index.json")


def _kind(bank: Bank) -> Kind:
    return Kind(_part(bank.gate_up), _part(bank.down))


def _part(weight: Weight) -> Part:
    kinds = {str(dtype): name for name, dtype in FLOATS.items()}
    data = data_of(weight)
    kind = weight.type if isinstance(weight, Quant) else kinds[str(weight.dtype)]
    return Part(kind, weight.shape[1], weight.shape[2], data[0].nbytes)


def _bytes(weight: Weight) -> np.ndarray:
    """[E, bytes of an expert]"""
    data = data_of(weight).contiguous()
    return data.reshape(len(data), -1).view(library_of(data).uint8).cpu().numpy()  # kernels of a device have put it there
