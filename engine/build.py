"""From a configuration to the parts the engine process runs: kernels, model, memory plan, prefix cache."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.cores import physical_cores
from engine.experts.filepool import Pack
from engine.experts.pack import PackError
from engine.experts.recording import Recording
from engine.experts_control import ExpertParts
from engine.fingerprint import checkpoint_parts
from engine.grammar import GrammarError, Grammars, Vocabulary
from engine.hostmem import available_bytes
from engine.kernels.ops import Ops
from engine.limits import Limits
from engine.memory import CachePlan, TooLittleMemory, gib, plan_cache
from engine.models.errors import ModelError
from engine.models.load import LoadedModel, load_model
from engine.models.spec import ModelSpec, MoeSpec
from engine.nn.batch import Cache, allocate_cache
from engine.nn.decoder import Decoder
from engine.nn.experts import Experts, InPlace, expert_banks
from engine.packing import open_pack, slot_counts, stream_experts
from engine.plan import file_shape, host_shape, place_loaded
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
from engine.text.tokenizer import TokenizerError, load_tokenizer

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


def build(config: EngineConfig, progress: Progress) -> Parts:
    """Load the model and allocate its caches. Raises BuildError."""
    ops = choose_kernels(config.kernels, config.threads)
    kernels = getattr(ops, "numerics", ops.name)  # cached tokens belong to the kernels whose bits they are
    try:
        pack = open_pack(Path(config.experts_pack).expanduser(), config.model, ops) if config.experts_pack else None
        loaded = load_model(config.model, ops, progress, experts=pack is None)
        available = available_bytes()
        if available is None:
            raise BuildError("the memory of this machine cannot be measured: /proc/meminfo is not readable")
        available = max(0, available - _others(available))
        slots = slot_counts(pack, config.expert_bytes, available) if pack else []
        slot_bytes = sum(count * pool.expert_bytes for count, pool in zip(slots, pack.pools if pack else (), strict=True))
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
    progress(1.0, "allocating the cache")
    try:
        cache, plan = make_cache(loaded.spec, plan, ops)
    except MemoryError as problem:
        text = f"KV cache: {gib(plan.total_bytes)} cannot be allocated ({gib(available)} seemed available): lower --kv-memory"
        raise BuildError(text) from problem
    experts = streamed(loaded, ops, plan, pack, slots, config.expert_policy, progress) if pack else in_memory(loaded, ops, plan)
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
    prefix = make_prefix(config, cache, plan, kernels)
    grammars = Grammars(lambda: read_vocabulary(config.model, loaded.spec))
    try:
        grammars.warm()
    except GrammarError as problem:
        log.warning("requests with a grammar will be refused: %s", problem)
    return Parts(lambda batch: decoder.forward(batch, cache), prefix, limits, model, grammars, experts, plan.wanted_context)


def _others(available: int) -> int:
    """Memory that seems available and was promised by engines that run already."""
    size = promised()
    if size:
        log.info(log_line("memory promised to other engines", size=gib(size), available=gib(available)))
    return size


def make_cache(spec: ModelSpec, plan: CachePlan, ops: Ops) -> tuple[Cache, CachePlan]:
    """The tensors, with room to grow where address space allows. Raises MemoryError."""
    try:
        return allocate_cache(spec, plan.most_pages, plan.most_slots, ops.kv_dtype), plan
    except MemoryError as problem:
        log.warning(log_line("the cache cannot grow while the engine runs", why=str(problem)))
        plan = replace(plan, most_pages=plan.pages, most_slots=plan.slots)
        return allocate_cache(spec, plan.pages, plan.slots, ops.kv_dtype), plan


def in_memory(loaded: LoadedModel, ops: Ops, plan: CachePlan) -> ExpertParts | None:
    """Experts computed where they lie; None for a model that has none."""
    banks = expert_banks(loaded.spec, loaded.weights)
    if not banks:
        return None
    return _expert_parts(InPlace(banks, ops), place_loaded(loaded, ops, plan, host_shape(banks)))


def streamed(
    loaded: LoadedModel, ops: Ops, plan: CachePlan, pack: Pack, slots: Sequence[int], policy: str, progress: Progress
) -> ExpertParts:
    """Experts read from a pack into slots, which are full when this returns."""
    progress(0.0, "reading experts")
    routers = [loaded.weights[f"{i}.moe.router"] for i, layer in enumerate(loaded.spec.layers) if isinstance(layer.ffn, MoeSpec)]
    executor, rate = stream_experts(pack, ops, slots, policy, routers)
    size, done = executor.capacity * executor.slot_bytes, 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        progress(min(1.0, done / size), "reading experts")

    executor.preload(count)
    return _expert_parts(executor, place_loaded(loaded, ops, plan, file_shape(pack, size, rate)))


def _expert_parts(executor: Experts, found: dict[str, object]) -> ExpertParts:
    log.info(log_line("experts", mode=found["mode"], pool=found["pool_bytes"], reason=found["reason"]))
    recording = Recording(executor, int(found["layers"]), int(found["experts"]))
    return ExpertParts(recording, found)


def read_vocabulary(path: str, spec: ModelSpec) -> Vocabulary:
    """The checkpoint's vocabulary as bytes. Raises GrammarError when it has no tokenizer."""
    try:
        tokenizer = load_tokenizer(path)
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
    if name != "reference":
        try:
            ops = importlib.import_module("engine.kernels.cpu").CpuOps(threads)
            torch.set_num_threads(1)
            log.info(log_line("kernels", isa=ops.isa, threads=ops.threads, bound=ops.bound))
            return ops
        except ImportError as problem:
            if name == "cpu":
                raise BuildError(f"the native kernels are not usable ({problem}): build them with ops/build_native") from problem
            log.warning(
                "the native kernels are not usable (%s): the slow reference kernels are used; run ops/build_native", problem
            )
    torch.set_num_threads(threads)
    return importlib.import_module("engine.kernels.reference").ReferenceOps()


def make_prefix(config: EngineConfig, cache: Cache, plan: CachePlan, kernels: str) -> PrefixCache:
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
        text_keys=text_keys(config.model),
    )


def text_keys(model: str) -> TextKeys | None:
    """What each token spells; None for a checkpoint without a readable tokenizer, whose prompts then match by token only."""
    try:
        tokenizer = load_tokenizer(model)
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
