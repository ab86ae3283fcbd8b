"""The trained demo model against transformers: same greedy tokens, same logits, from trained weights instead of random ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.oracle import assert_close, driver, truth

DEMO = Path(__file__).resolve().parents[2] / "ops" / "demo_model"
PROMPTS = {
    "english": "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "chinese": "<|im_start|>user\n列出 src 目录里的文件<|im_end|>\n<|im_start|>assistant\n<think>\n",
}
ANSWER = 40


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_greedy_text_and_logits(model, kernels, prompt) -> None:
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(prompt, add_special_tokens=False).ids
    want = model.generate(torch.tensor([ids]), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)[0].tolist()
    logits = driver(DEMO, kernels).chunks(0, want, [len(ids), 1])
    assert_close(logits, truth(model, DEMO, kernels, want), kernels.tolerance)
    assert logits[len(ids) - 1 : -1].argmax(1).tolist() == want[len(ids) :]
