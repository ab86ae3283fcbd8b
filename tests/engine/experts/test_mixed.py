"""Layers placed in several ways beside an emulated fast memory: a whole engine, from its plan to its answers."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine.build import BuildError, Parts, build
from engine.cache_control import BadCommand, rebuild
from engine.cli import cli
from engine.config import EngineConfig
from engine.elastic import Elastic
from engine.experts import executor as executor_module
from engine.experts.calibrate import Figure, FormatRates, Profile, save_profile
from engine.experts.executor import TieredExperts
from engine.experts.identity import kernel_version, this_machine
from engine.experts.pressure import SHORT_LEAST, Memory
from engine.experts_control import status
from engine.kernels.reference import ReferenceOps
from engine.plan import default_profile
from engine.stores import stores_of
from engine.user import UserError
from tests.engine.serve.harness import Engine, generate
from tests.support.tiny import make_tiny

PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 60)), [11, 12], [90], [33, 34, 35], [120, 7], list(range(80, 100)), [150]]
NEW = 6
LAYERS, EXPERTS = 8, 8
EACH = 3 * 32 * 48 * 4  # bytes of an expert
LAYER = EXPERTS * EACH
LINK = 1 << 30


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Path, Path]:
    model, pack = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("pack") / "experts"
    sizes = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "moe_intermediate_size": 32, "hidden_size": 48}
    make_tiny("qwen3_moe", model, torch.float32, **sizes)
    done = CliRunner().invoke(cli, ["pack", str(model), str(pack), "--kernels", "reference"])
    assert done.exit_code == 0, done.output
    return model, pack


@pytest.fixture(autouse=True)
def measured(tmp_path, monkeypatch) -> None:
    """A profile of this machine: the processor computes experts at the link's rate, so that half of the misses are fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rate, here = Figure(float(LINK), 0, True), this_machine(kernel_version(ReferenceOps()))
    formats = {"F32": FormatRates(rate, rate)}
    save_profile(Profile(here, Figure(16.0 * LINK, 0, True), None, formats, None, time.time()), default_profile())


def parts_of(packed: tuple[Path, Path], **more: object) -> Parts:
    sizes = {"kv_bytes": 1 << 23, "max_context": 256, "max_running": 8, **more}
    if sizes.pop("pack", False):
        sizes["experts_pack"] = str(packed[1])
    return build(EngineConfig(model=str(packed[0]), kernels="reference", threads=1, **sizes), lambda fraction, stage: None)


# name -> how an engine is started so that its layers lie in several places, and where they then lie. Room for 26 experts;
# half of the layers may be page-locked.
SHORT = {"fast_bytes": 26 * EACH, "fast_link": LINK, "pin_bytes": 4 * LAYER + 100}
MIXES = {
    "three places": ({**SHORT, "placement": "hybrid"}, {"hybrid": "2-5", "resident": "1", "host": "0, 6-7"}),
    "ends computed": ({**SHORT, "placement": "offload"}, {"offload": "2-5", "host": "0-1, 6-7"}),
    "ends resident": (
        {**SHORT, "placement": "offload", "fast_bytes": 60 * EACH},
        {"offload": "2-5", "resident": "0-1, 6-7"},
    ),
    "ends streamed": (
        {**SHORT, "placement": "hybrid", "pack": True, "expert_bytes": 6 * LAYER, "pin_bytes": 4 * LAYER},
        {"hybrid": "2-5", "host": "1, 6", "stream": "0, 7"},
    ),
    "all streamed": ({**SHORT, "placement": "stream", "pack": True, "expert_bytes": 2 * LAYER}, {"stream": "0-7"}),
}


@pytest.fixture(scope="module")
def alone(packed) -> list[list[int]]:
    """The answer to each prompt by itself, everything computed in place."""
    out = []
    for prompt in PROMPTS:
        engine = Engine(parts_of(packed))
        engine.run(generate("r", prompt, NEW))
        out.append(engine.tokens("r"))
    assert len({tuple(tokens) for tokens in out}) > len(PROMPTS) // 2
    return out


def answers(engine: Engine, count: int) -> list[list[int]]:
    engine.run(*(generate(f"r{i}", prompt, NEW) for i, prompt in enumerate(PROMPTS[:count])))
    return [engine.tokens(f"r{i}") for i in range(count)]


