"""From a configuration to the parts the engine process runs: kernels, model, memory plan, prefix cache."""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine import tensors
from engine.config import EngineConfig, in_place_wanted, without_effect
from engine.cores import physical_cores
from engine.experts.budget import Impossible
from engine.experts.cuda import device_of
from engine.experts.devices import find_devices
from engine.experts.filepool import Pack
from engine.experts.pack import PackError
from engine.experts.pool import data_of
from engine.experts.streams import Device
from engine.experts_control import ExpertParts
from engine.fingerprint import checkpoint_parts
from engine.grammar import GrammarError, Grammars, Vocabulary
from engine.hostmem import available_bytes
from engine.kernels.ops import Ops, Weight
from engine.lean import device_full, threads_of_torch, torch, use_threads
from engine.limits import Limits
from engine.mapped import watched
from engine.memory import CachePlan, TooLittleMemory, gib, plan_cache
from engine.models.errors import ModelError
from engine.models.load import load_model, open_checkpoint
from engine.models.spec import ModelSpec
from engine.nn.batch import Cache, allocate_cache
from engine.nn.decoder import Decoder
from engine.numa import describe
from engine.packing import SHARE, fits_in_place, open_pack, slot_counts
from engine.placing import Held, Placing, Progress, packed_in_place, place_experts
from engine.plan import FastMemory, make_plan
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
from engine.tensors import Library, copiers, library_of

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


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
    library: Library = torch  # of the tensors that `forward` takes
    later: Sequence[Callable[[], object]] = ()  # what a request might have to wait for, to be done when none is there


def build(config: EngineConfig, progress: Progress) -> Parts:
    """Load the model and allocate its caches. Raises BuildError."""
    for line in without_effect(config):
        log.warning(line)
    ops = choose_kernels(config.kernels, config.threads)
    device = device_of(ops)
    library = tensors if ops.name == "cpu" else torch
    kernels = getattr(ops, "numerics", ops.name)  # cached tokens belong to the kernels whose bits they are
    try:
        pack = open_pack(Path(config.experts_pack).expanduser(), config.model, ops) if config.experts_pack else None
        held = held_by(config, ops, device, pack)
        began = time.monotonic()
        with copying_threads(getattr(ops, "threads", 1)):
            # beside a fast memory experts are copied from where they are: page-locked memory, not a file
            loaded = load_model(
                config.model,
                ops,
                progress,
                experts=pack is None,
                mapped=not config.fast_bytes,
                host=held in ("host", "one memory"),
                library=library,
            )
        log.info(log_line("weights", mapped=gib(loaded.mapped), of=gib(loaded.info.bytes), s=round(time.monotonic() - began, 3)))
        available = _available(device, loaded.mapped)
        fast = fast_memory(config) if device is None else slots_on(device, config, held, available)
        available -= fast.size if fast else 0
        whole = pack is not None and in_place_wanted(config) and fits_in_place(pack, ops, available)
        host = available if device is None else _available(None, loaded.mapped)
        slots = slot_counts(pack, config.expert_bytes, host) if pack and not whole else []
        pools = pack.pools if slots and device is None else ()  # a device has its caches elsewhere
        slot_bytes = sum(count * pool.expert_bytes for count, pool in zip(slots, pools, strict=False))
        slot_bytes += pack.expert_bytes if whole else 0
        if not computes_here(loaded.weights, fast, pack, whole):
            library, loaded = torch, loaded.in_torch()
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
    except device_full() as problem:
        raise BuildError(
            "the weights do not fit into the device's memory: take a smaller quantization or --kernels cpu"
        ) from problem
    progress(1.0, "allocating the cache")
    try:
        cache, plan = make_cache(loaded.spec, plan, ops, library)
    except MemoryError as problem:
        text = f"KV cache: {gib(plan.total_bytes)} cannot be allocated ({gib(available)} seemed available): lower --kv-memory"
        raise BuildError(text) from problem
    try:
        placing = Placing(config, loaded, ops, plan, pack, slots, progress, held, device)
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
    tokenizer = functools.cache(lambda: tokenizer_of(config.model))  # read once, for both who ask what a token spells
    keys = text_keys(config.model, tokenizer)
    prefix = make_prefix(config, cache, plan, kernels, keys)
    grammars = Grammars(lambda: read_vocabulary(tokenizer, loaded.spec))
    forward = watched(lambda batch: decoder.forward(batch, cache), (*loaded.files, *files))
    mapped = loaded.mapped + (pack.expert_bytes if whole else 0)
    later = (keys.warm, functools.partial(warm, grammars))
    return Parts(forward, prefix, limits, model, grammars, experts, plan.wanted_context, mapped, library, later)


def warm(grammars: Grammars) -> None:
    try:
        grammars.warm()
    except GrammarError as problem:
        log.warning("requests with a grammar will be refused: %s", problem)


