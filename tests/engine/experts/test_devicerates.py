"""What `bench bw` measures on a device, and what the plan makes of it: on one that is made up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from engine import build
from engine.cli import cli
from engine.experts import calibrate, cuda, devicerates
from engine.experts.budget import Hardware, Load
from engine.experts.calibrate import DeviceRates, Figure, FormatRates, KernelRates, Profile, read_profile, save_profile
from engine.experts.devicerates import measure_device
from engine.experts.devices import Device
from engine.experts.identity import Machine, device_power, kernel_version
from engine.experts.placement import place
from engine.experts.split import Rates
from engine.kernels.reference import ReferenceOps
from engine.plan import on_device
from tests.engine.experts.tiers import kernels
from tests.support.cuda import cuda_kernels
from tests.support.late import Late, LateOps
from tests.support.tiny import make_tiny

HERE = Machine("a processor", 8, 64 << 30, "NVIDIA X", "driver 1", "performance, gpu 450.00 W", "cuda-sm90-1")


def figure(rate: float) -> Figure:
    return Figure(rate, 0, True)


RATES = DeviceRates(
    "NVIDIA X",
    {64 << 10: figure(5e9), 2 << 20: figure(20e9), 16 << 20: figure(25e9)},
    figure(900e9),
    {"Q4_K": KernelRates(figure(700e9), figure(650e9), figure(18e9))},
)


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    """Rounds that take no time: what is measured matters here, not how fast it is."""
    monkeypatch.setattr(calibrate, "ROUND_S", 0.001)
    monkeypatch.setattr(calibrate, "ROUNDS", 3)
    monkeypatch.setattr(calibrate.settle, "__defaults__", (3,))
    for name, value in (("SIZES", (4 << 10, 64 << 10)), ("PIECE", 64 << 10), ("TOKENS", 2), ("HIDDEN", 256), ("INTER", 256)):
        monkeypatch.setattr(devicerates, name, value)
    monkeypatch.setattr(devicerates.Copies.__init__, "__defaults__", (1 << 20,))
    monkeypatch.setattr(devicerates.measure_read, "__defaults__", (1 << 20,))


@pytest.fixture(params=["made up", pytest.param("gpu", marks=pytest.mark.gpu)])
def measured(request) -> Iterator[tuple]:
    """A device, and kernels that compute on it."""
    if request.param == "gpu":
        ops = cuda_kernels("gpu")
        yield cuda.device_of(ops), ops
        return
    late = Late()
    yield late, LateOps(kernels("cpu"), late)
    late.check()


def test_link_by_size_memory_and_kernels_alone_and_beside_copies_without_a_race(measured) -> None:
    said: list[str] = []
    found = measure_device(*measured, "device", ["BF16", "Q4_K"], lambda name, _: said.append(name), 1 << 20)
    assert sorted(found.link) == [4 << 10, 64 << 10] and found.read.rate > 0 and sorted(found.formats) == ["BF16", "Q4_K"]
    assert all(min(own.alone.rate, own.shared.rate, own.link.rate) > 0 for own in found.formats.values())
    assert "copies of 4 KiB to it" in said and "copies beside Q4_K" in said


def test_a_profile_with_a_device_is_kept_and_read(tmp_path) -> None:
    formats = {"Q4_K": FormatRates(figure(50e9), figure(40e9))}
    profile = Profile(HERE, figure(60e9), None, formats, None, time.time(), RATES)
    save_profile(profile, tmp_path / "kept.json")
    assert read_profile(tmp_path / "kept.json", HERE, time.time()) == profile
    plain = replace(profile, device=None)
    save_profile(plain, tmp_path / "kept.json")
    assert read_profile(tmp_path / "kept.json", HERE, time.time()) == plain


def test_the_link_counts_with_copies_as_large_as_experts_and_with_kernels_beside_them() -> None:
    assert [RATES.link_of(size) for size in (1, 3 << 20, 40 << 20)] == [5e9, 20e9, 25e9]
    profile = Profile(HERE, figure(60e9), None, {"Q4_K": FormatRates(figure(50e9), figure(40e9))}, None, 0.0, RATES)
    assert profile.device_rates("Q4_K", 3 << 20) == Rates(18e9, 50e9, 32e9), "beside kernels the link is slower"
    assert profile.device_rates("Q4_K", 100) == Rates(5e9, 50e9, 45e9)
    assert profile.device_rates("BF16", 100) is None and replace(profile, device=None).device_rates("Q4_K", 100) is None


def test_the_power_limit_of_a_device_is_part_of_the_machine() -> None:
    assert device_power(lambda command: "450.00 W\n600.00 W\n") == "gpu 450.00 W, gpu 600.00 W"

    def missing(command: list[str]) -> str:
        raise OSError("no such file")

    assert device_power(missing) == "" and HERE.differs(replace(HERE, power="performance, gpu 300.00 W"))
    assert kernel_version(SimpleNamespace(name="cuda", numerics="cuda-sm90-1")) == "cuda-cuda-sm90-1"


def test_bench_bw_measures_the_device_that_the_kernels_compute_on(tmp_path, monkeypatch) -> None:
    late = Late()
    late.name = "made up"
    monkeypatch.setattr(cuda, "device_of", lambda ops: late)
    monkeypatch.setattr(build, "choose_kernels", lambda name, threads: ReferenceOps() if name == "cpu" else there)
    there = LateOps(kernels("cpu"), late)
    monkeypatch.setattr(calibrate.measure_format, "__defaults__", (1 << 20,))
    monkeypatch.setattr(devicerates.measure_device, "__defaults__", (1 << 20,))
    monkeypatch.setattr(calibrate, "READ_BYTES", 1 << 20)
    done = CliRunner().invoke(cli, ["bench", "bw", "--format", "BF16", "--profile", str(tmp_path / "kept.json")])
    assert done.exit_code == 0, done.output
    assert "made up memory" in done.output and "BF16 experts on it" in done.output
    late.check()
    assert '"device": {' in (tmp_path / "kept.json").read_text()


def test_the_devices_kernels_name_their_device() -> None:
    cpu, gpu = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=torch.device("cuda", 1))
    runtime = SimpleNamespace(Stream=lambda device: None, get_device_name=str)
    assert cuda.device_of(ReferenceOps()) is None and cuda.device_of(cpu) is None
    assert cuda.device_of(gpu, runtime).name == "cuda:1"


# --- what the plan makes of it

GIB = 1 << 30
PROFILE = Profile(HERE, figure(60e9), None, {"Q4_K": FormatRates(figure(50e9), figure(40e9))}, None, 0.0, RATES)
# 48 layers of 128 experts of 2.5 MiB
LOAD = Load(dense=2 * GIB, cache=GIB, layers=48, experts=128, top_k=8, expert_bytes=5 << 19)
MACHINE = Hardware(host=60 * GIB, host_rate=60e9, expert_rate=50e9)
CARD = Device("NVIDIA X", 24 * GIB, False, 25e9)


@pytest.mark.parametrize(("free", "mode"), [(24 * GIB, "resident"), (12 * GIB, "offload")])
def test_the_plan_counts_with_what_is_free_on_the_device_and_with_its_rates(free: int, mode: str) -> None:
    found = on_device(MACHINE, Late(room=free), (CARD,), PROFILE, "Q4_K", LOAD)
    assert found.fast == free and found.fast_rate == 700e9 and found.rates.link == 18e9 and not found.one_arithmetic
    placement = place(LOAD, found)
    assert placement.mode == mode and "do not add in the same order" in placement.refused["hybrid"]


@pytest.mark.parametrize(("cards", "link"), [((CARD,), CARD.link), ((), MACHINE.host_rate)])
def test_a_link_that_was_not_measured_counts_at_its_nominal_rate_aloud(monkeypatch, caplog, cards, link: float) -> None:
    monkeypatch.setattr("engine.plan.find_devices", lambda: cards)
    found = on_device(MACHINE, Late(room=8 * GIB), cards, None, "Q4_K", LOAD)
    assert found.rates.link == link and place(LOAD, found).mode == "offload"
    assert "device link not measured" in caplog.text and "bench bw" in caplog.text


def test_on_one_memory_the_device_computes_on_the_pool_at_its_own_rate() -> None:
    found = on_device(MACHINE, Late(), (Device("NVIDIA GB10", 0, True, 0.0),), PROFILE, "Q4_K", LOAD)
    placement = place(LOAD, found)
    assert placement.mode == "in_place" and placement.decode_seconds == (LOAD.read + LOAD.routed) / 700e9


def test_the_plan_of_kernels_on_a_device_says_so(tmp_path, monkeypatch) -> None:
    make_tiny("qwen3_moe", tmp_path)
    monkeypatch.setattr("engine.plan.device_of", lambda ops: Late(room=GIB))
    monkeypatch.setattr("engine.plan.find_devices", lambda: (CARD,))
    shown = CliRunner().invoke(cli, ["plan", str(tmp_path), "--kernels", "reference"])
    assert shown.exit_code == 0 and "NVIDIA X, 24 GiB, link 25.0 GB/s: computes" in shown.output
    assert "placement                 resident: everything" in shown.output and "1.00 GiB free" in shown.output