@pytest.mark.parametrize("batch", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 8])
@pytest.mark.parametrize("mix", MIXES)
def test_greedy_answers_of_every_mix_are_those_of_each_request_alone(packed, alone, mix: str, batch: int) -> None:
    options, where = MIXES[mix]
    parts = parts_of(packed, **options)
    seen = status(parts.experts)
    assert {group["mode"]: group["layers"] for group in seen["groups"]} == where
    copied = 4 * LAYER if any(mode in where for mode in ("offload", "hybrid")) else 0
    assert seen["locked_bytes"] + seen["lock_short_bytes"] == copied, "what is copied from is page-locked, or said to be short"
    assert answers(Engine(parts), batch) == alone[:batch]
    check_that_it_was_that_mix(parts, where)
    parts.experts.slots.close()


def check_that_it_was_that_mix(parts: Parts, where: dict[str, str]) -> None:
    groups = status(parts.experts)["slots"].get("groups") or [status(parts.experts)["slots"]]
    assert {group["mode"]: group["layers"] for group in groups} == where
    for group in groups:
        match group["mode"]:
            case "resident":
                assert group["hits"] and not group["misses"] and not group["evicted"]
            case "host":
                assert group["misses"] and not group["fetched"] and not group["hits"]
            case "hybrid":
                ahead = EXPERTS * group["layers_copied_ahead"]
                assert group["fetched"] > group["slots"], "more than were preloaded"
                assert group["fetched"] - group["slots"] - ahead < group["misses"], "and some were computed in place"
            case "offload" | "stream":
                assert group["misses"] and group["fetched"] > group["slots"]


def test_status_log_and_plan_say_where_layers_lie_and_how_much_is_short(packed, caplog) -> None:
    caplog.set_level("INFO")
    options, where = MIXES["ends computed"]
    parts = parts_of(packed, **options)
    seen = status(parts.experts)
    assert seen["mode"] == "offload" and seen["pin_budget_bytes"] == 4 * LAYER + 100
    assert seen["pin_short_bytes"] == 4 * LAYER - 100
    assert "may be page-locked" in seen["reason"] and json.dumps(seen)
    assert "page-locked memory is short" in caplog.text and 'layers="0-1, 6-7"' in caplog.text
    parts.experts.slots.close()
    asked = ["--fast-memory", str(26 * EACH), "--fast-link", "1G", "--pin-memory", str(4 * LAYER + 100), "--mode", "offload"]
    shown = CliRunner().invoke(cli, ["plan", str(packed[0]), "--kernels", "reference", *asked])
    assert shown.exit_code == 0, shown.output
    assert "layers 2-5: offload: " in shown.output and "layers 0-1, 6-7: host: beyond the" in shown.output
    assert "pin budget" in shown.output and "MiB short of all layers alike" in shown.output
    as_json = json.loads(CliRunner().invoke(cli, ["plan", str(packed[0]), "--kernels", "reference", *asked, "--json"]).output)
    assert {group["mode"]: group["layers"] for group in as_json["groups"]} == where
    assert as_json["pin_short_bytes"] == 4 * LAYER - 100


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {**SHORT, "pin_bytes": 100, "placement": "hybrid"},
            "hybrid is impossible here: one layer of experts .* page-locked",
        ),
        ({**SHORT, "placement": "resident"}, "resident is impossible here: everything need .* short"),
        ({**SHORT, "placement": "in_place"}, "in_place is impossible here: the device has a memory of its own"),
        ({**SHORT, "fast_link": 0}, "say how fast it is, e.g. --fast-link"),
        ({**SHORT, "fast_bytes": 1 << 50}, "--fast-memory asks for .* are available: lower it"),
        ({"placement": "offload"}, "offload is impossible here: there is no fast memory"),
        ({"placement": "stream"}, "stream is impossible here: the experts are in no packed file"),
        (
            {"placement": "in_place", "pack": True, "expert_bytes": 2 * LAYER},
            "in_place is impossible here: weights .* need",
        ),
    ],
)
def test_an_engine_refuses_an_impossible_placement_with_the_arithmetic(packed, options, says: str) -> None:
    with pytest.raises(BuildError, match=says):
        parts_of(packed, **options)


def test_the_command_line_wants_the_links_rate(packed) -> None:
    done = CliRunner().invoke(cli, ["plan", str(packed[0]), "--kernels", "reference", "--fast-memory", "1M"])
    assert isinstance(done.exception, UserError) and "--fast-link" in str(done.exception)


# --- memory that moves


