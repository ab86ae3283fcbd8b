"""The seam on torch.cuda: which calls it makes, in which order, against a made-up runtime; on a device, where there is one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.experts.cuda import Cuda
from engine.experts.layers import Group
from engine.experts.locking import Lock, lock_banks, this_machines
from engine.experts.mapped import drivers_address, in_place, mapped
from engine.experts.pool import bank_bytes, data_of
from engine.experts.streams import Device
from engine.kernels.ops import Quant
from engine.kernels.reference import ReferenceOps
from engine.tiers import Kernels, Source, Ways, run_groups
from tests.engine.experts.tiers import EVEN, EXPERTS, LAYERS, banks, step, stored
from tests.support.cuda import MODES, cuda_kernels, interpreting
from tests.support.late import Late, LateOps


class Runtime:
    """torch.cuda made up: notes what it is asked for, in order."""

    def __init__(self) -> None:
        self.said: list[tuple] = []
        self.now = "default"

    def Stream(self, device):
        return SimpleNamespace(name="copies", wait_event=lambda mark: self.said.append(("copies waits", mark.number)))

    def current_stream(self, device):
        return SimpleNamespace(name=self.now)

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream.name
        yield
        self.now = before

    def Event(self, blocking=False):
        number = sum(said[0] == "record" for said in self.said)

        def record(stream):
            self.said.append(("record", stream.name, "blocking" if blocking else "spinning"))

        return SimpleNamespace(number=number, record=record, synchronize=lambda: self.said.append(("wait", number)))

    def synchronize(self, device):
        self.said.append(("wait for all", str(device)))

    def empty_cache(self):
        self.said.append(("give back",))

    def mem_get_info(self, device):
        return 3, 4


class Noted:
    """A tensor that is only copied to."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime, self._name = runtime, name

    def copy_(self, source, non_blocking=False):
        self._runtime.said.append(("copy", self._name, self._runtime.now, non_blocking))


def test_a_copy_is_asynchronous_in_the_stream_of_copies_between_its_marks() -> None:
    runtime = Runtime()
    device = Cuda(0, runtime)
    before = device.mark()
    landed = device.copy([(Noted(runtime, "gate_up"), None), (Noted(runtime, "down"), None)], [before])
    landed.synchronize()
    assert runtime.said == [
        ("record", "default", "spinning"),
        ("copies waits", 0),
        ("copy", "gate_up", "copies", True),
        ("copy", "down", "copies", True),
        ("record", "copies", "blocking"),
        ("wait", 1),
    ]


def test_what_goes_to_the_host_is_waited_for_in_the_stream_of_kernels() -> None:
    runtime = Runtime()
    new = SimpleNamespace(empty=lambda shape, dtype, pin_memory: Noted(runtime, f"{shape} pinned {pin_memory}"))
    Cuda(0, runtime, new).to_host(torch.ones(2, 3))
    assert runtime.said == [
        ("copy", "(2, 3) pinned True", "default", True),
        ("record", "default", "spinning"),
        ("wait", 0),
    ]


def test_memory_of_a_full_device_and_memory_given_back() -> None:
    runtime = Runtime()

    def full(shape, dtype, device=None, pin_memory=False):
        raise torch.OutOfMemoryError("full") if device else RuntimeError("CUDA error: out of memory")

    device = Cuda(1, runtime, SimpleNamespace(empty=full))
    with pytest.raises(MemoryError, match="the device has no room"):
        device.empty((2, 3), torch.bfloat16)
    with pytest.raises(MemoryError, match="cannot be page-locked"):
        device.pinned(8)
    device.finish()
    assert runtime.said == [("wait for all", "cuda:1"), ("give back",)] and device.memory() == (3, 4)


# --- one memory


def as_tensor(data, device):
    """Reads the interface as torch's own does, of memory that is in one place."""
    assert device == "cuda"
    found = data.__cuda_array_interface__
    assert (found["typestr"], found["strides"], found["version"]) == ("|u1", None, 3) and not found["data"][1]
    memory = (ctypes.c_uint8 * found["shape"][0]).from_address(found["data"][0])
    return torch.frombuffer(memory, dtype=torch.uint8)


def one_memory(asked: list[int]) -> SimpleNamespace:
    """A made-up driver that maps host memory where it is."""

    def pointer(found, host, flags):
        asked.append(host)
        found._obj.value = host
        return 0

    return SimpleNamespace(cuMemHostGetDevicePointer_v2=Function(pointer))


def test_experts_on_one_memory_are_tensors_of_the_device_on_the_same_bytes() -> None:
    pool = [*banks(ReferenceOps(), "bf16", 1), *banks(ReferenceOps(), "Q8_0", 1)]
    asked: list[int] = []
    there = mapped(pool, drivers_address(one_memory(asked)), SimpleNamespace(as_tensor=as_tensor))
    assert asked == [data_of(w).data_ptr() for bank in pool for w in (bank.gate_up, bank.down)]
    for bank, own in zip(there, pool, strict=True):
        for alias, weight in ((bank.gate_up, own.gate_up), (bank.down, own.down)):
            assert data_of(alias).data_ptr() == data_of(weight).data_ptr() and alias.shape == weight.shape
            assert data_of(alias).dtype == data_of(weight).dtype and isinstance(alias, Quant) == isinstance(weight, Quant)


class Function:
    """A function of a C library: takes types to be set on it."""

    def __init__(self, call) -> None:
        self._call = call

    def __call__(self, *arguments):
        return self._call(*arguments)


