"""A whole engine on the GPU kernels: experts all on the device, some beside host memory, from a pack; as users start it too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.build import Parts, build
from engine.config import EngineConfig
from engine.experts.devices import find_devices
from engine.experts.pack import read_index
from engine.experts_control import status
from engine.packing import pack_model
from tests.engine.experts.test_serve_device import Apart
from tests.engine.serve.harness import Engine, generate
from tests.support.cuda import interpreting
from tests.support.engine_process import serving
from tests.support.text import write_tokenizer
from tests.support.tiny import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # whole engines in the interpreter

PROMPTS, NEW = ([5, 6, 7, 8, 9], [11, 12], [60, 61, 62]), 2
SIZES = {"vocab_size": 700, "num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2}
# name -> slots, from a pack, how experts then lie
PLACES = {"all of it": (0, False, "resident"), "some of it": (5, False, "offload"), "from a pack": (5, True, "offload")}


@pytest.fixture(scope="module")
def model(kernels, tmp_path_factory) -> tuple[Path, Path, int]:
    """A checkpoint, its pack, and the bytes of an expert."""
    at, pack = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("pack") / "experts"
    make_tiny("qwen3_moe", at, torch.bfloat16, **SIZES)
    write_tokenizer(at, "json_calls")
    pack_model(at, pack, kernels, lambda done, size: None)
    return at, pack, read_index(pack).kinds[0].bytes


def parts_of(model: Path, kernels: str, **more: object) -> Parts:
    sizes = {"kv_bytes": 1 << 22, "max_context": 256, "max_running": 4, **more}
    return build(EngineConfig(model=str(model), kernels=kernels, threads=1, **sizes), lambda fraction, stage: None)


def answers(parts: Parts, together: bool) -> list[list[int]]:
    engine, requests = Engine(parts), [generate(f"r{i}", prompt, NEW) for i, prompt in enumerate(PROMPTS)]
    for some in [requests] if together else [[request] for request in requests]:
        engine.run(*some)
    return [engine.tokens(request.id) for request in requests]


@pytest.fixture(scope="module")
def alone(kernels, model) -> list[list[int]]:
    """Of each prompt by itself: the truth's."""
    said = [answers(parts_of(model[0], name), together=False) for name in ("cuda", "reference")]
    assert said[0] == said[1] and all(len(tokens) == NEW for tokens in said[0])
    return said[0]


@pytest.mark.parametrize("place", PLACES)
def test_answers_of_an_engine_are_those_of_each_request_alone(kernels, model, alone, monkeypatch, place: str) -> None:
    slots, packed, where = PLACES[place]
    if interpreting():  # host memory that says it is a device's
        for module in ("engine.build", "engine.plan"):
            monkeypatch.setattr(f"{module}.device_of", lambda ops: Apart(64 << 20))
    elif any(device.unified for device in find_devices()):
        where = "in_place"
    options = {"fast_bytes": slots * model[2]} if slots else {}
    if packed:
        options |= {"experts_pack": str(model[1]), "expert_bytes": 8 * model[2]}
    parts = parts_of(model[0], "cuda", **options)
    seen = status(parts.experts)
    assert seen["mode"] == where, seen["reason"]
    assert answers(parts, together=True) == alone
    if where == "offload":
        found = status(parts.experts)["slots"]
        assert found["slots"] == slots and found["misses"] and found["fetched"] > slots, "copied over the link"
        parts.experts.slots.close()


def test_an_engine_that_users_start_answers_together_as_alone(kernels, model, tmp_path) -> None:
    """`serve --kernels cuda`, over HTTP; a known prompt is not computed again."""
    with serving(model[0], tmp_path / "log", "--kernels", "cuda", "--kv-memory", "4M", "--max-context", "256") as engine:
        engine.wait_ready()
        assert "numerics=cuda-" in engine.log.read_text()
        assert engine.http.get("/v1/experts/status").json()["mode"] in ("resident", "in_place")

        def ask(prompt: object) -> tuple[list[list[int]], int]:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "logprobs": 1, "ignore_eos": True}
            said = engine.http.post("/v1/completions", json=body).json()
            known = said["usage"]["prompt_tokens_details"]["cached_tokens"]
            return [choice["logprobs"]["token_ids"] for choice in said["choices"]], known

        alone = [ask(prompt) for prompt in PROMPTS]
        assert not any(known for _, known in alone)
        together, known = ask(PROMPTS)
        assert together == [tokens for (tokens,), _ in alone] and known > 0
