"""Weights computed on where their file is mapped: the same bits, nothing resident twice, and never a file that changed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from engine import mapped, process
from engine.config import EngineConfig
from engine.kernels.ops import Quant
from engine.mapped import FileChanged, MappedFile, map_file
from engine.models.load import LoadedModel, _add_to_digest, load_model
from engine.models.names import JOINED
from tests.support.tiny import make_tiny
from tests.support.tiny_gguf import write_gguf


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 256)
    return path


def resident(file: MappedFile) -> int:
    """Bytes of it in this process' page tables."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{file.address:08x}-"))
    return next(int(line.split()[1]) << 10 for line in lines[at:] if line.startswith("Rss:"))


def test_writing_to_a_file_is_noticed_and_renaming_another_over_it_is_none_of_our_business(file) -> None:
    found = MappedFile(file)
    other = file.with_suffix(".new")
    other.write_bytes(b"new")
    os.replace(other, file)
    found.intact()
    assert not found.same() and bytes(found.memory[:4]) == b"\0\1\2\3"
    again = MappedFile(file)
    with file.open("r+b") as out:
        out.write(b"NEW")
    os.utime(file, ns=(1, 1))  # the clock of the file system may be too coarse for a test
    with pytest.raises(FileChanged, match="weights was changed while the engine computed on it"):
        again.intact()


def test_a_file_that_was_cut_is_noticed(file) -> None:
    found = MappedFile(file)
    os.truncate(file, 100)
    with pytest.raises(FileChanged):
        found.intact()


def test_what_was_begun_early_is_taken_over_once_and_only_if_it_is_the_same(file, tmp_path) -> None:
    mapped.begin([file, tmp_path / "missing"], room=1 << 30)
    early = map_file(file)
    for reader in early._readers:
        reader.join()
    assert early._readers and resident(early) == early.size and map_file(file) is not early
    mapped.begin([file], room=0)  # more than memory: mapped, but not read ahead
    os.truncate(file, 8192)
    fresh = map_file(file)
    assert fresh.size == 8192 and not fresh._readers


def test_what_was_let_go_of_stays_so_after_reading_ahead(file) -> None:
    found = MappedFile(file)
    found.let_go(5000, 30000)
    found.read_ahead()
    for reader in found._readers:
        reader.join()
    assert resident(found) == found.size - (28672 - 8192)
    assert bytes(found.memory[5000:5010]) == bytes(b % 256 for b in range(5000, 5010))


def test_what_a_start_reads_ahead(tmp_path) -> None:
    def files(**options: object) -> list[str]:
        return [path.name for path in process.files_of(EngineConfig(model=str(tmp_path), **options))]

    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).touch()
    assert files() == ["a.safetensors", "b.safetensors"]
    assert files(experts_pack=str(tmp_path)) == ["experts.bin"]
    assert files(experts_pack=str(tmp_path), expert_bytes=1 << 30) == []


def loaded_both_ways(path: Path) -> tuple[LoadedModel, LoadedModel]:
    ops = pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here").CpuOps(1)
    return load_model(path, ops, mapped=True), load_model(path, ops)


def data_of(weight) -> torch.Tensor:
    return weight.data if isinstance(weight, Quant) else weight


@pytest.mark.parametrize("kind", [Type.BF16, Type.Q8_0])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
def test_a_mapped_gguf_file_has_the_same_weights_and_identity(tmp_path, family, kind) -> None:
    made = make_tiny(family, tmp_path / "hf", hidden_size=64, moe_intermediate_size=64)
    experts = {f"blk.{n}.ffn_{part}_exps": kind for n in range(len(made.model.layers)) for part in ("gate", "up", "down")}
    write_gguf(made, tmp_path / "m.gguf", Type.BF16, others=experts)
    lying, copied = loaded_both_ways(tmp_path / "m.gguf")
    assert lying.info == copied.info
    apart = {name for name in copied.weights.keys() - lying.weights.keys()}
    assert apart and {name.partition(".")[2] for name in apart} <= JOINED.keys(), "joined are only those that are copied"
    assert lying.weights.keys() <= copied.weights.keys()
    (file,) = lying.files
    inside = set()
    for name, weight in lying.weights.items():
        mine, theirs = data_of(weight), data_of(copied.weights[name])
        assert torch.equal(mine.reshape(theirs.shape), theirs), name
        if file.address <= mine.data_ptr() < file.address + file.size:
            inside.add(name.partition(".")[2])
    assert {"moe.gate_up", "moe.down", "attn.q", "attn.k", "attn.v"} <= inside
    assert 0 < lying.mapped < file.size and copied.mapped == 0 and not copied.files


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([8, 300, 3000]))
def test_identity_does_not_tell_whether_parts_are_joined(rows, width) -> None:
    """Parts shorter than the ends that are looked at among them."""
    whole = torch.arange(sum(rows) * width).to(torch.uint8).view(-1, width)
    digests = [hashlib.sha256(), hashlib.sha256()]
    for digest, parts in zip(digests, [[whole], whole.split(rows)], strict=True):
        _add_to_digest(digest, "0.attn.in", [Quant(part, "Q8_0", width) for part in parts])
    assert digests[0].digest() == digests[1].digest()


def test_fused_experts_of_safetensors_stay_in_their_file(tmp_path) -> None:
    make_tiny("qwen3_5_moe_text", tmp_path, torch.bfloat16)
    lying, copied = loaded_both_ways(tmp_path)
    for name, weight in lying.weights.items():
        assert torch.equal(data_of(weight), data_of(copied.weights[name])), name
    assert lying.info == copied.info


LEAN = """
import sys
from engine.lean import import_torch
import_torch()
import torch
left_out = [name for name in sys.modules if name.endswith("._meta_registrations")]
import torch._meta_registrations
import torch.distributed._meta_registrations
there = torch.empty(2, 3, device="meta") @ torch.empty(3, 4, device="meta")
print(left_out, hasattr(torch._meta_registrations, "meta_mm"), tuple(there.shape))
"""


def test_torch_without_its_compilers_kernels_gets_them_when_somebody_asks() -> None:
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] True (2, 4)"
