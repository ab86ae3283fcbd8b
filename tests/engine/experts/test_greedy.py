"""Greedy answers of requests that run together, in every placement, format and batch, are those of each alone, all resident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.build import Parts
from engine.experts.executor import Tier, TieredExperts
from engine.experts.filepool import Pack
from engine.experts.grouped import GroupedExperts, Within
from engine.experts.pack import write_pack
from engine.experts.pool import HostPool, Pool, kind_of
from engine.experts.predict import NextRouter
from engine.kernels.ops import Ops, Weight
from engine.limits import Limits
from engine.models.load import LoadedModel, load_model
from engine.nn.batch import PAGE, allocate_cache
from engine.nn.decoder import Decoder
from engine.nn.experts import Experts, InPlace, expert_banks
from engine.prefix.naive import NaivePrefixCache
from tests.engine.experts.tiers import EVEN, WIDE, kernels, stored
from tests.engine.serve.harness import Engine, generate
from tests.support.tiny import VOCAB, make_tiny

SIZES = {"hidden_size": WIDE, "moe_intermediate_size": WIDE, "num_hidden_layers": 4}
ANSWER = 8  # tokens
PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 60)), [11, 12], [90], [33, 34, 35], [120, 7], list(range(80, 100)), [150]]
MIXED = "Q4_K and Q6_K"  # as Q4_K_M files are: the down matrices of some layers have more bits
OFTEN = ("bf16", "Q8_0", "Q4_K")
RARELY = (
    *("f16", "f32", "F8_E4M3", "MXFP4", "NVFP4", "NVFP4_SCALED", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K"),
    *("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ4_NL", "IQ4_XS", MIXED),
)
FORMATS = [*OFTEN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in RARELY)]
PLACEMENTS = ["resident", "in_place", "offload", "hybrid", "host", "stream"]


@dataclass(frozen=True)
class Model:
    loaded: LoadedModel
    ops: Ops
    pack: Path
    alone: list[list[int]]  # the answer to each prompt, run by itself with all experts in slots


def maker(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Makes the model of each format once."""
    ops, checkpoint, made = kernels("cpu"), tmp_path_factory.mktemp("checkpoint"), {}
    make_tiny("qwen3_moe", checkpoint, torch.bfloat16, **SIZES)

    def get(kind: str) -> Model:
        if kind not in made:
            loaded = in_format(load_model(checkpoint, ops), ops, kind)
            banks = expert_banks(loaded.spec, loaded.weights)
            pack = tmp_path_factory.mktemp("pack")
            write_pack(pack / "experts", "test", len(banks), lambda n: banks[n], lambda done, total: None)
            model = Model(loaded, ops, pack / "experts", [])
            with placed("resident", model) as experts:
                model.alone.extend(answers(model, experts, [prompt])[0] for prompt in PROMPTS)
            made[kind] = model
        return made[kind]

    return get


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Model]:
    return maker(tmp_path_factory)


def in_format(loaded: LoadedModel, ops: Ops, kind: str) -> LoadedModel:
    """The model with its routed experts stored as `kind`, everything else as it is."""
    for name, weight in loaded.weights.items():
        layer, _, part = name.partition(".")
        if part in ("moe.gate_up", "moe.down"):
            better = kind == MIXED and part == "moe.down" and layer in ("0", "3")
            own = kind if kind != MIXED else "Q6_K" if better else "Q4_K"
            loaded.weights[name] = ops.prepare(balanced(stored(weight.float(), own)))
    return loaded


def balanced(weight: Weight) -> Weight:
    """Random blocks of these have a mean above zero, which drowns all else: with such a `dmin`, in `d`, it is zero."""
    size, dmin = {"Q4_K": (144, 7.5), "Q5_K": (176, 15.5)}.get(getattr(weight, "type", ""), (0, 0.0))
    if size:
        blocks = weight.data.view(-1, size)
        blocks[:, 2:4] = (blocks[:, :2].contiguous().view(torch.float16) * dmin).view(torch.uint8)
    return weight


