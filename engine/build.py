"""From a configuration to the parts the engine process runs: kernels, model, memory plan, prefix cache."""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig, in_place_wanted
from engine.cores import physical_cores
from engine.experts.budget import Impossible
from engine.experts.filepool import Pack
from engine.experts.inplace import MappedExperts
from engine.experts.layers import spans
from engine.experts.locking import Locked, lock_banks
from engine.experts.pack import PackError
from engine.experts.recording import Recording
from engine.experts_control import ExpertParts
from engine.fingerprint import checkpoint_parts
from engine.grammar import GrammarError, Grammars, Vocabulary
from engine.hostmem import available_bytes
from engine.kernels.ops import Ops, Weight
from engine.limits import Limits
from engine.mapped import MappedFile, watched
from engine.memory import CachePlan, TooLittleMemory, gib, plan_cache
from engine.models.errors import ModelError
from engine.models.load import LoadedModel, load_model
from engine.models.spec import ModelSpec, MoeSpec
from engine.nn.batch import Cache, allocate_cache
from engine.nn.decoder import Decoder
from engine.nn.experts import Experts, InPlace, expert_banks
from engine.numa import describe
from engine.packing import fits_in_place, open_pack, slot_counts, stream_experts
from engine.plan import FastMemory, Placed, file_shape, host_shape, place_loaded, read_rate
from engine.prefix.base import PrefixCache
from engine.prefix.cache import RadixCache
from engine.prefix.disk import DiskConfig
from engine.prefix.files import Busy, identity
from engine.prefix.states import TensorStorage
from engine.prefix.store import DiskStore
from engine.prefix.textkeys import TextKeys
from engine.promises import promised
from engine.protocol import log_line
from engine.runner import Forward
from engine.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from engine.tiers import Kernels, Source, Ways, read_banks, run_groups

log = logging.getLogger(__name__)

Progress = Callable[[float, str], None]


class BuildError(Exception):
    """The engine cannot start. The message is one line for the user: cause and remedy."""


@dataclass(frozen=True)
class Parts:
    """What the worker's loop needs; `model` describes it to users."""

    forward: Forward
    prefix: PrefixCache
    limits: Limits
    model: dict[str, object]
    grammars: Grammars | None = None
    experts: ExpertParts | None = None  # None for a model without experts
    wanted_context: int = 0  # tokens one sequence may hold once there is memory for it; 0 = as many as now
    mapped: int = 0  # bytes of weights that lie in mapped files: the system counts them as available


def build(config: EngineConfig, progress: Progress) -> Parts:
    """Load the model and allocate its caches. Raises BuildError."""
    ops = choose_kernels(config.kernels, config.threads)
    kernels = getattr(ops, "numerics", ops.name)  # cached tokens belong to the kernels whose bits they are
    try:
        pack = open_pack(Path(config.experts_pack).expanduser(), config.model, ops) if config.experts_pack else None
        began = time.monotonic()
        with copying_threads(getattr(ops, "threads", 1)):
            # beside a fast memory experts are copied from where they are: page-locked memory, not a file
            loaded = load_model(config.model, ops, progress, experts=pack is None, mapped=not config.fast_bytes)
        log.info(log_line("weights", mapped=gib(loaded.mapped), of=gib(loaded.info.bytes), s=round(time.monotonic() - began, 3)))
        available = _available(ops, loaded.mapped)
        fast = fast_memory(config)
        available -= fast.size if fast else 0
        whole = pack is not None and in_place_wanted(config) and fits_in_place(pack, ops, available)
        slots = slot_counts(pack, config.expert_bytes, available) if pack and not whole else []
        pools = pack.pools if slots else ()
        slot_bytes = sum(count * pool.expert_bytes for count, pool in zip(slots, pools, strict=True))
        slot_bytes += pack.expert_bytes if whole else 0
        if fast and available <= slot_bytes:
            raise BuildError(f"--fast-memory asks for {gib(fast.size)}, {gib(available + fast.size)} are available: lower it")
        plan = plan_cache(
            loaded.spec,
            ops.kv_dtype,
            available - slot_bytes,
            max_context=config.max_context,
            kv_bytes=config.kv_bytes,
            max_running=config.max_running,
            ceiling=available,
        )
    except (ModelError, TooLittleMemory, PackError) as problem:
        raise BuildError(str(problem)) from problem
    except torch.OutOfMemoryError as problem:
        raise BuildError(
            "the weights do not fit into the device's memory: take a smaller quantization or --kernels cpu"
        ) from problem
    progress(1.0, "allocating the cache")
    try:
        cache, plan = make_cache(loaded.spec, plan, ops)
    except MemoryError as problem:
        text = f"KV cache: {gib(plan.total_bytes)} cannot be allocated ({gib(available)} seemed available): lower --kv-memory"
        raise BuildError(text) from problem
    try:
        placing = Placing(config, loaded, ops, plan, pack, slots, progress)
        experts, files = packed_in_place(placing) if whole else (place_experts(placing, fast), ())
    except (Impossible, OSError) as problem:
        raise BuildError(str(problem)) from problem
    except MemoryError as problem:
        raise BuildError(f"experts: {problem}: lower --fast-memory or --expert-memory") from problem
    decoder = Decoder(loaded.spec, loaded.weights, ops, experts.recording if experts else None)
    limits = Limits(
        max_context=plan.max_context,
        vocab=loaded.spec.vocab,
        max_running=plan.slots,
        max_queue=config.max_queue,
        prefill_chunk=config.prefill_chunk,
    )
    _log_plan(plan, kernels, available)
    model = {
        "family": loaded.spec.family,
        "layers": len(loaded.spec.layers),
        "kernels": kernels,
        "cache_bytes": plan.total_bytes,
        **msgspec.to_builtins(loaded.info),
    }
    tokenizer = functools.cache(lambda: load_tokenizer(config.model))  # read once, for both who ask what a token spells
    prefix = make_prefix(config, cache, plan, kernels, tokenizer)
    grammars = Grammars(lambda: read_vocabulary(tokenizer, loaded.spec))
    try:
        grammars.warm()
    except GrammarError as problem:
        log.warning("requests with a grammar will be refused: %s", problem)
    forward = watched(lambda batch: decoder.forward(batch, cache), (*loaded.files, *files))
    mapped = loaded.mapped + (pack.expert_bytes if whole else 0)
    return Parts(forward, prefix, limits, model, grammars, experts, plan.wanted_context, mapped)


