"""Write a checkpoint directory that transformers (and the engine) load: weights, config, tokenizer, template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from .shape import Shape
from .text import HERE


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(out: Path, tok: Tokenizer) -> None:
    tok.save(str(out / "tokenizer.json"))
    template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32768,
            "chat_template": template,
        },
    )
    shutil.copy(HERE / "chat_template.jinja", out / "chat_template.jinja")


def write_checkpoint(out: Path, weights: dict[str, torch.Tensor], shape: Shape, tok: Tokenizer) -> None:
    """`weights` carry transformers' names; they are stored in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    eos, pad = tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")
    write_json(out / "config.json", shape.hf_config(eos, pad))
    write_json(out / "generation_config.json", {"do_sample": False, "eos_token_id": [eos, pad], "pad_token_id": pad})
    write_tokenizer(out, tok)
    stored = {name: w.detach().to(torch.bfloat16).contiguous() for name, w in weights.items()}
    partial = out / "model.safetensors.part"
    save_file(stored, str(partial), metadata={"format": "pt"})
    partial.rename(out / "model.safetensors")  # readers never see half a file
