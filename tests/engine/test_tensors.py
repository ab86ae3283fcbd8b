"""Tensors without torch: what of torch they stand for, and that the decoder computes the same bits on both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine import lean, tensors
from engine.kernels.ops import KVLayer, Quant, Segments, StateLayer
from engine.models.load import load_model
from engine.models.spec import AttentionSpec, DeltaNetSpec
from engine.nn.batch import Batch, Cache, allocate_cache
from engine.nn.decoder import Decoder
from engine.prefix.states import TensorStorage
from tests.oracle.test_gguf import SHAPES
from tests.support.steps import Driver
from tests.support.tiny import make_tiny
from tests.support.tiny_gguf import write_gguf

ROOT = Path(__file__).resolve().parents[2]


def bare(tensor: torch.Tensor | None) -> tensors.Tensor | None:
    """The same memory without torch."""
    if tensor is None:
        return None
    if tensor.dtype is torch.bfloat16:
        return tensors.from_numpy(tensor.view(torch.uint8).numpy()).view(tensors.bfloat16)
    return tensors.from_numpy(tensor.numpy())


def same(ours: tensors.Tensor, theirs: torch.Tensor) -> bool:
    """Shape, type, how it lies in memory, and every bit."""

    def described(t) -> list:
        steps = [step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]
        return [tuple(t.shape), str(t.dtype), t.is_contiguous(), steps, t.numel(), t.nbytes, t.element_size(), t.dim()]

    return described(ours) == described(theirs) and torch.equal(tensors.to_torch(ours), theirs)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_and_copies_are_those_of_torch(dtype) -> None:
    theirs = torch.randn(6, 4, 8).to(dtype)
    ours = bare(theirs)
    index = torch.tensor([3, 0, 3], dtype=torch.int32)
    for change in (
        lambda t: t,
        lambda t: t[2],
        lambda t: t[1:4, :, 2:6],
        lambda t: t[:, None, 1:],
        lambda t: t[[4, 1]],
        lambda t: t.view(-1, 8),
        lambda t: t.view((3, 2, 32)),
        lambda t: t.reshape(4, -1),
        lambda t: t.transpose(1, 2),
        lambda t: t.transpose(1, 2).contiguous(),
        lambda t: t.transpose(0, 1).reshape(4, 48),
        lambda t: t.flatten(),
        lambda t: t.split(4)[1],
        lambda t: t.split_with_sizes((3, 5), 2)[1],
        lambda t: t.split([1, 2, 3])[2],
        lambda t: t.as_strided((2, 3), (32, 8)),
        lambda t: t.float(),
        lambda t: t.clone(),
        lambda t: t[:, :1].expand_as(t).contiguous(),
        lambda t: t.new_empty(2, 3).zero_(),
    ):
        assert same(change(ours), change(theirs))
    assert same(ours.index_select(0, bare(index)), theirs.index_select(0, index))
    assert same(tensors.cat([ours, ours[:, :2]], 1), torch.cat([theirs, theirs[:, :2]], 1))
    assert same(ours.view(tensors.uint8), theirs.view(torch.uint8))
    assert ours.data_ptr() == theirs.data_ptr() and ours[3:].data_ptr() == theirs[3:].data_ptr()
    assert ours[3:].untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
    assert ours[3:].untyped_storage().nbytes() == theirs.untyped_storage().nbytes()


def test_arithmetic_is_float32_and_nothing_else() -> None:
    theirs = torch.randn(5, 3)
    ours = bare(theirs)
    assert same(1.0 + ours, 1.0 + theirs) and same(ours * 0.3, theirs * 0.3) and same(ours + ours[:1], theirs + theirs[:1])
    ours[1:3] = ours[3:]
    assert torch.equal(theirs[1:3], theirs[3:])  # one memory
    half = tensors.empty(3, dtype=tensors.bfloat16)
    with pytest.raises(TypeError, match="nothing is computed on torch.bfloat16"):
        half + 1.0
    with pytest.raises(TypeError, match="is not copied"):
        half.copy_(tensors.empty(3))


def test_large_copies_are_shared_between_threads_and_leave_nothing_out(monkeypatch) -> None:
    monkeypatch.setattr(tensors, "SHARED_COPY", 1)
    source = torch.arange(3 * 5 * 7, dtype=torch.int32).view(3, 5, 7)
    with tensors.copiers.threads(2):
        for change in (lambda t: t, lambda t: t[:1], lambda t: t.transpose(0, 2), lambda t: t[0, 0], lambda t: t[:, 1:3]):
            wanted = change(source)
            assert torch.equal(
                tensors.to_torch(tensors.empty(wanted.shape, dtype=tensors.int32).copy_(change(bare(source)))), wanted
            )
    assert tensors.copiers.count == 1


def test_fresh_memory_begins_on_a_cache_line() -> None:
    assert all(tensors.empty(n, 3).data_ptr() % tensors.ALIGNED == 0 for n in range(1, 20))


class Bare:
    """A decoder without torch under a driver with."""

    def __init__(self, decoder: Decoder) -> None:
        self.spec, self._decoder = decoder.spec, decoder

    def forward(self, batch: Batch, cache: Cache) -> torch.Tensor:
        seg = batch.segments
        segments = Segments(*(bare(part) for part in (seg.cu, seg.start, seg.pages, seg.slot)))
        kv = tuple(layer and KVLayer(bare(layer.k), bare(layer.v)) for layer in cache.kv)
        states = tuple(layer and StateLayer(bare(layer.conv), bare(layer.s)) for layer in cache.states)
        rows = Batch(bare(batch.tokens), bare(batch.positions), segments, bare(batch.logit_rows))
        return torch.from_numpy(self._decoder.forward(rows, Cache(kv, states)).numpy())


def check_both(path: Path, mapped: bool) -> None:
    ops = pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here").CpuOps(1)
    with_torch, without = (load_model(path, ops, mapped=mapped, library=library) for library in (torch, tensors))
    assert without.info == with_torch.info and without.mapped == with_torch.mapped
    for name, weight in without.weights.items():
        data, wanted = (w.data if isinstance(w, Quant) else w for w in (weight, with_torch.weights[name]))
        assert isinstance(data, tensors.Tensor) and same(data, wanted), name
    decoders = [Decoder(model.spec, model.weights, ops) for model in (with_torch, without)]
    one, other = (Driver(decoder, torch.bfloat16) for decoder in (decoders[0], Bare(decoders[1])))
    prompt = np.random.default_rng(3).integers(3, 150, 90).tolist()
    assert torch.equal(*(driver.chunks(2, prompt, [1, 60, 7]) for driver in (one, other)))
    for a, b in zip(TensorStorage(one.cache).save(0), TensorStorage(other.cache).save(0), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next", "llama_tied_bias", "yarn_rope", "deepseek_v3", "glm4_moe"])
def test_safetensors_without_torch(kind, tmp_path) -> None:
    make_tiny(kind, tmp_path, torch.bfloat16)
    check_both(tmp_path, mapped=True)


@pytest.mark.parametrize("stored", [Type.Q8_0, Type.F16], ids=lambda t: t.name)
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text", "llama", "deepseek_v3"])
def test_gguf_without_torch(kind, stored, tmp_path) -> None:
    write_gguf(make_tiny(kind, tmp_path / "hf", **SHAPES[kind]), tmp_path / "m.gguf", stored)
    check_both(tmp_path / "m.gguf", mapped=stored is Type.Q8_0)


def test_a_loaded_model_becomes_one_of_torch_without_a_copy(tmp_path) -> None:
    ops = pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here").CpuOps(1)
    make_tiny("qwen3_moe", tmp_path, torch.bfloat16)
    without = load_model(tmp_path, ops, library=tensors)
    turned = without.in_torch()
    for name, weight in without.weights.items():
        assert turned.weights[name].data_ptr() == weight.data_ptr() and same(weight, turned.weights[name])


def test_pages_and_states_without_torch_are_those_of_torch() -> None:
    mixers = [AttentionSpec(4, 2, 8, 1.0, None), DeltaNetSpec(2, 4, 8, 8, 4)]
    spec = type("Spec", (), {"layers": [type("Layer", (), {"mixer": mixer}) for mixer in mixers]})
    theirs = allocate_cache(spec, 6, 3, torch.bfloat16)
    for tensor in (theirs.kv[0].k, theirs.kv[0].v, theirs.states[1].conv, theirs.states[1].s):
        tensor.copy_(torch.randn(tensor.shape))
    ours = allocate_cache(spec, 6, 3, tensors.bfloat16, library=tensors)
    for mine, wanted in ((ours.kv[0].k, theirs.kv[0].k), (ours.kv[0].v, theirs.kv[0].v), (ours.states[1].s, theirs.states[1].s)):
        mine.copy_(bare(wanted))
    ours.states[1].conv.copy_(bare(theirs.states[1].conv))
    one, other = TensorStorage(ours), TensorStorage(theirs)
    sizes = [(s.page_bytes, s.row_bytes, s.state_bytes, s.layout()) for s in (one, other)]
    assert sizes[0] == sizes[1]
    for storage in (one, other):
        storage.copy_page(1, 4)
        storage.load(storage.save(0), 2)
        storage.clear(1)
        rows = b"".join(storage.read_rows([5, 0, 3], 10, 150))
        storage.write_rows([2, 1, 4], 20, 130, memoryview(bytearray(rows)), 7)
        storage.load(storage.unpack(memoryview(bytearray(b"".join(storage.pack(storage.save(2)))))), 1)
        storage.give_back([3])
    for mine, wanted in ((ours.kv[0].k, theirs.kv[0].k), (ours.kv[0].v, theirs.kv[0].v), (ours.states[1].s, theirs.states[1].s)):
        assert same(mine, wanted)
    assert same(ours.states[1].conv, theirs.states[1].conv)


WORKER = """
import os, sys
from engine.process import import_worker
import_worker()
assert "OPENBLAS_NUM_THREADS" not in os.environ and len(os.listdir("/proc/self/task")) == 1, "numpy's BLAS has threads"
from engine.kernels.cpu import CpuOps
CpuOps(1)
never = {"torch", "transformers", "tokenizers", "llguidance", "jinja2", "yaml"}
print(sorted({name.partition(".")[0] for name in sys.modules} & never))
"""


PARTS = """
import engine.models.gguf, gguf, sys
assert "gguf.gguf_writer" not in sys.modules
from gguf.constants import GGMLQuantizationType
assert gguf.GGMLQuantizationType is GGMLQuantizationType and gguf.quants.dequantize and gguf.GGUFWriter
from gguf import MODEL_ARCH
print(type(gguf).__name__, gguf.__file__, hasattr(gguf, "nothing"))
"""


def test_a_package_of_which_modules_were_taken_is_whole_when_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True, check=True, cwd=ROOT)
    kind, file, nothing = done.stdout.split()
    assert (kind, Path(file).name, nothing) == ("module", "__init__.py", "False")


def test_nothing_of_the_engine_process_imports_torch_or_text_by_itself() -> None:
    pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    assert done.stdout == "[]\n"


def test_threads_that_torch_may_use_are_told_when_it_comes() -> None:
    comes = lean._Later()
    comes.threads = 3  # as `use_threads` leaves it before anybody has asked for torch
    try:
        assert comes.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