@contextmanager
def placed(placement: str, model: Model) -> Iterator[Experts]:
    """Experts of `model` as `placement` has them; slots for a part of them, where there are slots for a part."""
    loaded, ops = model.loaded, model.ops
    banks = expert_banks(loaded.spec, loaded.weights)
    if placement == "in_place":
        yield InPlace(banks, ops)
        return
    if placement == "stream":
        pack = Pack(model.pack)
        routers = [loaded.weights[f"{i}.moe.router"] for i in range(len(banks))]
        pools, numbers = pack.pools, [pool.numbers for pool in pack.pools]
    else:
        kinds = [kind_of(bank) for bank in banks]
        numbers = [[i for i, kind in enumerate(kinds) if kind == own] for own in dict.fromkeys(kinds)]
        pools, routers = [HostPool([banks[i] for i in own]) for own in numbers], []
    parts = [part_of(placement, pool, ops, own, routers) for pool, own in zip(pools, numbers, strict=True)]
    experts = parts[0] if len(parts) == 1 else GroupedExperts(parts, numbers)
    if placement in ("host", "stream"):
        experts.preload(lambda size: None)  # `host` fetches nothing by itself
    try:
        yield experts
    finally:
        experts.close()
        if placement == "stream":
            pack.close()


def part_of(placement: str, pool: Pool, ops: Ops, layers: list[int], routers: list[Weight]) -> TieredExperts:
    """`layers` of the model whose experts are of one kind."""
    every, one_layer = pool.layers * pool.experts, pool.experts
    slots = {"resident": every, "offload": one_layer + 2, "hybrid": one_layer + 2, "host": every // 2, "stream": one_layer}
    mode = placement if placement in ("hybrid", "host") else "offload"
    tier = Tier(slots[placement], mode, EVEN, workers=4 if placement == "stream" else 1)
    return TieredExperts(pool, ops, tier, Within(NextRouter(routers, ops), layers) if routers else None)


def answers(model: Model, experts: Experts, prompts: list[list[int]]) -> list[list[int]]:
    """Of all `prompts` at once."""
    spec, ops, places = model.loaded.spec, model.ops, len(prompts)
    pages = places * -(-(max(map(len, prompts)) + ANSWER) // PAGE)
    cache = allocate_cache(spec, pages, places, ops.kv_dtype)
    decoder = Decoder(spec, model.loaded.weights, ops, experts)
    limits = Limits(max_context=2 * PAGE, vocab=VOCAB, max_running=places, max_queue=places, prefill_chunk=24)
    engine = Engine(Parts(lambda batch: decoder.forward(batch, cache), NaivePrefixCache(cache, pages, places), limits, {}))
    engine.run(*(generate(f"r{i}", prompt, ANSWER) for i, prompt in enumerate(prompts)))
    return [engine.tokens(f"r{i}") for i in range(places)]


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", FORMATS)
def test_greedy_answers_are_those_of_each_request_alone_with_all_resident(models, kind, placement, batch) -> None:
    model = models(kind)
    with placed(placement, model) as experts:
        assert answers(model, experts, PROMPTS[:batch]) == model.alone[:batch]
        check(placement, experts)


def check(placement: str, experts: Experts) -> None:
    """That the placement was what its name says."""
    if placement == "in_place":
        return
    parts = experts.parts if isinstance(experts, GroupedExperts) else [experts]
    for part in parts:
        counts, every = part.slots.counts, part.most
        match placement:
            case "resident":
                assert counts.hits and counts.fetched <= every and not counts.evicted
            case "host":
                assert counts.hits and counts.misses and counts.fetched == every // 2, "only what lay there before"
            case "hybrid":
                # a chunk may bring a whole layer ahead, where that was measured to be faster
                missed = counts.fetched - part.counts["ahead"]
                assert 0 < missed < counts.misses, "some fetched, some computed in place"
            case "offload" | "stream":
                assert counts.misses and counts.fetched > part.capacity and counts.evicted


def test_every_format_that_the_kernels_compute_on_is_among_them() -> None:
    assert {*OFTEN, *RARELY} - {MIXED} == {"bf16", "f16", "f32", *kernels("cpu").quant_types} - {"BF16", "F16", "F32"}


@pytest.mark.parametrize("kind", FORMATS)
def test_answers_differ_between_prompts(models, kind) -> None:
    """Else their equality would say little."""
    seen = {tuple(answer) for answer in models(kind).alone}
    assert len(seen) > len(PROMPTS) // 2 and len({token for answer in seen for token in answer}) > 10