def computes_here(weights: Mapping[str, Weight], fast: FastMemory | None, pack: Pack | None, whole: bool) -> bool:
    """Whether nothing but the native kernels handles these weights: experts that move between memories are torch's."""
    return fast is None and (pack is None or whole) and library_of(data_of(weights["embed"])) is tensors


def held_by(config: EngineConfig, ops: Ops, device: Device | None, pack: Pack | None) -> Held:
    """Where the experts of a checkpoint are loaded to, before any is read. Raises BuildError, ModelError, TooLittleMemory."""
    if pack is not None or device is None:
        return "pack" if pack else "kernels"
    if any(each.unified for each in find_devices()):
        return "one memory"
    wanted = {"max_context": config.max_context, "kv_bytes": config.kv_bytes, "forced": config.placement or None}
    plan = make_plan(open_checkpoint(config.model), ops, **wanted)
    if plan.placement is None:
        raise BuildError(plan.refusal)
    return "kernels" if plan.placement.mode == "resident" and not config.fast_bytes else "host"


def slots_on(device: Device, config: EngineConfig, held: Held, free: int) -> FastMemory | None:
    """Of the device's free memory, `--fast-memory` or a share is for slots; None where experts are computed where they lie."""
    if held not in ("host", "pack"):
        return None
    return FastMemory(config.fast_bytes or int(free * SHARE), 0.0, config.pin_bytes, device)


def _available(device: Device | None, mapped: int) -> int:
    """Memory for caches where the kernels compute, beside `mapped` bytes of files. Raises BuildError."""
    if device is not None:
        return device.memory()[0]
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


def make_cache(spec: ModelSpec, plan: CachePlan, ops: Ops, library: Library) -> tuple[Cache, CachePlan]:
    """The tensors, with room to grow where address space allows. Raises MemoryError."""
    if ops.device.type != "cpu":  # its memory is taken at once: there is no room to grow into
        plan = replace(plan, most_pages=plan.pages, most_slots=plan.slots)
        return allocate_cache(spec, plan.pages, plan.slots, ops.kv_dtype, ops.device), plan
    try:
        return allocate_cache(spec, plan.most_pages, plan.most_slots, ops.kv_dtype, library=library), plan
    except MemoryError as problem:
        log.warning(log_line("the cache cannot grow while the engine runs", why=str(problem)))
        plan = replace(plan, most_pages=plan.pages, most_slots=plan.slots)
        return allocate_cache(spec, plan.pages, plan.slots, ops.kv_dtype, library=library), plan


def fast_memory(config: EngineConfig) -> FastMemory | None:
    """Raises BuildError."""
    if not config.fast_bytes:
        return None
    if not config.fast_link:
        raise BuildError("--fast-memory emulates a fast memory behind a link: say how fast it is, e.g. --fast-link 8G a second")
    return FastMemory(config.fast_bytes, float(config.fast_link), config.pin_bytes)


def tokenizer_of(model: str) -> Tokenizer:
    """Raises TokenizerError."""
    from engine.text.tokenizer import load_tokenizer  # not before somebody asks

    return load_tokenizer(model)


def read_vocabulary(read: Callable[[], Tokenizer], spec: ModelSpec) -> Vocabulary:
    """The checkpoint's vocabulary as bytes. Raises GrammarError when it has no tokenizer."""
    try:
        tokenizer = read()
    except ValueError as problem:  # TokenizerError
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
            use_threads(1)
            nodes = {"memory_nodes": nodes} if (nodes := describe()) else {}
            log.info(log_line("kernels", isa=ops.isa, threads=ops.threads, bound=ops.bound, **nodes))
            return ops
        except ValueError as problem:  # said by the module
            raise BuildError(f"--threads {threads}: {problem}; 0 takes one for each core") from problem
        except ImportError as problem:
            if name == "cpu":
                raise BuildError(f"the native kernels are not usable ({problem}): build them with ops/build_native") from problem
            log.warning(
                "the native kernels are not usable (%s): the slow reference kernels are used; run ops/build_native", problem
            )
    use_threads(threads)
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
    """Weights are copied with this many threads inside: one alone touches fresh memory at a fraction of its rate. torch's sleep
    afterwards, as `choose_kernels` left them."""
    before = threads_of_torch()
    use_threads(max(before, threads))
    try:
        with copiers.threads(threads):
            yield
    finally:
        use_threads(before)


def make_prefix(config: EngineConfig, cache: Cache, plan: CachePlan, kernels: str, keys: TextKeys) -> PrefixCache:
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
        text_keys=keys,
    )


def text_keys(model: str, read: Callable[[], Tokenizer]) -> TextKeys:
    """What each token spells, read when first asked for. Without a readable tokenizer prompts match by token only."""

    def spelling() -> Sequence[bytes | None]:
        from engine.text.spelling import read_spelling  # not before somebody asks

        try:
            return read_spelling(model, read)
        except ValueError as problem:
            log.warning(log_line("prompts are matched by token only", why=str(problem)))
            return []

    return TextKeys(spelling)


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
