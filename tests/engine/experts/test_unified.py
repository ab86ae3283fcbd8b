"""Processor and device on one memory (DGX Spark): experts are computed where they were loaded, nothing of them is copied."""

from __future__ import annotations

import pytest
import torch

from engine import build as building
from engine.build import build
from engine.config import EngineConfig
from engine.experts import arena, executor
from engine.experts.devices import Device
from engine.experts_control import status
from engine.kernels.reference import ReferenceOps
from tests.engine.serve.harness import Engine, generate
from tests.support.tiny import make_tiny

SPARK = Device("NVIDIA GB10", 0, True, 0.0)


def copied(*_: object, **__: object) -> None:
    raise AssertionError("experts were copied from memory to the same memory")


def test_on_one_memory_the_kernels_are_given_the_loaded_weights_themselves(tmp_path, monkeypatch) -> None:
    make_tiny("qwen3_moe", tmp_path, torch.bfloat16)
    monkeypatch.setattr("engine.plan.find_devices", lambda: (SPARK,))
    for owner, name in ((arena, "copy_expert"), (arena.Arena, "__init__"), (executor.Link, "__init__")):
        monkeypatch.setattr(owner, name, copied)
    weights, seen = {}, []
    load, moe = building.load_model, ReferenceOps.moe

    def loading(*arguments, **more):
        found = load(*arguments, **more)
        weights.update(found.weights)
        return found

    def noted(self, x, ids, shares, gate_up, down, *more):
        seen.append((gate_up.data_ptr(), down.data_ptr()))
        return moe(self, x, ids, shares, gate_up, down, *more)

    monkeypatch.setattr(building, "load_model", loading)
    monkeypatch.setattr(ReferenceOps, "moe", noted)
    parts = build(
        EngineConfig(model=str(tmp_path), kernels="reference", threads=1, kv_bytes=1 << 23, max_context=256),
        lambda fraction, stage: None,
    )
    engine = Engine(parts)
    engine.run(generate("long", list(range(3, 90)), 4), generate("short", [5], 4))
    layers = [name.split(".")[0] for name in weights if name.endswith("moe.gate_up")]
    pool = {(weights[f"{n}.moe.gate_up"].data_ptr(), weights[f"{n}.moe.down"].data_ptr()) for n in layers}
    assert set(seen) == pool and len(engine.tokens("long")) == 4
    found = status(parts.experts)
    assert found["mode"] == "in_place" and "nothing is copied" in found["reason"] and found["slots"] is None
    assert [device["unified"] for device in found["devices"]] == [True]


@pytest.mark.parametrize("mode", ["offload", "hybrid", "resident"])
def test_a_copy_cannot_be_forced_there(tmp_path, monkeypatch, mode: str) -> None:
    make_tiny("qwen3_moe", tmp_path, torch.bfloat16)
    monkeypatch.setattr("engine.plan.find_devices", lambda: (SPARK,))
    with pytest.raises(building.BuildError, match=f"{mode} is impossible here"):
        build(
            EngineConfig(model=str(tmp_path), kernels="reference", threads=1, kv_bytes=1 << 23, max_context=256, placement=mode),
            lambda fraction, stage: None,
        )
