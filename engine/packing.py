"""From a checkpoint to a pack of its routed experts, and from a pack back to a running executor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.experts.executor import Tier, TieredExperts
from engine.experts.filepool import READERS, FilePool, Pack
from engine.experts.grouped import GroupedExperts, Within, share_out
from engine.experts.pack import FLOATS, Index, PackError, read_index, write_pack
from engine.experts.predict import NextRouter
from engine.experts.split import Rates
from engine.fingerprint import checkpoint_parts
from engine.kernels.ops import Ops, Weight
from engine.memory import gib
from engine.models.load import open_complete, read_weight
from engine.models.spec import MoeSpec
from engine.nn.experts import Bank
from engine.plan import read_rate

WHOLE = 0.8  # of available memory that a pack may take as a whole: it is the model's, the cache has the rest
SHARE = 0.5  # of available memory for slots when the user names no amount: the cache and the system take from the rest


def source_identity(model: str | Path) -> str:
    """Which checkpoint a pack was made from."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(checkpoint_parts(model).items()):
        digest.update(f"{name}\0{value}\0".encode())
    return digest.hexdigest()


def pack_model(model: str | Path, directory: Path, ops: Ops, progress: Callable[[int, int], None]) -> Index:
    """Pack all routed experts as `ops` computes on them, or finish what was begun. Raises ModelError, PackError, OSError."""
    checkpoint = open_complete(model)
    layers = [i for i, layer in enumerate(checkpoint.spec.layers) if isinstance(layer.ffn, MoeSpec)]
    if not layers:
        raise PackError(f"{model} has no experts: there is nothing to pack")

    def bank(number: int) -> Bank:
        layer = layers[number]
        up, down = (read_weight(checkpoint, f"{layer}.moe.{name}", ops) for name in ("gate_up", "down"))
        return Bank(up, down, checkpoint.spec.layers[layer].ffn.act)

    return write_pack(directory, source_identity(model), len(layers), bank, progress)


def open_pack(directory: Path, model: str | Path, ops: Ops) -> Pack:
    """Raises PackError for a pack of another checkpoint, or one these kernels do not compute on."""
    for part in {part for kind in read_index(directory).kinds for part in (kind.gate_up, kind.down)}:
        quantized = part.kind not in FLOATS
        types = ops.quant_types
        widened = ops.weight_bytes is not None and (quantized or FLOATS[part.kind].itemsize != ops.weight_bytes)
        if widened or (quantized and types is not None and part.kind not in types):
            raise PackError(f"{directory} holds {part.kind} experts, which the {ops.name} kernels do not compute on: pack again")
    return Pack(directory, source_identity(model))


def fits_in_place(pack: Pack, ops: Ops, available: int) -> bool:
    """Whether all of a pack can be computed on where its file is mapped."""
    return getattr(ops, "maps", False) and pack.expert_bytes <= available * WHOLE


def slot_counts(pack: Pack, wanted: int, available: int) -> list[int]:
    """Slots for each pool in `wanted` bytes of memory, or in a share of what is available. Raises PackError: too few."""
    budget = wanted or int(available * SHARE)
    if budget < pack.least_bytes:
        what = f"one layer of {pack.experts} experts" + (f" of each of {len(pack.pools)} kinds" if len(pack.pools) > 1 else "")
        text = f"{what} needs {gib(pack.least_bytes)} of memory, {gib(budget)} are for experts"
        raise PackError(f"{text}: raise --expert-memory")
    if budget > available:
        raise PackError(f"--expert-memory asks for {gib(budget)}, {gib(available)} are available: lower it")
    return share_out(pack.pools, budget)


def stream_tier(pool: FilePool, slots: int, rates: Rates | None, policy: str) -> Tier:
    """`pool` in a file."""
    return Tier(slots, "offload", rates, policy, workers=READERS)


def stream_experts(
    pack: Pack, ops: Ops, slots: Sequence[int], policy: str, routers: Sequence[Weight] = ()
) -> tuple[TieredExperts | GroupedExperts, float]:
    """The executor, which reads ahead what `routers` (one a layer) predict, and the file's bytes per second (0: unknown)."""
    rate = read_rate(pack)
    # nothing is computed in the file: the processor's rates play no part beside this link
    rates = Rates(rate, rate, 0.0) if rate else None
    predictor = NextRouter(routers, ops) if routers else None

    def executor(pool: FilePool, count: int) -> TieredExperts:
        own = Within(predictor, pool.numbers) if predictor else None
        return TieredExperts(pool, ops, stream_tier(pool, count, rates, policy), own)

    parts = [executor(pool, count) for pool, count in zip(pack.pools, slots, strict=True)]
    return (parts[0] if len(parts) == 1 else GroupedExperts(parts, [pool.numbers for pool in pack.pools])), rate
