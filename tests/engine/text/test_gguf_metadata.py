"""GGUF metadata equals what the gguf package reads; a damaged file gives one error and no other."""

import contextlib

import gguf
import numpy as np
import pytest

from engine.text.gguf_metadata import GgufError, read_metadata


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("héllo")
    writer.add_token_list(["a", "b c", "", "é中"])
    writer.add_token_scores([0.5, -1.25, 0.0, 3.0])
    writer.add_token_types([1, 2, 3, 6])
    writer.add_bool("x.flag", True)
    writer.add_float64("x.double", 1e300)
    writer.add_int64("x.negative", -5)
    writer.add_array("x.nested", [[1, 2], [3, 4]])
    writer.add_tensor("t", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_equals_the_gguf_package(file):
    truth = {k: f.contents() for k, f in gguf.GGUFReader(file).fields.items() if not k.startswith("GGUF.") and k != "x.nested"}
    ours = read_metadata(file)
    assert ours.pop("x.nested") == [[1, 2], [3, 4]]
    assert ours == truth and ours["tokenizer.ggml.tokens"] == ["a", "b c", "", "é中"]
    assert read_metadata(file, without=["tokenizer.ggml.tokens"]) == {**read_metadata(file), "tokenizer.ggml.tokens": []}
    assert set(read_metadata(file, "tokenizer.")) == {k for k in truth if k.startswith("tokenizer.")}


def test_every_truncation_and_flipped_byte_is_an_error_or_a_value(file, tmp_path):
    whole = file.read_bytes()
    damaged = tmp_path / "d.gguf"
    for size in range(0, len(whole) - 200, 7):
        damaged.write_bytes(whole[:size])
        for without in ((), ["tokenizer.ggml.tokens"]):
            with pytest.raises(GgufError):
                read_metadata(damaged, without=without)
    for at in range(0, len(whole) - 200, 5):
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        for without in ((), ["tokenizer.ggml.tokens"]):
            with contextlib.suppress(GgufError):
                read_metadata(damaged, without=without)
