"""The plan of a checkpoint before it is loaded, and of the same model once it is."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine import plan as plan_module
from engine.build import build
from engine.cli import cli
from engine.config import EngineConfig
from engine.experts import calibrate, identity
from engine.experts.calibrate import (
    Figure,
    FormatRates,
    Profile,
    Unusable,
    read_profile,
    save_profile,
    settle,
    timed,
    usable_profile,
)
from engine.experts.devices import Device
from engine.experts.identity import Machine, kernel_version, this_machine
from engine.kernels.reference import ReferenceOps, dequantize
from engine.memory import plan_cache
from engine.models import load
from engine.models.errors import ModelError
from engine.models.load import load_model, open_checkpoint, required_bytes
from engine.nn.experts import expert_banks
from engine.plan import POOL, default_profile, host_shape, make_plan, place_loaded, stored_bytes
from engine.user import UserError, parse_size
from tests.engine.experts.tiers import kernels
from tests.support.tiny import make_tiny

HERE = Machine("a processor", 8, 64 << 30, "", "", "performance", "reference")
STEADY = Figure(20e9, 2, True)
PROFILE = Profile(HERE, STEADY, None, {"F32": FormatRates(Figure(10e9, 1, True), Figure(8e9, 1, True))}, None, 1000.0)


@pytest.fixture(scope="module", params=["qwen3_moe_mixed", "qwen3_5_moe_text", "qwen2_moe", "deepseek_v3", "llama"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    make_tiny(request.param, path)
    return path


def test_planned_memory_is_what_loading_takes(checkpoint, tmp_path) -> None:
    ops = ReferenceOps()
    plan = make_plan(open_checkpoint(checkpoint), ops, profile_path=tmp_path / "none.json", available=1 << 30)
    loaded = load_model(checkpoint, ops)
    assert plan.weights == stored_bytes(loaded.weights.values())
    banks = expert_banks(loaded.spec, loaded.weights)
    assert plan.kinds.get(POOL, 0) == sum(b.gate_up.nbytes + b.down.nbytes for b in banks)
    assert plan.placement.mode == "in_place" and plan.load.pool == plan.kinds.get(POOL, 0)
    if banks:
        cache = plan_cache(loaded.spec, ops.kv_dtype, 1 << 30)
        placed = place_loaded(loaded, ops, cache, host_shape(banks)).status()
        assert placed["mode"] == "in_place" and placed["bytes_per_token"] == plan.load.read + plan.load.routed
        assert placed["expected_decode_tok_s"] is None or placed["profile"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_reads_the_dense_weights_and_its_experts(tmp_path, tied: bool) -> None:
    """Of the embedding table one row, or all of it where it is the output head too."""
    make_tiny("qwen3_moe", tmp_path, tie_word_embeddings=tied)
    plan = make_plan(open_checkpoint(tmp_path), ReferenceOps(), profile_path=tmp_path / "none.json", available=1 << 30)
    pool, embed = plan.kinds[POOL], 160 * 48 * 4
    kv = 2 * 2 * 16 * 3 * 4 * 512  # k and v of two heads of 16 in three layers, float32, at the model's 512 positions
    assert plan.load.routed == pool * 3 // 8 and plan.context == 512
    assert plan.load.read == plan.weights - pool - (0 if tied else embed) + kv


def run(*arguments: str):
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_the_command_prints_memory_placement_and_speed(tmp_path) -> None:
    make_tiny("qwen3_moe", tmp_path)
    profile = tmp_path / "bandwidth.json"
    here = this_machine(kernel_version(ReferenceOps()))
    save_profile(Profile(here, STEADY, None, PROFILE.formats, None, calibrate.time.time()), profile)
    done = run(str(tmp_path), "--kernels", "reference", "--profile", str(profile))
    assert done.exit_code == 0, done.output
    assert all(word in done.output for word in ("routed experts", "in_place", "tok/s alone", "conversations", "available"))
    unmeasured = run(str(tmp_path), "--kernels", "reference", "--profile", str(tmp_path / "no.json"))
    assert unmeasured.exit_code == 0 and "until `moorage engine bench bw` has measured" in unmeasured.output
    as_json = run(str(tmp_path), "--kernels", "reference", "--profile", str(profile), "--json")
    assert '"mode": "in_place"' in as_json.output and '"decode_tok_s": ' in as_json.output


def test_what_other_engines_were_promised_is_not_available(tmp_path, monkeypatch) -> None:
    make_tiny("qwen3_moe", tmp_path)
    monkeypatch.setattr(plan_module, "available_bytes", lambda: 8 << 30)
    monkeypatch.setattr(plan_module, "promised", lambda: 3 << 30)
    shown = run(str(tmp_path), "--kernels", "reference").output
    assert "of 5.00 GiB available" in shown and "3.00 GiB are promised to those that run" in shown
    assert json.loads(run(str(tmp_path), "--kernels", "reference", "--json").output)["promised_to_others"] == 3 << 30
    assert "promised" not in run(str(tmp_path), "--kernels", "reference", "--memory", "8G").output, "asked for by number"


def test_an_accelerator_is_named_and_said_to_be_idle(tmp_path, monkeypatch) -> None:
    make_tiny("qwen3_moe", tmp_path)
    monkeypatch.setattr(plan_module, "find_devices", lambda: (Device("NVIDIA GB10", 0, True, 0.0),))
    shown = run(str(tmp_path), "--kernels", "reference").output
    assert "NVIDIA GB10, one memory with the processor: not used, these kernels compute on the processor" in shown
    assert json.loads(run(str(tmp_path), "--kernels", "reference", "--json").output)["devices"][0]["unified"]


def test_what_does_not_fit_says_how_much_is_short_and_fails(tmp_path) -> None:
    make_tiny("qwen3_moe", tmp_path, num_experts=64, max_position_embeddings=64)
    done = run(str(tmp_path), "--kernels", "reference", "--memory", "1500K")
    assert done.exit_code == 1
    assert "short" in done.output and "would fit with" in done.output and "more memory" in done.output
    assert "or the experts packed into a file (`moorage engine pack`" in done.output
    forced = run(str(tmp_path), "--kernels", "reference", "--mode", "offload")
    assert forced.exit_code == 1 and "offload is impossible here: there is no fast memory" in forced.output


def test_a_pool_larger_than_memory_is_streamed_from_its_pack_as_the_plan_says(tmp_path) -> None:
    """The options the plan prints are those the engine starts with."""
    model, pack = tmp_path / "model", tmp_path / "pack"
    make_tiny("qwen3_moe", model, num_experts=64, max_position_embeddings=64)
    assert CliRunner().invoke(cli, ["pack", str(model), str(pack), "--kernels", "reference"]).exit_code == 0
    arguments = (str(model), "--kernels", "reference", "--memory", "1500K", "--experts-pack", str(pack))
    done = run(*arguments, "--json")
    assert done.exit_code == 0 and json.loads(done.output)["mode"] == "stream"
    shown = run(*arguments)
    assert "all in memory with" in shown.output
    slots, kv = re.search(r"--experts-pack DIRECTORY --expert-memory (\w+) --kv-memory (\w+)", shown.output).groups()
    config = EngineConfig(
        model=str(model), kernels="reference", experts_pack=str(pack), expert_bytes=parse_size(slots), kv_bytes=parse_size(kv)
    )
    parts = build(config, lambda fraction, stage: None)
    assert parts.experts.placement["mode"] == "stream"
    assert parts.experts.slots.capacity < parts.experts.slots.most
    parts.experts.slots.close()


def test_a_model_too_large_to_load_says_when_packing_would_help(tmp_path, monkeypatch) -> None:
    make_tiny("qwen3_moe", tmp_path, num_experts=64)
    need = required_bytes(tmp_path) + load.WORKSPACE
    monkeypatch.setattr(load, "available_bytes", lambda: need - 1)
    with pytest.raises(ModelError, match=r"or pack its experts \(`moorage pack .* DIRECTORY`\) and serve it with --experts-pack"):
        load_model(tmp_path, ReferenceOps())
    monkeypatch.setattr(load, "available_bytes", lambda: load.WORKSPACE)
    with pytest.raises(ModelError, match="take a smaller quantization$"):
        load_model(tmp_path, ReferenceOps())


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--mode", "magic"], "no placement 'magic'"), (["--memory", "lots"], "no amount of memory")]
)
def test_mistakes_are_one_line(tmp_path, arguments: list[str], says: str) -> None:
    make_tiny("llama", tmp_path)
    done = run(str(tmp_path), "--kernels", "reference", *arguments)
    assert isinstance(done.exception, UserError) and says in str(done.exception)


# --- calibration


def test_a_file_that_cannot_be_measured_is_refused_before_anything_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("engine.experts.calibrate.measure_read", lambda ops: 1 / 0)
    small = tmp_path / "small"
    small.write_bytes(bytes(1 << 20))
    for file, why in ((small, "it has 1.0 MiB, at least 128 are needed"), (tmp_path / "none", "No such file")):
        done = CliRunner().invoke(cli, ["bench", "bw", "--file", str(file), "--kernels", "reference"])
        assert isinstance(done.exception, UserError) and why in str(done.exception)


def test_the_rate_of_a_disk_is_that_of_reads_of_pieces_past_the_page_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "ROUND_S", 0.01)
    file = tmp_path / "file"
    file.write_bytes(bytes(calibrate.MIN_PIECES * 4096))
    try:
        assert calibrate.measure_disk(file, 4096).rate > 0
    except OSError as problem:  # a memory file system before Linux 6.6
        assert problem.errno == errno.EINVAL


def test_rounds_are_repeated_until_three_agree_and_the_cold_ones_thrown_away() -> None:
    rates = iter([1.0, 5.0, 9.0, 10.0, 10.1, 9.9])
    assert settle(lambda: next(rates)) == Figure(10.0, 3, True)


def test_a_machine_that_never_settles_is_reported_as_such() -> None:
    rates = iter(float(2**i) for i in range(99))
    found = settle(lambda: next(rates), rounds=7)
    assert found == Figure(32.0, 4, False)


def test_a_round_is_long_enough_for_the_clock() -> None:
    now = iter(i * 0.03 for i in range(99))
    assert timed(lambda: 3, clock=lambda: next(now)) == pytest.approx(3 * 3 / 0.15)


OFTEN = ("BF16", "Q8_0", "Q4_K", "F8_E4M3", "NVFP4_SCALED", "MXFP4", "IQ3_XXS")
FORMATS = ["BF16", "F16", *calibrate.SCALES_AT, *calibrate.OWN]


def test_every_format_that_a_checkpoint_can_have_is_measured() -> None:
    cpu = pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    assert set(calibrate.measurable(cpu.CpuOps(threads=1))) == set(FORMATS)
    # NVFP4 as GGUF files have it is NVFP4_SCALED without the scale of the matrix, and nobody ships experts in float32
    assert cpu.CpuOps(threads=1).quant_types - {"NVFP4", "F32"} <= set(FORMATS)


def test_deepseeks_fp4_is_measured_by_its_own_name(tmp_path, monkeypatch) -> None:
    """Its bytes are MXFP4's (`tests/engine/models/test_scaled.py`); the profile has the name that loading gives them."""
    pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    for name, value in (("ROUND_S", 0.001), ("ROUNDS", 3), ("HIDDEN", 512), ("INTER", 256), ("READ_BYTES", 1 << 20)):
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate.ExpertLoop.__init__, "__defaults__", (1 << 20,))
    monkeypatch.setattr(calibrate.measure_format, "__defaults__", (1 << 20,))
    arguments = ["bench", "bw", "--kernels", "cpu", "--threads", "1", "--profile", str(tmp_path / "p.json")]
    done = CliRunner().invoke(cli, [*arguments, "--format", "ds_fp4", "--format", "MXFP4"])
    assert done.exit_code == 0 and "MXFP4 (DS_FP4) experts" in done.output, done.output
    assert list(json.loads((tmp_path / "p.json").read_text())["formats"]) == ["MXFP4"]
    wrong = CliRunner().invoke(cli, [*arguments, "--format", "int3"])
    assert isinstance(wrong.exception, UserError) and "no kernel for int3" in str(wrong.exception)


