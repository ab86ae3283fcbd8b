"""A small real tokenizer with the Qwen family's special tokens, and chat templates of each kind, for text and API tests."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

TEMPLATES = Path(__file__).parent / "templates"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "The quick brown fox reads a file and runs the tests. The capital of France is Paris.",
    'def read(path: str) -> str:\n    """Read a file."""\n    with open(path) as f:\n        return f.read()\n',
    '{"name": "read_file", "arguments": {"path": "src/main.py", "limit": 20}}',
    "<function=read_file>\n<parameter=path>\nsrc/main.py\n</parameter>\n</function>",
    "system user assistant tools you are a helpful assistant, think first and answer then.",
    "北京是中国的首都。读取文件并运行测试。",
    "Größe naïve café — “quotes” … 🚀 emoji",
] * 4


@functools.cache
def backend() -> str:
    """tokenizer.json of a 700-token byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(__import__("tokenizers").Regex(QWEN2_SPLIT), "isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=691, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in MARKERS])
    return tokenizer.to_str()


def write_tokenizer(path: Path, template: str | None = "json_calls") -> Path:
    """A Hugging Face directory with tokenizer files only. `template` names a file of tests/support/templates."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(backend(), encoding="utf-8")
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template:
        config["chat_template"] = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def tool(name: str = "read_file", **properties: str) -> dict:
    """A function tool; keyword = parameter, value = its JSON type."""
    schema = {"type": "object", "properties": {k: {"type": v} for k, v in (properties or {"path": "string"}).items()}}
    return {"type": "function", "function": {"name": name, "description": "Read.", "parameters": schema}}
