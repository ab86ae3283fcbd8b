"""From a placement by groups of layers to the executor that runs it, beside a fast memory of its own: a device's, or emulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.experts.executor import Tier, TieredExperts
from engine.experts.filepool import FilePool, Pack
from engine.experts.grouped import GroupedExperts, Within, deal_out
from engine.experts.layers import Group
from engine.experts.pool import HostPool, Pool, Room, kind_of, read_whole
from engine.experts.predict import NextRouter
from engine.experts.split import Rates
from engine.experts.streams import HERE, Device
from engine.kernels.ops import Ops, Weight
from engine.nn.experts import Bank
from engine.packing import stream_tier


@dataclass(frozen=True)
class Source:
    """Where experts come from: banks in host memory by layer (counting those with experts), the others from a pack."""

    banks: Mapping[int, Bank]
    pack: Pack | None = None
    routers: Sequence[Weight] = ()  # one a layer, to read ahead by

    def pools(self, group: Group) -> list[Pool]:
        """One for each kind of experts in the group."""
        if group.mode == "stream":
            layout, kinds = self.pack.index.layout, self.pack.index.kinds
            own = [[n for n in group.layers if layout[n] == number] for number in range(len(kinds))]
            return [FilePool(self.pack, kind, layers) for kind, layers in zip(kinds, own, strict=True) if layers]
        kinds = dict.fromkeys(kind_of(self.banks[n]) for n in group.layers)
        own = [[n for n in group.layers if kind_of(self.banks[n]) == kind] for kind in kinds]
        return [HostPool([self.banks[n] for n in layers], layers) for layers in own]


@dataclass(frozen=True)
class Ways:
    """How misses come: `rates` of the link and the processor, `disk` bytes per second (0: unknown)."""

    rates: Rates | None
    disk: float = 0.0
    policy: str = "lru"
    link: float | None = None  # what an emulated link is held to; None is as fast as it goes


@dataclass(frozen=True)
class Kernels:
    """`near` computes in the fast memory, which is `device`'s; `host`, if there are such kernels, in host memory."""

    near: Ops
    device: Device = HERE
    host: Ops | None = None

    @property
    def one_arithmetic(self) -> bool:
        """Whether an expert's result has the same bits in both memories."""
        return not self.device.apart or (self.host is not None and numerics(self.host) == numerics(self.near))


def numerics(ops: Ops) -> str:
    """Equal only for kernels whose results are equal bit by bit."""
    return getattr(ops, "numerics", ops.name)


def run_groups(groups: Sequence[Group], source: Source, kernels: Kernels, ways: Ways) -> TieredExperts | GroupedExperts:
    parts: list[TieredExperts] = []
    try:
        for group in groups:
            pools = source.pools(group)
            slots = deal_out(pools, group.slots * _mean(pools)) if group.slots else [0] * len(pools)
            parts += [_part(group, pool, count, source, kernels, ways) for pool, count in zip(pools, slots, strict=True)]
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts[0] if len(parts) == 1 else GroupedExperts(parts, [part.pool.numbers for part in parts])


def _mean(pools: Sequence[Pool]) -> int:
    """Bytes of an expert, on average: what `Group.slots` counts in."""
    whole = sum(pool.layers * pool.experts * pool.expert_bytes for pool in pools)
    return -(-whole // sum(pool.layers * pool.experts for pool in pools))


def _part(group: Group, pool: Pool, slots: int, source: Source, kernels: Kernels, ways: Ways) -> TieredExperts:
    ops, device, predictor = kernels.near, kernels.device, None
    match group.mode:
        case "stream":
            if source.routers:
                predictor = Within(NextRouter(source.routers, ops, device), pool.numbers)
            tier = stream_tier(pool, slots, Rates(ways.disk, ways.disk, 0.0) if ways.disk else None, ways.policy)
        case "host":
            tier = Tier(0, "host", None, ways.policy, fixed=True)
        case "resident":
            tier = Tier(pool.layers * pool.experts, "offload", ways.rates, fixed=True)
        case _:
            tier = Tier(slots, group.mode, ways.rates, ways.policy, None if device.apart else ways.link)
    host = kernels.host if kernels.one_arithmetic else None
    return TieredExperts(pool, ops, tier, predictor, device, host)


def read_banks(pack: Pack, layers: Sequence[int], progress: Callable[[int], None]) -> dict[int, Bank]:
    """These layers of a pack in host memory. Raises OSError, MemoryError."""
    banks = {}
    for pool in Source({}, pack).pools(Group("stream", tuple(layers), 0, "")) if layers else ():
        for own, number in enumerate(pool.numbers):
            bank = Room(pool.like, pool.experts).bank
            for expert in range(pool.experts):
                progress(read_whole(pool, own * pool.experts + expert, bank, expert))
            banks[number] = bank
    return banks