@pytest.mark.parametrize("kind", [k if k in OFTEN else pytest.param(k, marks=pytest.mark.slow) for k in FORMATS])
def test_the_real_kernels_are_measured(kind: str, monkeypatch) -> None:
    cpu = pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    monkeypatch.setattr(calibrate, "ROUND_S", 0.001)
    monkeypatch.setattr(calibrate, "ROUNDS", 3)
    monkeypatch.setattr(calibrate, "HIDDEN", 512)
    monkeypatch.setattr(calibrate, "INTER", 256)
    ops = cpu.CpuOps(threads=1)
    assert kind in calibrate.measurable(ops)
    made = calibrate.random_weight(kind, 2, 32, 512)
    values = made.float() if isinstance(made, torch.Tensor) else dequantize(made)
    assert values.shape == (2, 32, 512) and values.isfinite().all() and 0.001 < values.abs().mean() < 100
    loop = calibrate.ExpertLoop(ops, kind, pool_bytes=1 << 20)
    size = sum((w if isinstance(w, torch.Tensor) else w.data).nbytes for w in (loop.gate_up, loop.down))
    assert loop.expert_bytes * 16 == size and loop() == 8 * loop.expert_bytes
    rates, link = calibrate.measure_format(ops, kind, pool_bytes=1 << 20)
    assert min(rates.alone.rate, rates.shared.rate, link.rate) > 0


