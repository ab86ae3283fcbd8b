"""From a path to a model in memory: find out what it is, check that it fits, copy every tensor to its canonical place."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from engine.hostmem import available_bytes, lazy, prefer_huge_pages
from engine.kernels.ops import Ops, Quant, Weight
from engine.lean import torch
from engine.mapped import MappedFile
from engine.models.errors import ModelError
from engine.models.gguf import GgufCheckpoint
from engine.models.names import Piece, joined, shapes
from engine.models.safetensors import SafetensorsCheckpoint
from engine.models.spec import ModelSpec
from engine.numa import interleave
from engine.tensors import Library, library_of, to_torch

log = logging.getLogger(__name__)

Progress = Callable[[float, str], None]  # fraction 0..1, stage
ROUTED = (".moe.gate_up", ".moe.down")  # ends of the canonical names of routed experts
WORKSPACE = 256 << 20  # bytes kept free beside the weights: interpreter, torch, activations of one step
OWN_PAGES = 1 << 20  # bytes from which on memory comes from the system: what was used before lies where it lay
MAPPED_BYTES = 32 << 20  # of the file, read and resident beside their copy, before they are let go of


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded, for people and for the identity of caches."""

    path: str
    format: str  # safetensors | gguf
    parameters: int
    bytes: int  # as stored in the checkpoint
    types: dict[str, int]  # storage type -> elements
    skipped: tuple[str, ...]  # tensors left out, each for the reason its family gives
    identity: str  # hex; equal only for equal spec, names, types and (sampled) contents


@dataclass(frozen=True)
class LoadedModel:
    spec: ModelSpec
    weights: dict[str, Weight]  # canonical name -> what `ops.prepare` returned; vectors are float32
    info: ModelInfo
    files: tuple[MappedFile, ...] = ()  # that some of the weights lie in; they must stay as they are
    mapped: int = 0  # bytes of those weights: the system counts their memory as available

    def in_torch(self) -> LoadedModel:
        """The same memory as tensors of torch."""
        return replace(self, weights={name: _in_torch(weight) for name, weight in self.weights.items()})


class Checkpoint(Protocol):
    """An opened checkpoint of some format. `kind` is a dtype, or a ggml type name for block-quantized tensors.

    Tensors are of `library`, which may be another one than was asked for.
    """

    format: str
    library: Library
    spec: ModelSpec
    pieces: list[Piece]
    skipped: list[str]

    def shape(self, source: str) -> tuple[int, ...]: ...
    def kind(self, source: str) -> torch.dtype | str: ...
    def nbytes(self, source: str) -> int: ...
    @property
    def files(self) -> tuple[MappedFile, ...]: ...
    def read(self, piece: Piece) -> Weight: ...
    def whole(self, pieces: list[Piece]) -> Weight | None: ...
    def let_go(self, pieces: list[Piece]) -> None: ...


def open_checkpoint(path: str | Path, library: Library = torch) -> Checkpoint:
    """A `.gguf` file, a directory holding exactly one, or a Hugging Face directory. Raises ModelError."""
    path = Path(path)
    if not path.exists():
        raise ModelError(f"no such model: {path}; give the directory of a checkpoint or a .gguf file")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a model: a single file must be a .gguf; give its directory for safetensors")
        return GgufCheckpoint(path, library)
    found = sorted(path.glob("*.gguf"))
    if found and not (path / "config.json").is_file():
        if len(found) > 1:
            raise ModelError(f"{path} holds {len(found)} .gguf files; name one of them: {', '.join(p.name for p in found)}")
        return GgufCheckpoint(found[0], library)
    return SafetensorsCheckpoint(path, library)


def required_bytes(path: str | Path, ops: Ops | None = None) -> int:
    """Host memory the weights of `path` take once loaded (for `ops`, if it stores them wider than the file does)."""
    return _required(open_checkpoint(path), ops)


def open_complete(path: str | Path, library: Library = torch) -> Checkpoint:
    """`open_checkpoint`, and every tensor is there, whole and of the right shape. Raises ModelError."""
    checkpoint = open_checkpoint(path, library)
    _check_complete(checkpoint, path)
    return checkpoint


