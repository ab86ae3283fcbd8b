"""Greedy answers of a whole model with experts on a made-up device are those of each request alone with all resident."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.experts.executor import Tier, TieredExperts
from engine.experts.filepool import Pack
from engine.experts.locking import lock_banks
from engine.experts.pool import HostPool
from engine.experts.predict import NextRouter
from engine.nn.experts import expert_banks
from tests.engine.experts.test_greedy import PROMPTS, Model, answers, check, maker
from tests.engine.experts.tiers import EVEN
from tests.support.late import Border, Late, LateOps

FORMATS = ["bf16", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q8_0", "Q4_K", "Q6_K", "F8_E4M3", "MXFP4"))]
PLACEMENTS = ["resident", "offload", "hybrid", "host", "stream"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return maker(tmp_path_factory)


@contextmanager
def on_device(placement: str, model: Model, late: Late) -> Iterator[TieredExperts]:
    banks, ops, routers = expert_banks(model.loaded.spec, model.loaded.weights), LateOps(model.ops, late), None
    pack = Pack(model.pack) if placement == "stream" else None
    pool = pack.pools[0] if pack else HostPool(banks)
    if not pack:
        lock_banks(banks, 1 << 40, ("made up", late.register))
    else:
        routers = NextRouter([model.loaded.weights[f"{i}.moe.router"] for i in range(len(banks))], ops, late)
    every, layer = pool.layers * pool.experts, pool.experts
    slots = {"resident": every, "offload": layer + 2, "hybrid": layer + 2, "host": every // 2, "stream": layer}[placement]
    mode = placement if placement in ("hybrid", "host") else "offload"
    host = model.ops if mode != "offload" else None
    experts = TieredExperts(pool, ops, Tier(slots, mode, EVEN, workers=4 if pack else 1), routers, late, host)
    if placement in ("host", "stream"):
        experts.preload(lambda size: None)
    try:
        yield experts
    finally:
        experts.close()
    late.check()


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", FORMATS)
def test_greedy_answers_on_a_device_are_those_of_each_request_alone_with_all_resident(models, kind, placement, batch) -> None:
    model, late = models(kind), Late(batch)
    with on_device(placement, model, late) as experts:
        assert answers(model, Border(experts, late), PROMPTS[:batch]) == model.alone[:batch]
        check(placement, experts)
