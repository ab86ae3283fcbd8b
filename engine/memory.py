"""The memory budget: how many KV pages and recurrent states the engine may hold on this machine.

Pure arithmetic over a `ModelSpec`; measuring what is available is `engine.hostmem`, allocating is `engine.nn.batch`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from engine.lean import torch
from engine.models.spec import AttentionSpec, DeltaNetSpec, LatentSpec, ModelSpec
from engine.nn.batch import PAGE

log = logging.getLogger(__name__)

DEFAULT_SHARE = 0.25  # of what is available after loading: leaves room for the page cache, the gateway and the user's editor
CEILING_SHARE = 0.75  # of what is available: what a context the user asked for by number may take
MIN_CONTEXT = 512  # a smaller context holds no agent's system prompt
MAX_PAGES = 1 << 16  # 4M tokens: more only grows the bookkeeping of tiny models
STATE_SHARE = 0.5  # of the cache of a hybrid model: saved states, without which its pages cannot be resumed
FLOAT32 = 4  # bytes; recurrent states are always float32


class TooLittleMemory(Exception):
    """The smallest useful cache does not fit. The message says what is needed and what there is."""


@dataclass(frozen=True)
class CachePlan:
    """`pages` of PAGE tokens, `slots` states of running sequences, `state_budget` bytes of saved states.

    `most_pages` and `most_slots` may be reached while the engine runs; `wanted_context` is what a sequence may hold then.
    """

    pages: int
    slots: int
    state_budget: int
    max_context: int  # tokens one sequence may hold
    page_bytes: int
    slot_bytes: int
    most_pages: int
    most_slots: int
    wanted_context: int

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.slots * self.slot_bytes + self.state_budget


def page_bytes(spec: ModelSpec, kv_dtype: torch.dtype) -> int:
    """Bytes of one KV page over all attention layers: keys and values, or the latent both are made of."""
    both = sum(2 * m.kv_heads * m.head_dim for m in _mixers(spec) if isinstance(m, AttentionSpec))
    latent = sum(m.row for m in _mixers(spec) if isinstance(m, LatentSpec))
    return (both + latent) * PAGE * kv_dtype.itemsize


def slot_bytes(spec: ModelSpec) -> int:
    """Bytes of the recurrent state of one sequence over all layers that have one."""
    per_layer = (
        m.conv_channels * (m.conv_kernel - 1) + m.value_heads * m.key_dim * m.value_dim
        for m in _mixers(spec)
        if isinstance(m, DeltaNetSpec)
    )
    return FLOAT32 * sum(per_layer)


def _mixers(spec: ModelSpec) -> list[AttentionSpec | LatentSpec | DeltaNetSpec]:
    return [layer.mixer for layer in spec.layers]


def plan_cache(
    spec: ModelSpec,
    kv_dtype: torch.dtype,
    available: int,
    *,
    max_context: int = 0,
    kv_bytes: int = 0,
    max_running: int = 16,
    ceiling: int = 0,
) -> CachePlan:
    """Divide memory between pages and states.

    `available` bytes may be taken at most, `ceiling` (if that is more) once others give theirs back. `kv_bytes` 0 takes a modest
    share of what is available, or what `max_context` needs if that was named; `max_context` 0 is the model's own, reduced (and
    logged) to what fits. Raises TooLittleMemory.
    """
    page, slot = page_bytes(spec, kv_dtype), slot_bytes(spec)
    wanted = min(max_context or spec.max_positions, spec.max_positions)
    if max_context > wanted:
        log.warning("--max-context %d is more than the model's %d positions: %d is used", max_context, wanted, wanted)
    needed = _smallest(wanted if max_context else min(MIN_CONTEXT, wanted), page, slot)
    limit = kv_bytes or int(available * DEFAULT_SHARE)
    if not kv_bytes and limit < needed <= available * CEILING_SHARE:
        limit = needed
    if limit < needed or limit > available:
        raise TooLittleMemory(_complaint(max(needed, kv_bytes), limit, available, kv_bytes, max_context))
    slots = max(1, min(max_running, (limit - needed) // slot + 1 if slot else max_running))
    if slots < max_running:
        log.warning("memory holds the states of %d running requests, not %d: more of them wait in the queue", slots, max_running)
    rest = limit - slots * slot
    context = min(wanted, (rest // page - 1) * PAGE) if page else wanted
    if context < wanted:
        log.warning(
            "the context is %d tokens, not %d: that is what %s of cache hold; --kv-memory gives more", context, wanted, gib(limit)
        )
    for_context = pages_of(context) * page
    state_budget = int((rest - for_context) * STATE_SHARE) if slot else 0
    pages = min(MAX_PAGES, (rest - state_budget) // page) if page else pages_of(wanted) * slots
    most = min(MAX_PAGES, max(pages, max(available, ceiling) // page)) if page else pages
    return CachePlan(pages, slots, state_budget, context, page, slot, most, max_running, wanted)


def least_room(spec: ModelSpec, kv_dtype: torch.dtype, max_context: int = 0) -> int:
    """Available bytes in which `plan_cache` finds room for its smallest cache, or for `max_context`."""
    context = min(max_context or MIN_CONTEXT, spec.max_positions)
    return math.ceil(_smallest(context, page_bytes(spec, kv_dtype), slot_bytes(spec)) / CEILING_SHARE)


def context_of(pages: int, wanted: int) -> int:
    """Tokens one sequence may hold in `pages` pages, at most `wanted`; the inverse of `pages_of`."""
    return min(wanted, (pages - 1) * PAGE)


def pages_of(context: int) -> int:
    """Pages of one sequence at full context, and one for the copied tail of a shared page."""
    return -(-context // PAGE) + 1


def _smallest(context: int, page: int, slot: int) -> int:
    return pages_of(context) * page + slot


def _complaint(needed: int, limit: int, available: int, kv_bytes: int, max_context: int) -> str:
    what = f"a context of {max_context} tokens" if max_context else f"the smallest context ({MIN_CONTEXT} tokens)"
    if kv_bytes and needed <= available:
        return f"KV cache: {what} needs {gib(needed)}, --kv-memory gives {gib(limit)}: raise it or lower --max-context"
    remedy = "lower --max-context" if max_context else "free memory or choose a smaller model"
    if kv_bytes and kv_bytes > available:
        return f"KV cache: --kv-memory asks for {gib(kv_bytes)}, {gib(available)} are available: lower it"
    return f"KV cache: {what} needs {gib(needed)} of the {gib(available)} available, of which the cache may take part: {remedy}"


def gib(count: int) -> str:
    """`1610612736` -> `1.50 GiB`; small amounts in MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