def test_on_one_memory_a_device_computes_on_the_loaded_experts_and_copies_nothing(monkeypatch) -> None:
    pool, generator, ops = banks(ReferenceOps(), "f32"), torch.Generator().manual_seed(0), ReferenceOps()
    monkeypatch.setattr("engine.experts.mapped.torch.as_tensor", as_tensor)
    address = drivers_address(one_memory([]))
    experts = in_place(pool, ops, ("made up", lambda address, size: ""), address)
    call = step(generator, 4)
    for _ in range(2):
        assert torch.equal(experts.run(1, *call), ops.moe(*call, pool[1].gate_up, pool[1].down, "silu"))
        pool[1].gate_up.mul_(2)  # what lies in host memory is what is computed with
    with pytest.raises(OSError, match="cannot be registered with the device .no more.: raise the limit"):
        in_place(pool, ops, ("made up", lambda address, size: "no more"), address)


def test_host_memory_that_the_device_cannot_see_is_refused() -> None:
    driver = SimpleNamespace(cuMemHostGetDevicePointer_v2=Function(lambda *_: 1))
    with pytest.raises(OSError, match="error 1.: is it registered"):
        mapped(banks(ReferenceOps(), "f32", 1), drivers_address(driver))


# --- on a device


@pytest.fixture
def gpu() -> Cuda:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Cuda(torch.cuda.current_device())


@pytest.mark.gpu
def test_bytes_come_and_go_on_a_gpu(gpu: Cuda) -> None:
    source = gpu.pinned(8 << 20)
    source.copy_(torch.randint(0, 256, (8 << 20,), dtype=torch.uint8))
    to, back = gpu.empty((8 << 20,), torch.uint8), gpu.pinned(8 << 20)
    landed = gpu.copy([(to, source)], [gpu.mark()])
    gpu.copy([(back, to)], [landed]).synchronize()
    assert torch.equal(back, source)
    (there,) = gpu.to_device(torch.arange(5))
    assert torch.equal(gpu.to_host(there + 1)[0], torch.arange(1, 6))


@pytest.mark.gpu
def test_registered_experts_are_seen_by_a_gpu_where_they_lie(gpu: Cuda) -> None:
    weight = stored(torch.randn(4, 64, 64), "bf16")
    pool = [type(b)(weight, weight.clone(), "silu") for b in banks(ReferenceOps(), "f32", 1)]
    found = lock_banks(pool, 1 << 40, this_machines())
    assert found.by == "cudaHostRegister" and found.bytes == bank_bytes(pool[0])
    (there,) = mapped(pool, drivers_address())
    assert there.gate_up.is_cuda and torch.equal(there.gate_up.cpu(), weight)
    weight.zero_()
    torch.cuda.synchronize()
    assert not there.gate_up.any()


# --- slots behind a link, with the kernels of the GPU set: in the interpreter on a device made up, or on a GPU over its real link


@pytest.fixture(params=MODES)
def linked(request) -> Iterator[tuple[Device, Any, Any, tuple[str, Lock]]]:
    """The device, the kernels that compute on it, what computes on all experts for comparison, and who page-locks."""
    kernels = cuda_kernels(request.param)
    if kernels.device.type == "cuda":
        yield Cuda(kernels.device.index), kernels, kernels, this_machines()
        return
    late = Late()
    yield late, LateOps(kernels, late), kernels, ("made up", late.register)
    late.check()


def whole_pool(kernels, bank, call) -> torch.Tensor:
    """What the kernels give with all experts where they compute; in host memory."""
    weights = [kernels.prepare(weight) for weight in (bank.gate_up, bank.down)]
    return kernels.moe(*(tensor.to(kernels.device) for tensor in call), *weights, bank.act).cpu()


ON_A_GPU = [pytest.param(kind, slots, rows, marks=pytest.mark.gpu) for kind, slots, rows in (
    ("bf16", LAYERS * EXPERTS, 25), ("bf16", EXPERTS, 25), ("Q8_0", EXPERTS, 25), ("Q4_K", 2, 8), ("F8_E4M3", EXPERTS, 8),
)]  # fmt: skip


@pytest.mark.parametrize(("kind", "slots", "rows"), [("bf16", 5, 3), *ON_A_GPU])
def test_slots_give_the_bits_of_all_experts_and_the_processor_computes_nothing(linked, kind: str, slots: int, rows: int) -> None:
    device, ops, kernels, lock = linked
    if rows > 3 and interpreting():
        pytest.skip("too many rows for the interpreter: ./ops/gpu_test")
    pool = banks(ReferenceOps(), kind, 1 if interpreting() else LAYERS)
    generator, kernels_of = torch.Generator().manual_seed(slots), Kernels(ops, device, ReferenceOps())
    assert not kernels_of.one_arithmetic, "the processor may compute nothing beside them"
    assert not lock_banks(pool, 1 << 40, lock).short
    groups = [Group("offload", tuple(range(len(pool))), slots, "")]
    experts = run_groups(groups, Source(dict(enumerate(pool))), kernels_of, Ways(EVEN))
    for batch in sorted({1, min(4, rows), rows}):
        for layer, bank in enumerate(pool):
            call = step(generator, batch, kind)
            (got,) = device.to_host(experts.run(layer, *device.to_device(*call)))
            assert torch.equal(got, whole_pool(kernels, bank, call))
    assert experts.status()["misses"] and experts.counts["copy_failed"] == 0
    experts.close()
