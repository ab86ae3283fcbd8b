"""A made-up device for tests: it does what it is given as late as it may, in any order it may, and finds races.

Kernels and copies are jobs of two streams. None runs before somebody waits for it; then chance chooses among all orders that the
marks allow. Until a job has run, what it will write holds NaN. Whatever the order was, two jobs that touch the same bytes, one of
them writing, without a mark that orders one behind the other, are a race (vector clocks, as in thread sanitizers: Mattern 1989);
so are host bytes that change while a copy of them is on its way. `check` fails for every race and every copy from memory that was
not page-locked. What is ordered by the processor having waited counts as ordered for all of its threads.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch.utils._pytree import tree_map_only

from engine.hostmem import lazy
from engine.kernels.ops import Ops, Quant, Weight

Range = tuple[int, int]  # addresses [first, behind)
Ranges = Callable[[], list[Range]]
PAGE = 4096
POISON = -7777  # of integers


class Far(torch.Tensor):
    """A tensor of the device. torch's functions on it are kernels; the processor cannot see into it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(late: Late, plain: torch.Tensor) -> Far:
        far = torch.Tensor._make_subclass(Far, plain)
        far.plain, far.late = plain, late
        return far

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        fars = [a for a in args if isinstance(a, Far)]
        near = [a for a in args if isinstance(a, torch.Tensor) and not isinstance(a, Far) and a.dim()]
        if near:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        plain, late, more = tree_map_only(Far, lambda t: t.plain, args), fars[0].late, kwargs or {}
        written = [a for a, own in zip(args, func._schema.arguments, strict=False) if own.alias_info and own.alias_info.is_write]
        if written:
            late.kernel(lambda: func(*plain, **more), fars, written)
            return args[0]
        if any(returned.alias_info for returned in func._schema.returns):  # a view
            return tree_map_only(torch.Tensor, lambda t: Far.of(late, t), func(*plain, **more))
        if [str(returned.type) for returned in func._schema.returns] != ["Tensor"]:
            raise RuntimeError(f"{func}: the processor looks at what a kernel has not written yet")
        like = func(*tree_map_only(torch.Tensor, torch.zeros_like, plain), **more)
        return late.computed(like.shape, like.dtype, lambda: func(*plain, **more), fars)


@dataclass(eq=False)
class Job:
    stream: str
    index: int
    known: dict[str, int]  # of each stream, up to which job all happened before
    needs: list[Job]
    work: Callable[[], object]
    reads: Ranges
    writes: Ranges
    done: bool = False
    problem: Exception | None = None


@dataclass(frozen=True)
class LateMark:
    late: Late
    job: Job | None
    known: dict[str, int]

    def synchronize(self) -> None:
        self.late.reach(self)


