"""The engine's configuration: one frozen value, built once by the command line, handed to the worker as JSON.

Owns names, defaults and ranges of every engine setting. Imports no torch: the API process reads it too.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Size = Annotated[int, msgspec.Meta(ge=0)]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """0 means "decide from the machine and the model" for `threads`, `max_context`, `kv_bytes` and `expert_bytes`."""

    model: str  # checkpoint directory or GGUF file
    kernels: Literal["auto", "reference", "cpu", "cuda"] = "auto"
    threads: Size = 0
    max_context: Size = 0  # tokens one sequence may hold
    kv_bytes: Size = 0  # memory for KV pages and recurrent states together
    max_running: Count = 16  # sequences in one step; more wait in the queue
    max_queue: Count = 256  # requests waiting; the next one is refused with 429
    prefill_chunk: Count = 512  # prompt tokens a step computes: fills the kernels, stays cancellable
    experts_pack: str = ""  # directory made by `pack`: routed experts come from it; "" = from the checkpoint
    expert_bytes: Size = 0  # memory for slots of packed experts that are read when needed
    expert_policy: Literal["lru", "rate", "s3fifo"] = "lru"  # which experts leave slots first
    placement: Literal["", "resident", "in_place", "offload", "hybrid", "host", "stream"] = ""  # of experts; "" = the fastest
    fast_bytes: Size = 0  # slots in a device's memory (0 = decide), or of an emulated fast memory (0 = none)
    fast_link: Size = 0  # bytes a second of the link into it
    pin_bytes: Size = 0  # host memory that counts as page-locked beside it; 0 = all
    kv_disk: str = ""  # directory in which computed tokens outlive a restart; "" = none
    kv_disk_bytes: Size = 32 << 30
    kv_disk_daily_bytes: Size = 256 << 30  # writes a day: a tenth of what a 1 TB consumer SSD endures over five years
    kv_disk_ttl_s: Count = 30 * 86400  # since last use
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def in_place_wanted(config: EngineConfig) -> bool:
    """Whether packed experts are computed on where they lie, if they fit."""
    return not config.fast_bytes and not config.expert_bytes and config.placement in ("", "in_place")


def without_effect(config: EngineConfig) -> list[str]:
    """What was asked for and changes nothing, a line each."""
    lines = []
    if config.expert_bytes and not config.experts_pack:
        lines.append("--expert-memory has no effect without --experts-pack: all experts are loaded")
    if config.fast_link and (config.kernels == "cuda" or not config.fast_bytes):
        lines.append("--fast-link has no effect: no fast memory is emulated without --fast-memory, or with --kernels cuda")
    if config.pin_bytes and config.kernels != "cuda" and not config.fast_bytes:
        lines.append("--pin-memory has no effect without --fast-memory: nothing is copied")
    return lines


def parse_config(text: str | bytes) -> EngineConfig:
    """Decode and check a JSON configuration. Raises ValueError with one line naming the field and what it must be."""
    try:
        return msgspec.json.decode(text, type=EngineConfig)
    except msgspec.DecodeError as problem:  # ValidationError is a DecodeError
        raise ValueError(f"engine configuration: {problem}{_choices(str(problem))}") from None


def _choices(problem: str) -> str:
    """What there is to choose from, where a value is none of it."""
    found = re.search(r"Invalid enum value .*`\$\.(\w+)`", problem)
    names = get_args(get_type_hints(EngineConfig)[found[1]]) if found else ()
    return f"; there are {', '.join(name for name in names if name)}" if names else ""


def dump_config(config: EngineConfig) -> str:
    return msgspec.json.encode(config).decode()
