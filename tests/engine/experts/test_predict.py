"""Experts read ahead on a prediction: never another answer, and right often enough to be worth it."""

import random
import threading
from pathlib import Path

import pytest
import torch

from engine.experts.executor import Tier, TieredExperts
from engine.experts.pool import HostPool
from engine.experts.predict import ROWS, NextRouter
from engine.kernels.reference import ReferenceOps
from engine.models.load import load_model
from engine.nn.decoder import Decoder
from engine.nn.experts import expert_banks
from engine.text.tokenizer import load_tokenizer
from tests.engine.experts.tiers import EVEN, EXPERTS, LAYERS, banks, kernels, step
from tests.support.steps import Driver

ROOT = Path(__file__).resolve().parents[3]


class Oracle:
    """Says what tests tell it."""

    def __init__(self) -> None:
        self.says: list[int] = []

    def predict(self, layer: int, x: torch.Tensor, top_k: int) -> list[int]:
        return self.says if layer + 1 < LAYERS else []


class World:
    def __init__(self, slots: int, **more) -> None:
        self.ops, self.generator, self.oracle = ReferenceOps(), torch.Generator().manual_seed(0), Oracle()
        self.pool = banks(self.ops, "f32")
        tier = Tier(slots=slots, mode="offload", rates=EVEN, **more)
        self.experts = TieredExperts(HostPool(self.pool), self.ops, tier, self.oracle)

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        want = self.ops.moe(x, ids, weights, self.pool[layer].gate_up, self.pool[layer].down, "silu")
        assert torch.equal(self.experts.run(layer, x, ids, weights), want)
        self.experts.slots.check()


@pytest.mark.parametrize("slots", [2, 5, EXPERTS, 2 * EXPERTS])
@pytest.mark.parametrize("workers", [1, 4])
def test_answers_are_those_of_the_pool_whatever_is_predicted(slots: int, workers: int) -> None:
    world, chance = World(slots, workers=workers), random.Random(slots)
    for turn in range(24):
        calls = [step(world.generator, chance.choice([1, 1, 2, ROWS, 20])) for _ in range(LAYERS)]
        for layer, call in enumerate(calls):
            right = calls[layer + 1][1].unique().tolist() if layer + 1 < LAYERS else []
            world.oracle.says = [right, chance.sample(range(EXPERTS), 4), list(range(EXPERTS)), []][turn % 4]
            world.run(layer, *call)
        if turn % 7 == 0:
            world.experts.resize(chance.choice([slots, slots + 3]))
    assert world.experts.status()["predictions"]["fetched"] > 0
    world.experts.close()