def test_a_profile_comes_back(tmp_path) -> None:
    path = tmp_path / "deep" / "bandwidth.json"
    save_profile(PROFILE, path)
    assert read_profile(path, HERE, 1000.0 + 86400) == PROFILE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu", "other"),
        ("cores", 4),
        ("memory", 32 << 30),
        ("gpu", "a card"),
        ("driver", "2"),
        ("power", "save"),
        ("kernels", "new"),
    ],
)
def test_a_foreign_profile_is_ignored_aloud(tmp_path, caplog, field: str, value: object) -> None:
    save_profile(PROFILE, tmp_path / "p.json")
    other = Machine(**{**vars(HERE), field: value})
    assert usable_profile(tmp_path / "p.json", other, 1000.0) is None
    assert f"{field}: {getattr(HERE, field)} -> {value}" in caplog.text and "bench bw" in caplog.text


def test_the_machine_is_told_by_what_the_kernel_shows(tmp_path, monkeypatch) -> None:
    """Every one of these changed is another machine."""
    files = {
        "cpuinfo": "processor: 0\nmodel name : Some CPU\n",
        "governor": "powersave\n",
        "nvidia/version": "NVRM 580.1\nGCC 12\n",
    }
    files |= {f"nvidia/gpus/{i}/information": f"Model:   GPU {i}\nIRQ: 1\n" for i in range(2)}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, path in (("CPUINFO", "cpuinfo"), ("GOVERNOR", "governor"), ("NVIDIA", "nvidia")):
        monkeypatch.setattr(identity, name, tmp_path / path)
    monkeypatch.setattr(identity, "device_power", lambda: "gpu 450 W")
    here = this_machine("k")
    assert (here.cpu, here.gpu, here.driver) == ("Some CPU", "GPU 0, GPU 1", "NVRM 580.1")
    assert (here.power, here.kernels, here.cores) == ("powersave, gpu 450 W", "k", len(os.sched_getaffinity(0)))
    assert abs(here.memory - os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) <= 1 << 29