def _available(ops: Ops, mapped: int) -> int:
    """Memory for caches where the kernels compute, beside `mapped` bytes of files. Raises BuildError."""
    if ops.device.type != "cpu":
        return torch.cuda.mem_get_info(ops.device)[0]
    available = available_bytes(mapped=mapped)
    if available is None:
        raise BuildError("the memory of this machine cannot be measured: /proc/meminfo is not readable")
    return max(0, available - _others(available))


def _others(available: int) -> int:
    """Memory that seems available and was promised by engines that run already."""
    size = promised()
    if size:
        log.info(log_line("memory promised to other engines", size=gib(size), available=gib(available)))
    return size


def make_cache(spec: ModelSpec, plan: CachePlan, ops: Ops) -> tuple[Cache, CachePlan]:
    """The tensors, with room to grow where address space allows. Raises MemoryError."""
    if ops.device.type != "cpu":  # its memory is taken at once: there is no room to grow into
        plan = replace(plan, most_pages=plan.pages, most_slots=plan.slots)
        return allocate_cache(spec, plan.pages, plan.slots, ops.kv_dtype, ops.device), plan
    try:
        return allocate_cache(spec, plan.most_pages, plan.most_slots, ops.kv_dtype), plan
    except MemoryError as problem:
        log.warning(log_line("the cache cannot grow while the engine runs", why=str(problem)))
        plan = replace(plan, most_pages=plan.pages, most_slots=plan.slots)
        return allocate_cache(spec, plan.pages, plan.slots, ops.kv_dtype), plan


@dataclass(frozen=True)
class Placing:
    """What decides where experts lie. `slots` of each pool of `pack`, in host memory."""

    config: EngineConfig
    loaded: LoadedModel
    ops: Ops
    cache: CachePlan
    pack: Pack | None
    slots: Sequence[int]
    progress: Progress

    @property
    def host_bytes(self) -> int:
        """Host memory for experts that come from the pack."""
        return sum(count * pool.expert_bytes for count, pool in zip(self.slots, self.pack.pools, strict=True)) if self.pack else 0

    @property
    def routers(self) -> list[Weight]:
        layers = enumerate(self.loaded.spec.layers)
        return [self.loaded.weights[f"{i}.moe.router"] for i, layer in layers if isinstance(layer.ffn, MoeSpec)]


def fast_memory(config: EngineConfig) -> FastMemory | None:
    """Raises BuildError."""
    if not config.fast_bytes:
        return None
    if not config.fast_link:
        raise BuildError("--fast-memory emulates a fast memory behind a link: say how fast it is, e.g. --fast-link 8G a second")
    return FastMemory(config.fast_bytes, float(config.fast_link), config.pin_bytes)