@pytest.mark.parametrize("mix", ["three places", "ends resident", "ends streamed"])
def test_slots_of_a_mix_move_between_steps_while_answers_stay(packed, alone, mix: str) -> None:
    """Only what can have more or fewer slots does; the layers that are resident stay whole."""
    options, where = MIXES[mix]
    parts = parts_of(packed, **options)
    engine, slots = Engine(parts), parts.experts.slots
    elastic = Elastic(stores_of(parts, engine.scheduler), 1 << 30, lambda: Memory(64 << 30, 0.0))
    engine.submit(*(generate(f"r{i}", prompt, NEW) for i, prompt in enumerate(PROMPTS)))
    sizes = set()
    for turn in range(30):
        engine.step()
        rebuild(parts.prefix, {"expert_bytes": slots.least + turn % 4 * LAYER}, elastic)
        sizes.add(slots.capacity)
    with pytest.raises(BadCommand, match="one layer of each of"):
        rebuild(parts.prefix, {"expert_bytes": slots.least - 1}, elastic)
    engine.drain()
    assert [engine.tokens(f"r{i}") for i in range(len(PROMPTS))] == alone and len(sizes) > 2
    for part in slots.parts:
        if part.placed == "resident":
            assert part.capacity == part.pool.layers * EXPERTS and part.counts["resized"] == 0
    slots.close()


def test_a_move_that_fails_in_one_part_is_undone_in_all(packed, alone, monkeypatch) -> None:
    parts = parts_of(packed, **MIXES["ends streamed"][0])
    engine, slots = Engine(parts), parts.experts.slots
    elastic = Elastic(stores_of(parts, engine.scheduler), 1 << 30, lambda: Memory(64 << 30, 0.0))
    before, calls, real = [part.capacity for part in slots.parts], [], TieredExperts.resize

    def second_fails(self, count: int) -> None:
        calls.append(count)
        if len(calls) == 2:
            raise MemoryError("injected")
        real(self, count)

    with monkeypatch.context() as patch, pytest.raises(BadCommand, match="injected; nothing was changed"):
        patch.setattr(executor_module.TieredExperts, "resize", second_fails)
        rebuild(parts.prefix, {"expert_bytes": slots.least + 5 * LAYER}, elastic)
    assert [part.capacity for part in slots.parts] == before
    assert answers(engine, 4) == alone[:4]
    slots.close()


@pytest.mark.parametrize(
    ("mix", "events"), [("three places", 30), ("ends streamed", 30), pytest.param("ends streamed", 1000, marks=pytest.mark.slow)]
)
def test_random_cancels_moves_and_shortages_of_a_mix_never_stick(packed, alone, mix: str, events: int) -> None:
    parts, chance = parts_of(packed, **MIXES[mix][0]), random.Random(5)
    engine, slots, memory, sent, clock = Engine(parts), parts.experts.slots, [Memory(64 << 30, 0.0)], [], 0.0
    elastic = Elastic(stores_of(parts, engine.scheduler), 1 << 30, lambda: memory[0])
    for _ in range(events):
        match chance.randrange(6):
            case 0 | 1:
                sent.append(chance.randrange(len(PROMPTS)))
                engine.submit(generate(f"r{len(sent) - 1}", PROMPTS[sent[-1]], NEW))
            case 2:
                if live := engine.scheduler.requests():
                    engine.scheduler.cancel(chance.choice(live)["id"], "client gone")
            case 3:
                memory[0] = Memory(64 << 30, 0.0)
                rebuild(parts.prefix, {"expert_bytes": slots.least + chance.randrange(4 * LAYER)}, elastic)
            case 4:
                clock += 20.0
                memory[0] = Memory(chance.choice([0, SHORT_LEAST, 64 << 30]), chance.choice([0.0, 20.0]))
                elastic.tick(clock)
            case 5:
                part = chance.choice([part for part in slots.parts if part.capacity])
                part.evict(chance.sample(range(part.pool.layers * EXPERTS), 4))
        for _ in range(chance.randrange(3)):
            engine.step()
        for part in slots.parts:
            part.slots.check()
    engine.drain()
    ends = Counter(engine.end(f"r{number}").reason for number in range(len(sent)))
    assert set(ends) <= {"length", "cancelled"} and ends["length"] > events // 20, ends
    for number, which in enumerate(sent):
        tokens = engine.tokens(f"r{number}")
        assert tokens == alone[which][: len(tokens)]
    slots.close()
    assert not any(part.link.alive for part in slots.parts)