def test_copies_are_under_way_while_kernels_are_measured_beside_them_and_only_then(monkeypatch) -> None:
    under_way, seen, real = [], [], calibrate.Copying

    class Noted(real):
        def __enter__(self):
            under_way.append(self)
            return real.__enter__(self)

        def __exit__(self, *problem: object) -> None:
            real.__exit__(self, *problem)
            under_way.remove(self)
            assert self._moved > 0

    def settled(measure) -> Figure:
        while under_way and not under_way[0]._moved:
            pass  # its thread begins
        seen.append((bool(under_way), measure() > 0))
        return STEADY

    for name, value in (("Copying", Noted), ("settle", settled), ("HIDDEN", 256), ("INTER", 256), ("ROUND_S", 0.001)):
        monkeypatch.setattr(calibrate, name, value)
    calibrate.measure_format(ReferenceOps(), "F32", 1 << 20)
    assert seen == [(False, True), (False, True), (True, True)], "kernels alone, copies alone, kernels beside copies"


def test_native_kernels_are_told_by_their_build(tmp_path, monkeypatch) -> None:
    native = pytest.importorskip("engine._native", reason="the native kernels are not built here")
    ops, said = kernels("cpu"), []
    for content in (b"one", b"another"):
        (tmp_path / "module.so").write_bytes(content)
        monkeypatch.setattr(native, "__file__", str(tmp_path / "module.so"))
        said.append(kernel_version(ops))
    assert said[0] != said[1] and all(text.startswith(f"cpu-{ops.isa}-{ops.threads}-") for text in said)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": {}}', "null", "\x00"])
def test_an_unreadable_profile_is_ignored(tmp_path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(Unusable, match="cannot be read"):
        read_profile(tmp_path / "p.json", HERE, 0.0)


def test_an_old_profile_is_ignored(tmp_path) -> None:
    save_profile(PROFILE, tmp_path / "p.json")
    with pytest.raises(Unusable, match="100 days old"):
        read_profile(tmp_path / "p.json", HERE, 1000.0 + 100 * 86400)
    with pytest.raises(Unusable, match="nothing was measured yet"):
        read_profile(tmp_path / "none.json", HERE, 0.0)


def test_a_user_without_a_home_has_a_place_for_the_profile(monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    assert default_profile().parts[-2:] == ("moorage", "bandwidth.json")
