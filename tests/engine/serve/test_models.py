"""Tiny real checkpoints through the whole engine: any mixture of requests equals each of them alone and cold."""

import importlib.util

import pytest
import torch
from msgspec.structs import replace

from engine.build import build
from engine.config import EngineConfig
from engine.ipc import Anchor, Done, Sampling
from engine.tensors import copiers
from tests.engine.serve.harness import GREEDY, Engine, generate
from tests.support.tiny import VOCAB, make_tiny

KINDS = ("mistral", "qwen3_moe", "deepseek_v3", "qwen3_5_moe_text")  # sliding window, full, latent, recurrent hybrid


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp(request.param)
    make_tiny(request.param, directory)
    return str(directory)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def kernels(request) -> str:
    if request.param == "cpu" and importlib.util.find_spec("engine._native") is None:
        pytest.skip("the native kernels are not built")
    return request.param


def engine(checkpoint: str, kernels: str, **settings) -> Engine:
    config = EngineConfig(model=checkpoint, kernels=kernels, threads=1, kv_bytes=64 << 20, **settings)
    return Engine(build(config, lambda fraction, stage: None))


def text(seed: int, length: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


HEAD = text(0, 100)
REQUESTS = [
    generate("short", text(1, 3), 12, session="a"),
    generate("long", text(2, 300), 6, session="a"),
    generate("shared", HEAD + text(3, 40), 8, session="b", anchors=(Anchor(offset=100, kind="system"),)),
    generate("shared too", HEAD + text(4, 50), 8, session="c", anchors=(Anchor(offset=100, kind="system"),)),
    generate("equal", HEAD + text(4, 50), 8, session="d"),
    generate("hot", text(5, 65), 12, sampling=Sampling(temperature=1.2, seed=3, top_p=0.9, repetition_penalty=1.2)),
    generate("probed", text(6, 64), 5, logprobs=2, prompt_logprobs=1),
]


@pytest.mark.skipif(importlib.util.find_spec("engine._native") is None, reason="the native kernels are not built")
def test_torch_has_threads_while_weights_are_copied_and_none_beside_the_pool(tmp_path) -> None:
    make_tiny("mistral", tmp_path)
    seen: list[tuple[int, int]] = []
    config = EngineConfig(model=str(tmp_path), kernels="cpu", threads=2, kv_bytes=64 << 20)

    def progress(fraction: float, stage: str) -> None:
        if stage == "loading weights":
            seen.append((torch.get_num_threads(), copiers.count))

    build(config, progress)
    assert set(seen) == {(2, 2)}
    assert (torch.get_num_threads(), copiers.count) == (1, 1)


def test_a_mixture_equals_each_alone(checkpoint: str, kernels: str) -> None:
    together = engine(checkpoint, kernels, prefill_chunk=48, max_running=5)
    together.submit(*REQUESTS[:3])
    for _ in range(4):
        together.step()
    together.run(*REQUESTS[3:])
    together.run(*(replace(r, id=f"again {r.id}") for r in REQUESTS))
    alone = engine(checkpoint, kernels, prefill_chunk=512)
    for request in REQUESTS:
        alone.run(replace(request, cache=False))
        for id in (request.id, f"again {request.id}"):
            assert together.tokens(id) == alone.tokens(request.id), id
            assert isinstance(together.end(id), Done)
    probed = [m for m in alone.of("probed") if getattr(m, "logprobs", None)]
    assert [m.logprobs for m in together.of("probed") if getattr(m, "logprobs", None)] == [m.logprobs for m in probed]
    assert together.started("probed").prompt_logprobs == alone.started("probed").prompt_logprobs
    assert together.started("equal").usage.common >= 64
    assert all(together.started(f"again {r.id}").usage.lost <= 64 for r in REQUESTS if r.id != "probed")


def test_page_shortage_changes_no_token(checkpoint: str, kernels: str) -> None:
    requests = [generate(str(n), text(n, 100), 40, sampling=GREEDY) for n in range(4)]
    roomy, tight = engine(checkpoint, kernels, prefill_chunk=64), engine(checkpoint, kernels, prefill_chunk=64)
    tight.scheduler._prefix.pool.take(tight.scheduler._prefix.pool.free - 8)  # 8 pages are left for the 12 wanted
    roomy.run(*requests)
    tight.run(*requests)
    assert tight.scheduler.counters["preempted"] > 0
    for request in requests:
        assert tight.tokens(request.id) == roomy.tokens(request.id)
