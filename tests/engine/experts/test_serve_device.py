"""A whole engine on a made-up device of its own memory: what fits lies there, the rest is copied there, answers are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import placing
from engine.build import BuildError, Parts
from engine.experts.devices import Device
from engine.experts.streams import Here
from engine.experts_control import status
from engine.hostmem import lazy
from engine.nn.experts import InPlace
from tests.engine.experts.test_mixed import EACH, EXPERTS, LAYER, LAYERS, Engine, alone, answers, measured, packed, parts_of

__all__ = ["alone", "measured", "packed"]  # fixtures


class Apart(Here):
    """Host memory that says it is a device's: `free` bytes of it."""

    apart, name = True, "made up"

    def __init__(self, free: int) -> None:
        self._free = free

    def pinned(self, size: int) -> torch.Tensor:
        return torch.frombuffer(lazy(size), dtype=torch.uint8)[:size]  # begins on a page

    def memory(self) -> tuple[int, int]:
        return self._free, self._free


def on_device(monkeypatch, packed: tuple[Path, Path], free: int, **more: object) -> Parts:
    for module in ("engine.build", "engine.plan"):
        monkeypatch.setattr(f"{module}.device_of", lambda ops: Apart(free))
    return parts_of(packed, **more)


CACHE = 1 << 23  # of parts_of
DENSE = 1 << 20  # more than this model's weights beside its experts
# name -> free bytes of the device, options, where layers then lie
PLACES = {
    "all of it": (DENSE + CACHE + 2 * LAYERS * LAYER, {}, {"resident": "0-7"}),
    "some of it": (DENSE + 2 * CACHE, {"fast_bytes": 20 * EACH}, {"offload": "0-7"}),
    "from a pack": (DENSE + 2 * CACHE, {"fast_bytes": 20 * EACH, "pack": True, "expert_bytes": 8 * LAYER}, {"offload": "0-7"}),
    "beyond host memory": (
        DENSE + 2 * CACHE,
        {"fast_bytes": 40 * EACH, "pack": True, "expert_bytes": 4 * LAYER},
        {"offload": "2-5", "stream": "0-1, 6-7"},
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_answers_on_a_device_are_those_of_the_processor(packed, alone, monkeypatch, place: str) -> None:
    free, options, where = PLACES[place]
    parts = on_device(monkeypatch, packed, free, **options)
    seen = status(parts.experts)
    assert {group["mode"]: group["layers"] for group in seen["groups"]} == where
    assert answers(Engine(parts), 8) == alone
    slots = status(parts.experts)["slots"]
    if place == "all of it":
        assert slots is None, "computed where they were loaded"
        return
    for group in slots.get("groups") or [slots]:
        assert group["misses"] and group["fetched"] > group["slots"] >= EXPERTS
    parts.experts.slots.close()


def test_without_a_size_half_of_what_is_free_is_for_slots(packed, monkeypatch) -> None:
    free = 2 << 20
    parts = on_device(monkeypatch, packed, free, kv_bytes=free // 2)
    slots = status(parts.experts)["slots"]
    assert slots["mode"] == "offload" and slots["slots"] == min(LAYERS * EXPERTS, free // 2 // EACH)
    parts.experts.slots.close()


def test_what_cannot_be_is_refused_with_the_reason(packed, monkeypatch) -> None:
    for mode in ("hybrid", "host"):
        with pytest.raises(BuildError, match="do not add in the same order"):
            on_device(monkeypatch, packed, DENSE + 2 * CACHE, placement=mode)
    with pytest.raises(BuildError, match="short"):
        on_device(monkeypatch, packed, CACHE + LAYERS * LAYER, placement="resident")


def test_on_one_memory_a_device_computes_on_the_loaded_experts(packed, alone, monkeypatch) -> None:
    for module in ("engine.build", "engine.plan"):
        monkeypatch.setattr(f"{module}.find_devices", lambda: (Device("NVIDIA GB10", 0, True, 0.0),))
    monkeypatch.setattr(placing.mapped, "in_place", InPlace)  # which registers memory with a driver (test_cuda.py)
    parts = on_device(monkeypatch, packed, DENSE + 2 * CACHE)
    seen = status(parts.experts)
    assert seen["mode"] == "in_place" and "nothing is copied" in seen["reason"] and seen["slots"] is None
    assert answers(Engine(parts), 8) == alone