def one_token(world: World, experts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, _, weights = step(world.generator, 1)
    return x, torch.tensor([experts], dtype=torch.int32), weights


def test_a_right_prediction_is_there_when_it_is_asked_for() -> None:
    world = World(EXPERTS)
    world.oracle.says = [3, 4, 5]
    world.run(0, *one_token(world, [0, 1, 2]))
    before = world.experts.slots.counts.fetched
    assert before == 6
    world.oracle.says = []
    world.run(1, *one_token(world, [3, 4, 5]))
    assert world.experts.slots.counts.fetched == before, "nothing more had to be fetched"
    assert world.experts.status()["predictions"] == {"made": 3, "right": 3, "fetched": 3, "used": 3}
    world.experts.close()


def test_a_wrong_prediction_makes_way_for_what_is_asked_for() -> None:
    world, begun, go_on = World(EXPERTS), threading.Event(), threading.Event()
    put = world.experts.arena.put

    def slow(key: int, slot: int, part: int) -> int:
        if key >= EXPERTS:
            begun.set()
            go_on.wait(10)
        return put(key, slot, part)

    world.experts.arena.put = slow
    world.oracle.says = [9, 10, 11]
    world.run(0, *one_token(world, [0, 1, 2]))
    assert world.experts.coming == {EXPERTS + 9, EXPERTS + 10, EXPERTS + 11}
    assert begun.wait(10)
    world.experts.expect([EXPERTS + 3, EXPERTS + 4, EXPERTS + 5])
    assert world.experts.coming == {EXPERTS + 9}, "what has begun is let through"
    go_on.set()
    world.oracle.says = []
    world.run(1, *one_token(world, [3, 4, 5]))
    assert world.experts.status()["predictions"] == {"made": 3, "right": 0, "fetched": 3, "used": 0}
    world.experts.close()


def test_a_right_prediction_hurries_when_it_is_asked_for() -> None:
    """What it was read behind of has become less urgent than itself."""
    world, begun, go_on, order = World(EXPERTS), threading.Event(), threading.Event(), []
    put = world.experts.arena.put

    def slow(key: int, slot: int, part: int) -> int:
        order.append(key - EXPERTS)
        if key == EXPERTS + 9:
            begun.set()
            go_on.wait(10)
        return put(key, slot, part)

    world.oracle.says = [9, 10, 11]
    world.experts.arena.put = slow
    world.run(0, *one_token(world, [0, 1, 2]))
    assert begun.wait(10), "the first of them is on its way, two wait behind everything"
    world.experts.expect([EXPERTS + e for e in (9, 10, 11)])
    assert world.experts.fetch([2 * EXPERTS]) == [2 * EXPERTS], "somebody else's, asked for now"
    go_on.set()
    world.oracle.says = []
    world.run(1, *one_token(world, [9, 10, 11]))
    world.experts.settle()
    assert order[order.index(9) :] == [9, 10, 11, EXPERTS] and world.experts.status()["predictions"]["used"] == 3
    world.experts.close()


def test_who_is_likely_to_come_next_does_not_leave_for_who_is_here() -> None:
    world = World(EXPERTS)
    world.run(1, *one_token(world, [3, 4, 5]))
    for others in ([0, 1, 2], [3, 4, 5], [6, 7, 8]):
        world.run(2, *one_token(world, others))
    world.oracle.says = [3, 4, 5]  # the oldest of the cache, which the next misses would evict
    world.run(0, *one_token(world, [0, 1, 2]))
    assert all(world.experts.slots.where[EXPERTS + e] >= 0 for e in (3, 4, 5))
    world.experts.close()


def test_the_next_router_ranks_by_place_and_leaves_large_steps_alone() -> None:
    routers = [torch.eye(4), torch.eye(4)]
    predictor = NextRouter(routers, ReferenceOps())
    x = torch.tensor([[4.0, 3.0, 0.0, 0.0], [0.0, 0.0, 9.0, 8.0]])
    assert predictor.predict(0, x, 2) == [0, 2, 1, 3]
    assert predictor.predict(1, x, 2) == [] and predictor.predict(0, x.repeat(ROWS, 1), 2) == []


@pytest.mark.slow
def test_on_the_demo_model_most_predictions_are_right(capsys) -> None:
    """The figure of the documentation: of the experts of the next layer, how many its router names one layer early."""
    ops, path = kernels("cpu"), ROOT / "ops" / "demo_model"
    model = load_model(path, ops)
    pool = HostPool(expert_banks(model.spec, model.weights))
    routers = [model.weights[f"{i}.moe.router"] for i in range(len(model.spec.layers))]
    experts = TieredExperts(pool, ops, Tier(2 * pool.experts, "offload", EVEN), NextRouter(routers, ops))
    tokens = load_tokenizer(str(path)).encode((ROOT / "docs" / "experts.md").read_text(), None, 1 << 20)[:600]
    Driver(Decoder(model.spec, model.weights, ops, experts), ops.kv_dtype, sequences=1, tokens=1024).chunks(0, tokens, [1])
    seen = experts.status()["predictions"]
    with capsys.disabled():
        print(f"\n{seen['right'] / seen['made']:.1%} right, {seen['used'] / seen['fetched']:.1%} of those fetched were used")
    assert seen["right"] > 0.6 * seen["made"] and seen["used"] > 0.5 * seen["fetched"]
    experts.close()