def place_experts(what: Placing, fast: FastMemory | None) -> ExpertParts | None:
    """None for a model that has none. Raises Impossible, OSError, MemoryError."""
    if fast is not None and any(isinstance(layer.ffn, MoeSpec) for layer in what.loaded.spec.layers):
        return beside_fast_memory(what, fast)
    return streamed(what) if what.pack else in_memory(what)


def in_memory(what: Placing) -> ExpertParts | None:
    """Experts computed where they lie."""
    banks = expert_banks(what.loaded.spec, what.loaded.weights)
    if not banks:
        return None
    placed = place_loaded(what.loaded, what.ops, what.cache, host_shape(banks), forced=what.config.placement or None)
    return _expert_parts(InPlace(banks, what.ops), placed)


def packed_in_place(what: Placing) -> tuple[ExpertParts, tuple[MappedFile, ...]]:
    executor = MappedExperts(what.pack, what.ops)
    shape = replace(host_shape(executor.banks), kind=what.pack.stored_as, packed=True)
    placed = place_loaded(what.loaded, what.ops, what.cache, shape, forced=what.config.placement or None)
    return _expert_parts(executor, placed), (executor.file,)


def streamed(what: Placing) -> ExpertParts:
    """Experts read from a pack into slots, which are full when this returns."""
    what.progress(0.0, "reading experts")
    executor, rate = stream_experts(what.pack, what.ops, what.slots, what.config.expert_policy, what.routers)
    try:
        size = executor.capacity * executor.slot_bytes
        placed = place_loaded(
            what.loaded, what.ops, what.cache, file_shape(what.pack, size, rate), forced=what.config.placement or None
        )
        if placed.found.mode != "stream":
            raise Impossible(f"{placed.found.mode}: start without --experts-pack, everything is loaded then")
        executor.preload(_counted(what.progress, size))
    except BaseException:
        executor.close()
        raise
    return _expert_parts(executor, placed)


def beside_fast_memory(what: Placing, fast: FastMemory) -> ExpertParts:
    """Experts placed by groups of layers; all slots are full when this returns."""
    what.progress(0.0, "placing experts")
    pack, ops, config = what.pack, what.ops, what.config
    loaded = {} if pack else dict(enumerate(expert_banks(what.loaded.spec, what.loaded.weights)))
    shape = file_shape(pack, what.host_bytes, read_rate(pack)) if pack else host_shape(list(loaded.values()))
    placed = place_loaded(what.loaded, ops, what.cache, shape, fast, config.placement or None)
    groups = placed.found.groups
    held = [n for group in groups if group.mode != "stream" for n in group.layers]
    size = sum(group.slots for group in groups) * shape.expert_bytes + (len(held) * placed.load.layer_bytes if pack else 0)
    count = _counted(what.progress, size)
    banks = loaded or read_banks(pack, held, count)
    ways = Ways(placed.hardware.rates, shape.disk_rate, config.expert_policy, fast.link)
    copied = [banks[n] for group in groups if group.mode in ("offload", "hybrid") for n in group.layers]
    locked = lock_banks(copied, placed.hardware.lockable)
    executor = run_groups(groups, Source(banks, pack, what.routers), Kernels(ops), ways)
    executor.preload(count)
    return _expert_parts(executor, placed, locked)


def _counted(progress: Progress, size: int) -> Callable[[int], None]:
    done = 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        progress(min(1.0, done / max(1, size)), "reading experts")

    return count


def _expert_parts(executor: Experts, placed: Placed, locked: Locked | None = None) -> ExpertParts:
    found = placed.status() | (locked or Locked()).status()
    log.info(log_line("experts", mode=found["mode"], pool=found["pool_bytes"], reason=found["reason"]))
    if len(placed.found.groups) > 1:
        for group in placed.found.groups:
            log.info(log_line("experts of layers", layers=spans(group.layers), mode=group.mode, reason=group.reason))
    if placed.found.pin_short:
        locked, short = gib(placed.hardware.lockable), gib(placed.found.pin_short)
        log.warning(log_line("page-locked memory is short", budget=locked, short=short, hint="layers at both ends lie elsewhere"))
    recording = Recording(executor, int(found["layers"]), int(found["experts"]))
    return ExpertParts(recording, found)


