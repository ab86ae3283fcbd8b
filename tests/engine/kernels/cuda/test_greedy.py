"""Whole models on the GPU kernels: the truth's greedy answers, whatever else runs in a step and however a prompt was cut."""

from __future__ import annotations

import pytest
import torch

from engine.build import BuildError, choose_kernels
from engine.models.load import load_model
from engine.nn.decoder import Decoder
from tests.support.oracle import tokens
from tests.support.steps import Driver
from tests.support.tiny import make_tiny

PROMPTS = tokens(7, seed=1), tokens(3, seed=2)
NEW = 2
SLOW = ["qwen3_5_moe_text", "deepseek_v3"]


def answers(ops, path, chunk: int, together: bool) -> list[list[int]]:
    """Greedy tokens behind two prompts."""
    loaded = load_model(path, ops)
    driver = Driver(Decoder(loaded.spec, loaded.weights, ops), torch.bfloat16, 2, 128, device=ops.device)
    said = [[int(driver.chunks(i, prompt, [chunk])[-1].argmax())] for i, prompt in enumerate(PROMPTS)]
    for _ in range(NEW - 1):
        for step in [{0, 1}] if together else [{0}, {1}]:
            for i, logits in driver.step({i: [said[i][-1]] for i in step}).items():
                said[i].append(int(logits[-1].argmax()))
    return said


@pytest.mark.parametrize(
    ("kind", "layers"), [("qwen3_moe", 1), *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in SLOW)]
)
def test_greedy_answers_are_the_truths(kernels, truth, tmp_path, kind: str, layers: int) -> None:
    make_tiny(kind, tmp_path, torch.bfloat16, num_hidden_layers=layers)
    assert answers(choose_kernels("cuda", 1), tmp_path, 4, together=True) == answers(truth, tmp_path, 64, together=False)


@pytest.mark.slow
def test_logits_have_the_same_bits_in_any_chunks(kernels, tmp_path) -> None:
    make_tiny("qwen3_5_moe_text", tmp_path, torch.bfloat16)
    loaded = load_model(tmp_path, kernels)
    decoder = Decoder(loaded.spec, loaded.weights, kernels)
    drivers = [Driver(decoder, kernels.kv_dtype, sequences=1, device=kernels.device) for _ in range(2)]
    whole, parts = (driver.chunks(0, PROMPTS[0], [size]) for driver, size in zip(drivers, (7, 2), strict=True))
    assert torch.equal(whole, parts)


def test_without_a_device_one_line_says_what_to_do(monkeypatch) -> None:
    from engine.kernels.cuda import device

    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BuildError, match="built without CUDA: install the CUDA build .* or use --kernels cpu"):
        choose_kernels("cuda", 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(BuildError, match="finds no CUDA device: check nvidia-smi and the driver, or use --kernels cpu"):
        choose_kernels("cuda", 1)


def test_what_triton_needs_to_start_kernels_is_looked_for_before_a_model_is_loaded(monkeypatch, tmp_path) -> None:
    """An image without a compiler or Python's headers would fail at its first request."""
    from engine.kernels.cuda import device

    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    include = tmp_path / "include"
    monkeypatch.setattr(device.sysconfig, "get_path", lambda *_: str(include))
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match="finds no C compiler: install gcc and libc6-dev or use --kernels cpu"):
        choose_kernels("cuda", 1)
    monkeypatch.setattr(device.shutil, "which", lambda name: "/usr/bin/gcc")
    with pytest.raises(BuildError, match="finds no Python.h: install python3-dev or use --kernels cpu"):
        choose_kernels("cuda", 1)
    include.mkdir()
    (include / "Python.h").touch()
    assert choose_kernels("cuda", 1).numerics.startswith("cuda-sm90-")