@dataclass
class Late:
    """`engine.experts.streams.Device`. `room` bytes of memory; `fails()` true lets a copy fail."""

    seed: int = 0
    room: int = 1 << 40
    fails: Callable[[], bool] = lambda: False
    apart: bool = True
    races: list[str] = field(default_factory=list)
    unpinned: int = 0
    copied: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._chance = random.Random(self.seed)
        self._last: dict[str, Job] = {}
        self._pending: dict[str, list[Job]] = {"kernels": [], "copies": []}
        self._host: dict[str, int] = {}  # what the processor has waited for
        self._log: list[tuple[Range, bool, Job]] = []
        self._locked: list[Range] = []
        self._broken: Exception | None = None  # a kernel: said by whoever waits next
        self._held: list[torch.Tensor] = []  # page-locked memory, for good: an address means one thing only

    # --- engine.experts.streams.Device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        plain = poisoned(tuple(shape), dtype)
        if plain.nbytes > self.room:
            raise MemoryError("the made-up device is full")
        return Far.of(self, plain)

    def pinned(self, size: int) -> torch.Tensor:
        whole = torch.frombuffer(lazy(size), dtype=torch.uint8)[:size]
        self._held.append(whole)
        self.register(whole.data_ptr(), size)
        return whole

    def register(self, address: int, size: int) -> str:
        """As `locking.Lock`."""
        self._locked.append((address, address + size))
        return ""

    def copy(self, pairs, after: Iterable[LateMark] = ()) -> LateMark:
        moves, checks = [], []
        for to, source in pairs:
            assert to.shape == source.shape and to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
            near = source if not isinstance(source, Far) else to
            assert isinstance(to, Far) != isinstance(source, Far), "a copy crosses the link"
            begin, end = span(near)
            if not any(low <= begin and end <= high for low, high in self._locked):
                self.unpinned += 1
            moves.append((plain(to), plain(source)))
            if near is source:
                checks.append((near, digest(near)))
        fails = self.fails()

        def work() -> None:
            for source, before in checks:
                if digest(source) != before:
                    self.races.append("host memory changed before its copy was made")
            if fails:
                raise RuntimeError("the made-up link is broken")
            for to, source in moves:
                to.copy_(source)

        self.copied += 1
        sources, targets = [source for _, source in moves], [to for to, _ in moves]
        job = self._submit("copies", work, lambda: [*map(span, sources)], lambda: [*map(span, targets)], after)
        return LateMark(self, job, {**job.known, "copies": job.index})

    def mark(self) -> LateMark:
        with self._lock:
            job = self._last.get("kernels")
            return LateMark(self, job, {**job.known, "kernels": job.index} if job else {})

    def to_device(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for tensor in tensors:
            assert not isinstance(tensor, Far)
            now = tensor.clone()
            out.append(self.computed(now.shape, now.dtype, lambda now=now: now, []))
        return out

    def to_host(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for tensor in tensors:
            assert isinstance(tensor, Far), "it is in host memory already"
            to = poisoned(tuple(tensor.shape), tensor.dtype)
            self.kernel(lambda to=to, source=tensor.plain: to.copy_(source), [tensor], [to])
            out.append(to)
        self.mark().synchronize()
        return out

    def finish(self) -> None:
        with self._lock:
            for stream in ("kernels", "copies"):
                last = self._last.get(stream)
                if last:
                    self.reach(LateMark(self, last, {**last.known, stream: last.index}))

    def memory(self) -> tuple[int, int]:
        return self.room, self.room

    # --- jobs

    def computed(self, shape, dtype: torch.dtype, work: Callable[[], torch.Tensor], reads, ranges: Ranges | None = None) -> Far:
        """What `work` gives, on the device, once it has run. `ranges`: what it reads beside `reads`, known when it runs."""
        out = poisoned(tuple(shape), dtype)
        self.kernel(lambda: out.copy_(work()), reads, [out], ranges)
        return Far.of(self, out)

    def kernel(self, work, reads, writes, ranges: Ranges | None = None) -> None:
        reads, writes = [plain(t) for t in reads], [plain(t) for t in writes]
        more = ranges or (lambda: [])
        self._submit("kernels", work, lambda: [*map(span, reads), *more()], lambda: [*map(span, writes)])

    def _submit(self, stream: str, work, reads: Ranges, writes: Ranges, after: Iterable[LateMark] = ()) -> Job:
        with self._lock:
            last, marks = self._last.get(stream), list(after)
            known = dict(self._host)
            before = [{**last.known, stream: last.index}] if last else []
            for clock in (*before, *(mark.known for mark in marks)):
                for name, index in clock.items():
                    known[name] = max(known.get(name, 0), index)
            needs = [job for job in (last, *(mark.job for mark in marks)) if job is not None and not job.done]
            job = Job(stream, last.index + 1 if last else 1, known, needs, work, reads, writes)
            self._last[stream] = job
            self._pending[stream].append(job)
            return job

    def reach(self, mark: LateMark) -> None:
        with self._lock:
            if mark.job is not None:
                self._run_until(mark.job)
                if self._chance.random() < 0.3:
                    self._run_some()
            for name, index in mark.known.items():
                self._host[name] = max(self._host.get(name, 0), index)
            if not any(self._pending.values()):
                self._log = [entry for entry in self._log if entry[2].index > self._host.get(entry[2].stream, 0)]
            if mark.job is not None and mark.job.problem is not None:
                problem, mark.job.problem = mark.job.problem, None  # said once
                raise problem
            if self._broken is not None:
                problem, self._broken = self._broken, None
                raise problem

    def _run_until(self, job: Job) -> None:
        while not job.done:
            one = job
            while left := [need for need in one.needs if not need.done]:
                one = self._chance.choice(left)
            self._run(one)

    def _run_some(self) -> None:
        for stream in self._chance.sample(("kernels", "copies"), 2):
            waiting = self._pending[stream]
            if waiting:
                self._run_until(waiting[self._chance.randrange(len(waiting))])

    def _run(self, job: Job) -> None:
        reads, writes = job.reads(), job.writes()
        for touched, writing in ((reads, False), (writes, True)):
            for one in touched:
                self._look(one, writing, job)
        self._log += [(one, False, job) for one in reads] + [(one, True, job) for one in writes]
        try:
            with torch.inference_mode(job.stream == "kernels"):  # as in the threads that begin them, not in the one that waits
                job.work()
        except Exception as problem:
            if job.stream == "copies":
                job.problem = problem
            else:
                self._broken = problem
        job.done, job.needs = True, []
        job.work = job.reads = job.writes = None  # who was part of it may go
        self._pending[job.stream].remove(job)

    def _look(self, one: Range, writing: bool, job: Job) -> None:
        for (low, high), wrote, other in self._log:
            touches = low < one[1] and one[0] < high and (writing or wrote)
            if touches and other is not job and not _before(other, job) and not _before(job, other):
                self.races.append(f"{other.stream} {other.index} and {job.stream} {job.index} touch the same bytes")

    def check(self) -> None:
        self.finish()
        assert not self.races, self.races[:5]
        assert not self.unpinned, f"{self.unpinned} copies from memory that is not page-locked"


def _before(one: Job, other: Job) -> bool:
    return other.known.get(one.stream, 0) >= one.index


class LateOps:
    """`inner`'s arithmetic as kernels of the device; of banks they read the rows that were asked for, and no others."""

    def __init__(self, inner: Ops, late: Late) -> None:
        self._inner, self._late = inner, late
        self.name, self.numerics = inner.name, getattr(inner, "numerics", inner.name)

    def moe(self, x, ids, weights, gate_up, down, act, place=None) -> torch.Tensor:
        def work() -> torch.Tensor:
            return self._inner.moe(plain(x), plain(ids), plain(weights), near(gate_up), near(down), act, plain(place))

        return self._kernel(x.shape, work, (x, ids, weights), (gate_up, down), ids, place)

    def expert_rows(self, x, ids, gate_up, down, act, place=None) -> torch.Tensor:
        def work() -> torch.Tensor:
            return self._inner.expert_rows(plain(x), plain(ids), near(gate_up), near(down), act, plain(place))

        return self._kernel(x.shape, work, (x, ids), (gate_up, down), ids, place)

    def moe_merge(self, parts, ids, weights) -> torch.Tensor:
        def work() -> torch.Tensor:
            return self._inner.moe_merge(plain(parts), plain(ids), plain(weights))

        return self._late.computed((parts.shape[0], parts.shape[2]), torch.float32, work, (parts, ids, weights))

    def linear(self, x, weight) -> torch.Tensor:
        return self._late.computed(
            (x.shape[0], weight.shape[0]), torch.float32, lambda: self._inner.linear(plain(x), near(weight)), (x,)
        )

    def _kernel(self, shape, work, small, banks, ids, place) -> Far:
        data = [weight.data if isinstance(weight, Quant) else weight for weight in banks]
        tensors = [t for t in (*small, place, *data) if t is not None]
        assert all(isinstance(t, Far) for t in tensors), "a kernel of the device was given a tensor of the host"

        def rows() -> list[Range]:
            asked = np.unique(plain(ids).numpy())
            slots = asked if place is None else plain(place).numpy()[asked]
            return [span(plain(d)[slot]) for d in data for slot in slots.tolist()]

        reads = [t for t in (*small, place) if t is not None]
        return self._late.computed(shape, torch.float32, work, reads, rows)


class Border:
    """`nn.experts.Experts` for a decoder in host memory: its layer calls go to experts on the device and come back."""

    def __init__(self, experts, late: Late) -> None:
        self._experts, self._late = experts, late

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = self._experts.run(layer, *self._late.to_device(x, ids, weights))
        return self._late.to_host(out)[0]


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.plain if isinstance(tensor, Far) else tensor


def near(weight: Weight) -> Weight:
    return Quant(plain(weight.data), weight.type, weight.cols) if isinstance(weight, Quant) else plain(weight)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    plain = torch.empty(shape, dtype=dtype)
    if dtype is torch.uint8:
        return plain.fill_(0xFF)  # NaN as a float16 scale
    return plain.fill_(float("nan") if dtype.is_floating_point else POISON)


def span(tensor: torch.Tensor) -> Range:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.view(torch.uint8).numpy())