def read_weight(checkpoint: Checkpoint, name: str, ops: Ops) -> Weight:
    """One canonical tensor of an `open_complete` checkpoint, as `load_model` would hold it."""
    pieces = [piece for piece in checkpoint.pieces if piece.name == name]
    weight = _assemble(checkpoint, [pieces], [shapes(checkpoint.spec)[name]])
    return ops.prepare(_computable(weight, ops))


def load_model(
    path: str | Path,
    ops: Ops,
    progress: Progress = lambda fraction, stage: None,
    *,
    experts: bool = True,
    mapped: bool = False,
    host: bool = False,
    library: Library = torch,
) -> LoadedModel:
    """Load all weights into memory, or all but the routed experts. Peak memory is the weights plus MAPPED_BYTES.

    `mapped`: what lies in the file as `ops` computes on it stays there, the banks of experts first of all. `host`: the routed
    experts stay in host memory whatever device `ops` computes on. Weights are tensors of `library`, but torch's for
    a checkpoint with scales apart.
    Raises ModelError, one line for the user.
    """
    progress(0.0, "reading the checkpoint's header")
    checkpoint = open_complete(path, library)
    everything = checkpoint.pieces
    if not experts:
        checkpoint.pieces = [piece for piece in everything if not piece.name.endswith(ROUTED)]
    _check_memory(_in_host(checkpoint, ops, host), path, _packed(checkpoint, ops))
    weights = _read_all(checkpoint, ops, progress, mapped and getattr(ops, "maps", False), ROUTED if host else ())
    checkpoint.pieces = everything
    if checkpoint.skipped:
        examples = ", ".join(checkpoint.skipped[:3])
        log.warning("left out %d tensors that text generation does not use, such as %s", len(checkpoint.skipped), examples)
    files = checkpoint.files if weights.mapped else ()
    return LoadedModel(checkpoint.spec, weights.prepared, _info(checkpoint, path, weights.digest), files, weights.mapped)


@dataclass(frozen=True)
class _Read:
    prepared: dict[str, Weight]
    digest: str
    mapped: int


def _read_all(checkpoint: Checkpoint, ops: Ops, progress: Progress, mapped: bool, host: tuple[str, ...]) -> _Read:
    """`host`: ends of the names of what stays as it is read."""
    by_name: dict[str, list[Piece]] = {}
    for piece in checkpoint.pieces:
        by_name.setdefault(piece.name, []).append(piece)
    total, done, there = sum(checkpoint.nbytes(p.source) for p in checkpoint.pieces), 0, 0
    prepared, digest = {}, hashlib.sha256(repr(checkpoint.spec).encode())
    wanted = {name: shape for name, shape in shapes(checkpoint.spec).items() if name in by_name}
    for name, parts in joined(wanted, lambda part: checkpoint.kind(by_name[part][0].source)):
        size = sum(checkpoint.nbytes(p.source) for part in parts for p in by_name[part])
        vector = len(wanted[parts[0]]) == 1 or name.endswith(".conv")
        lying = [_lying(checkpoint, by_name[part], wanted[part], ops) for part in parts] if mapped and not vector else [None]
        if None not in lying:  # parts of a joined matrix stay apart
            _add_to_digest(digest, name, lying)
            prepared |= dict(zip(parts, lying, strict=True))
            there += size
        else:
            pieces = [by_name[part] for part in parts]
            weight = _assemble(checkpoint, pieces, [wanted[part] for part in parts], whole_pages=name.endswith(host))
            _add_to_digest(digest, name, [weight])
            weight = weight.float() if vector else _computable(weight, ops)
            prepared[name] = weight if name.endswith(host) else ops.prepare(weight)
            if len(parts) > 1:
                prepared |= _rows_of(prepared[name], parts, [wanted[part][0] for part in parts])
        done += size
        progress(done / total, "loading weights")
    return _Read(prepared, digest.hexdigest(), there)