def read_vocabulary(read: Callable[[], Tokenizer], spec: ModelSpec) -> Vocabulary:
    """The checkpoint's vocabulary as bytes. Raises GrammarError when it has no tokenizer."""
    try:
        tokenizer = read()
    except TokenizerError as problem:
        raise GrammarError(f"a grammar needs the model's tokenizer: {problem}") from problem
    tokens = [tokenizer.token_bytes(i) for i in range(spec.vocab)]
    eos = next(iter([*tokenizer.eos_ids, *spec.eos_ids]), 0)
    return Vocabulary(tokens, sorted(tokenizer.special_ids), eos, tokenizer.encode_plain)


def choose_kernels(name: str, threads: int) -> Ops:
    """`auto` takes the native kernels when they are built, else the reference ones, aloud. Raises BuildError.

    Sets torch's own thread count: beside the native pool its threads would only fight for the cores.
    """
    threads = threads or len(physical_cores())
    if name == "cuda":
        return _cuda_kernels()
    if name != "reference":
        try:
            ops = importlib.import_module("engine.kernels.cpu").CpuOps(threads)
            torch.set_num_threads(1)
            nodes = {"memory_nodes": nodes} if (nodes := describe()) else {}
            log.info(log_line("kernels", isa=ops.isa, threads=ops.threads, bound=ops.bound, **nodes))
            return ops
        except ImportError as problem:
            if name == "cpu":
                raise BuildError(f"the native kernels are not usable ({problem}): build them with ops/build_native") from problem
            log.warning(
                "the native kernels are not usable (%s): the slow reference kernels are used; run ops/build_native", problem
            )
    torch.set_num_threads(threads)
    return importlib.import_module("engine.kernels.reference").ReferenceOps()


def _cuda_kernels() -> Ops:
    try:
        found = importlib.import_module("engine.kernels.cuda.ops")
        ops = found.CudaOps()
    except ImportError as problem:
        raise BuildError(f"the cuda kernels need triton ({problem}): install it with `ops/env.py run --gpu yes`") from problem
    except importlib.import_module("engine.kernels.cuda.device").DeviceError as problem:
        raise BuildError(str(problem)) from problem
    log.info(log_line("kernels", device=str(ops.device), numerics=ops.numerics))
    return ops


@contextmanager
def copying_threads(threads: int) -> Iterator[None]:
    """torch copies weights with this many threads inside: one alone touches fresh memory at a fraction of its rate. Its threads
    sleep afterwards, as `choose_kernels` left them."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_prefix(
    config: EngineConfig, cache: Cache, plan: CachePlan, kernels: str, tokenizer: Callable[[], Tokenizer]
) -> PrefixCache:
    """The cache in memory and, where `kv_disk` names a usable directory, on disk."""
    storage = TensorStorage(cache)
    disk, store = None, None
    if config.kv_disk:
        daily, ttl = config.kv_disk_daily_bytes, float(config.kv_disk_ttl_s)
        disk = DiskConfig(budget=config.kv_disk_bytes, daily_bytes=daily, ttl_s=ttl)
        try:
            parts = {**checkpoint_parts(config.model), "kernels": kernels, "layout": storage.layout()}
            store = DiskStore(Path(config.kv_disk).expanduser(), identity(parts))
        except (OSError, Busy) as problem:
            why = problem.strerror if isinstance(problem, OSError) else str(problem)
            hint = f"nothing outlives a restart until {config.kv_disk} can be used"
            log.warning(log_line("kv cache disk error", error=why, hint=hint))
    return RadixCache(
        storage,
        pages=plan.pages,
        slots=plan.slots,
        most_pages=plan.most_pages,
        most_slots=plan.most_slots,
        state_budget=plan.state_budget,
        disk=disk if store else None,
        store=store,
        text_keys=text_keys(tokenizer),
    )


def text_keys(read: Callable[[], Tokenizer]) -> TextKeys | None:
    """What each token spells; None for a checkpoint without a readable tokenizer, whose prompts then match by token only."""
    try:
        tokenizer = read()
    except ValueError as problem:
        log.warning(log_line("prompts are matched by token only", why=str(problem)))
        return None
    specials = tokenizer.special_ids
    return TextKeys([None if i in specials else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)])


def _log_plan(plan: CachePlan, kernels: str, available: int) -> None:
    log.info(
        log_line(
            "memory",
            kernels=kernels,
            available=gib(available),
            kv=gib(plan.kv_bytes),
            pages=plan.pages,
            states=gib(plan.slots * plan.slot_bytes),
            saved_states=gib(plan.state_budget),
            max_context=plan.max_context,
            max_running=plan.slots,
        )
    )
