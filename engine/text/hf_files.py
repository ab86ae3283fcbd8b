"""Reads tokenizer files of a Hugging Face directory: tokenizer.json, tokenizer_config.json, generation_config.json, templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.text.tokenizer import SpecialToken, TokenizerError, TokenizerFiles, is_structural


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise TokenizerError(f"{path}: cannot be read ({e}); copy the file again") from None
    if not isinstance(data, dict):
        raise TokenizerError(f"{path}: holds no JSON object; copy the file again")
    return data


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise TokenizerError(f"{path}: cannot be read ({e}); copy the file again") from None


def read_hf(path: Path) -> TokenizerFiles:
    """Raises TokenizerError when tokenizer.json is unreadable or of a kind the `tokenizers` library does not know."""
    content = _json(path / "tokenizer.json")
    config = _json(path / "tokenizer_config.json")
    if "model" not in content:
        raise TokenizerError(f"{path / 'tokenizer.json'}: has no `model`; it is no tokenizers file")
    specials, plain = [], []
    for token in content.get("added_tokens") or []:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not isinstance(token.get("id"), int):
            raise TokenizerError(f"{path / 'tokenizer.json'}: added_tokens holds {json.dumps(token)[:80]}; copy the file again")
        if is_structural(token["content"], token.get("special", False)):
            flags = {k: bool(token.get(k)) for k in ("lstrip", "rstrip")}
            specials.append(SpecialToken(token["id"], token["content"], bool(token.get("special")), **flags))
        else:
            plain.append(token)
    ids = {s.text: s.id for s in specials}
    vocab = content["model"].get("vocab")
    if isinstance(vocab, dict):
        # A special token inside the vocabulary could still be produced from plain text (`ignore_merges`): take it out.
        for text in ids:
            vocab.pop(text, None)
    content["added_tokens"] = plain
    add_bos = _adds_bos(content, config)
    content["post_processor"] = None
    eos = _eos_ids(path, config, ids)
    bos = ids.get(_token_text(config.get("bos_token")) or "")
    named = {key: text for key, value in config.items() if key.endswith("_token") and (text := _token_text(value)) is not None}
    templates = read_templates(path, config)
    return TokenizerFiles(content, tuple(specials), bos, eos, add_bos and bos is not None, templates, named, source=str(path))


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _adds_bos(content: dict[str, Any], config: dict[str, Any]) -> bool:
    if isinstance(config.get("add_bos_token"), bool):
        return config["add_bos_token"]
    bos = _token_text(config.get("bos_token"))
    post = content.get("post_processor") or {}
    steps = [p for p in post.get("processors", [post]) if p.get("type") == "TemplateProcessing"]
    return any(item.get("SpecialToken", {}).get("id") == bos for p in steps for item in p.get("single", [])[:1])


def _eos_ids(path: Path, config: dict[str, Any], ids: dict[str, int]) -> tuple[int, ...]:
    found: list[int] = []
    model = _json(path / "config.json")
    sources = [_json(path / "generation_config.json"), model, model.get("text_config") or {}]
    for source in sources:
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    text = _token_text(config.get("eos_token"))
    if text in ids:
        found.append(ids[text])
    return tuple(dict.fromkeys(found))


def read_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. A chat_template.jinja file wins over the one inside tokenizer_config.json, as in transformers."""
    value = config.get("chat_template")
    if isinstance(value, str):
        out = {"default": value}
    elif isinstance(value, list):
        out = {t["name"]: t["template"] for t in value if isinstance(t, dict) and "name" in t and "template" in t}
    else:
        out = {}
    if (path / "chat_template.json").exists():
        legacy = _json(path / "chat_template.json").get("chat_template")
        out |= {"default": legacy} if isinstance(legacy, str) else {}
    if (path / "chat_template.jinja").exists():
        out["default"] = _text(path / "chat_template.jinja")
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        out[extra.stem] = _text(extra)
    return out