def _lying(checkpoint: Checkpoint, pieces: list[Piece], shape: tuple[int, ...], ops: Ops) -> Weight | None:
    """A tensor that `ops` computes on where it lies in the file; None for one that must be copied."""
    weight = None if _widens(checkpoint.kind(pieces[0].source), ops) else checkpoint.whole(pieces)
    halves = (shape[0], 2, shape[1] // 2, *shape[2:])  # gate and up apart
    return weight if weight is not None and tuple(weight.shape) in (shape, halves) else None


def _assemble(
    checkpoint: Checkpoint, parts: list[list[Piece]], shape: list[tuple[int, ...]], whole_pages: bool = False
) -> Weight:
    """Copy canonical tensors of one type into fresh memory, one below the other; `parts` are the pieces of each.

    `whole_pages`: it shares no page with anything else, so that it can be registered with a device.
    """
    first = _read(checkpoint, parts[0][0])
    quantized = isinstance(first, Quant)
    width = first.data.shape[-1] if quantized else shape[0][-1]  # bytes of a row of blocks, elements otherwise
    rows = [n[0] for n in shape]
    whole = (sum(rows), *shape[0][1:-1], width) if quantized else (sum(rows), *shape[0][1:])
    library = checkpoint.library
    out = _fresh(library, whole, library.uint8 if quantized else first.dtype, whole_pages)
    prefer_huge_pages(out.data_ptr(), out.nbytes)
    interleave(out.data_ptr(), out.nbytes)
    read, size = [], 0
    for pieces, target in zip(parts, out.split(rows), strict=True):
        for piece in pieces:
            _copy(_read(checkpoint, piece), piece, target)
            read, size = [*read, piece], size + checkpoint.nbytes(piece.source)
            if size > MAPPED_BYTES:
                checkpoint.let_go(read)
                read, size = [], 0
    checkpoint.let_go(read)
    return Quant(out, first.type, first.cols) if quantized else out


def _fresh(library: Library, shape: tuple[int, ...], dtype: torch.dtype, whole_pages: bool) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    if not whole_pages and size < OWN_PAGES:
        return library.empty(shape, dtype=dtype)
    return library.frombuffer(lazy(size), dtype=library.uint8)[:size].view(dtype).view(shape)


def _read(checkpoint: Checkpoint, piece: Piece) -> Weight:
    """Blocks run along a row: what is to be turned becomes float32, which loses nothing."""
    weight = checkpoint.read(piece)
    return _dequantized(weight) if piece.turned and isinstance(weight, Quant) else weight


def _dequantized(weight: Quant) -> torch.Tensor:
    from engine.kernels.reference import dequantize  # imports torch

    out = dequantize(_in_torch(weight))
    return out if library_of(weight.data) is torch else library_of(weight.data).from_numpy(out.numpy())


def _in_torch(weight: Weight) -> Weight:
    return Quant(to_torch(weight.data), weight.type, weight.cols) if isinstance(weight, Quant) else to_torch(weight)


def _copy(read: Weight, piece: Piece, target: torch.Tensor) -> None:
    """Put one checkpoint tensor where it belongs in the canonical one."""
    data = read.data if isinstance(read, Quant) else read
    if piece.expert is not None:
        target = target[piece.expert]
    if piece.part:
        half = target.shape[-2] // 2
        target = target[..., :half, :] if piece.part == "gate" else target[..., half:, :]
    data = data if piece.rows is None else data[list(piece.rows)]
    if piece.turned:
        heads, rows, cols = target.shape
        data = data.reshape(heads, cols, rows).transpose(1, 2)
    target.copy_(data.reshape(target.shape))


def _rows_of(whole: Weight, parts: list[str], rows: list[int]) -> dict[str, Weight]:
    """The parts of a joined matrix as views of it."""
    if isinstance(whole, Quant):
        return {p: Quant(data, whole.type, whole.cols) for p, data in zip(parts, whole.data.split(rows), strict=True)}
    return dict(zip(parts, whole.split(rows), strict=True))


def _computable(weight: Weight, ops: Ops) -> Weight:
    return _dequantized(weight) if isinstance(weight, Quant) and _widens(weight.type, ops) else weight


def _widens(kind: torch.dtype | str, ops: Ops | None) -> bool:
    """Whether these kernels cannot compute on the block type, so that it is held as float32 instead (which is exact)."""
    types = getattr(ops, "quant_types", None)
    return isinstance(kind, str) and types is not None and kind not in types


def _check_complete(checkpoint: Checkpoint, path: str | Path) -> None:
    """Every canonical tensor is there once, whole, of one type and of the shape the config promises."""
    by_name: dict[str, list[Piece]] = {}
    for piece in checkpoint.pieces:
        by_name.setdefault(piece.name, []).append(piece)
    wanted = shapes(checkpoint.spec)
    taken = Counter()
    for piece in checkpoint.pieces:
        taken[piece.source] += len(piece.rows or ())
    for name, pieces in by_name.items():
        if name not in wanted:
            raise ModelError(
                f"{path}: tensor '{pieces[0].source}' is there but the config does not call for it; "
                f"config and weights belong to different checkpoints"
            )
    for name, shape in wanted.items():
        pieces = by_name.get(name)
        if not pieces:
            raise ModelError(
                f"{path}: the tensor for '{name}' {list(shape)} is missing; the checkpoint is incomplete, download it again"
            )
        for piece in pieces:
            _check_shape(checkpoint, piece, _piece_shape(piece, shape), path, taken[piece.source])
        _check_cover(pieces, name, shape, path)
        kinds = {str(checkpoint.kind(p.source)).removeprefix("torch.") for p in pieces}
        if len(kinds) > 1:
            raise ModelError(
                f"{path}: the parts of '{name}' are stored as {' and '.join(sorted(kinds))}; convert them to one type"
            )


def _piece_shape(piece: Piece, shape: tuple[int, ...]) -> tuple[int, ...]:
    if piece.expert is not None:
        shape = shape[1:]
    if piece.rows is not None and len(shape) == 3:  # heads, cut from one matrix
        heads, rows, cols = shape
        return (heads * cols, rows) if piece.turned else (heads * rows, cols)
    return (*shape[:-2], shape[-2] // 2, shape[-1]) if piece.part else shape


def _check_shape(checkpoint: Checkpoint, piece: Piece, want: tuple[int, ...], path: str | Path, shared_rows: int) -> None:
    """`shared_rows`: how many rows of the source all pieces that are cut from it take together."""
    have = checkpoint.shape(piece.source)
    if piece.rows is not None and have[0] == shared_rows:
        have = (len(piece.rows), *have[1:])
    if [n for n in have if n != 1] != [n for n in want if n != 1]:
        raise ModelError(
            f"{path}: tensor '{piece.source}' has shape {list(have)} but the config calls for {list(want)}; "
            f"config and weights belong to different checkpoints"
        )


def _check_cover(pieces: list[Piece], name: str, shape: tuple[int, ...], path: str | Path) -> None:
    """The pieces are the whole tensor, or all halves, or all experts, or all halves of all experts."""
    experts = range(shape[0]) if pieces[0].expert is not None else [None]
    parts = ("gate", "up") if pieces[0].part else ("",)
    want = {(expert, part) for expert in experts for part in parts}
    missing = want - {(p.expert, p.part) for p in pieces}
    if missing or len(pieces) != len(want):
        raise ModelError(
            f"{path}: '{name}' is made of {len(pieces)} tensors but the config calls for {len(want)}; "
            f"the checkpoint is incomplete or belongs to another config"
        )


def held_bytes(checkpoint: Checkpoint, source: str, ops: Ops | None) -> int:
    """Memory one checkpoint tensor takes once loaded for `ops`."""
    width, elements = getattr(ops, "weight_bytes", None), math.prod(checkpoint.shape(source))
    if width:
        return elements * width
    return 4 * elements if _widens(checkpoint.kind(source), ops) else checkpoint.nbytes(source)


def _required(checkpoint: Checkpoint, ops: Ops | None) -> int:
    width = getattr(ops, "weight_bytes", None)  # set by kernels that hold every weight in one width
    total, wide = 0, Counter()
    for source in {p.source for p in checkpoint.pieces}:
        kind = checkpoint.kind(source)
        if width is None and _widens(kind, ops):
            wide[kind] += math.prod(checkpoint.shape(source))
        total += held_bytes(checkpoint, source, ops)
    for piece in checkpoint.pieces:
        if piece.turned and width is None and isinstance(checkpoint.kind(piece.source), str):  # see `_read`
            total += 4 * len(piece.rows) * checkpoint.shape(piece.source)[-1]
    for kind, elements in wide.items():
        log.warning("no kernel computes on %s: %d million weights are held as float32, 4 bytes each", kind, elements / 1e6)
    return total


def _in_host(checkpoint: Checkpoint, ops: Ops, host: bool) -> int:
    """Host memory for the weights: all of it, or with a device that of `host`'s experts; what passes through is not counted."""
    if ops.device.type == "cpu":
        return _required(checkpoint, ops)
    return sum(
        held_bytes(checkpoint, source, ops)
        for source in {p.source for p in checkpoint.pieces if host and p.name.endswith(ROUTED)}
    )


def _packed(checkpoint: Checkpoint, ops: Ops) -> int:
    """Memory that is enough when routed experts are read from a pack, at least one layer of them held; 0 without experts."""
    routed = {p.source: p.name.partition(".")[0] for p in checkpoint.pieces if p.name.endswith(ROUTED)}
    dense = {p.source for p in checkpoint.pieces} - routed.keys()
    held = [sum(held_bytes(checkpoint, source, ops) for source in sources) for sources in (dense, routed)]
    return held[0] + max(WORKSPACE, held[1] // len(set(routed.values()))) if routed else 0


def _check_memory(need: int, path: str | Path, packed: int) -> None:
    have = available_bytes()
    if have is not None and need + WORKSPACE > have:
        pack = f", or pack its experts (`moorage pack {path} DIRECTORY`) and serve it with --experts-pack"
        raise ModelError(
            f"{path} needs {(need + WORKSPACE) / 2**30:.1f} GiB of memory but {have / 2**30:.1f} GiB are available; "
            f"free memory, raise the container's limit or take a smaller quantization"
            f"{pack if 0 < packed < have else ''}"
        )


def _add_to_digest(digest, name: str, parts: Sequence[Weight]) -> None:
    """Ends of the tensor only, whose rows lie in `parts`: enough to tell trainings apart, cheap on a hundred gigabytes."""
    data = [part.data if isinstance(part, Quant) else part for part in parts]
    kind = parts[0].type if isinstance(parts[0], Quant) else str(parts[0].dtype)
    shape = (sum(len(part) for part in data), *data[0].shape[1:])
    if data[0].dim() == 4:  # gate and up apart
        shape = (shape[0], 2 * shape[2], shape[3])
    digest.update(f"{name} {kind} {shape}".encode())
    size = 4096
    first = b"".join(_end(part, size, 1) for part in data)[:size]
    digest.update(first + b"".join(_end(part, size, -1) for part in data)[-size:])


def _end(data: torch.Tensor, size: int, side: int) -> bytes:
    """The first (`side` 1) or the last (-1) `size` bytes of its elements in order, without a copy of all of them."""
    few = min(len(data), -(-size // max(1, data[:1].nbytes))) if len(data) else 0
    part = (data[:few] if side > 0 else data[len(data) - few :]).reshape(-1).view(library_of(data).uint8)
    return (part[:size] if side > 0 else part[-size:]).numpy().tobytes()


def _info(checkpoint: Checkpoint, path: str | Path, identity: str) -> ModelInfo:
    types: Counter[str] = Counter()
    sources = {piece.source for piece in checkpoint.pieces}
    for source in sources:
        types[str(checkpoint.kind(source)).removeprefix("torch.")] += math.prod(checkpoint.shape(source))
    size = sum(checkpoint.nbytes(source) for source in sources)
    return ModelInfo(str(path), checkpoint.format, types.total(), size, dict(types), tuple(checkpoint.skipped), identity)
