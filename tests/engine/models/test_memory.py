"""Loading: peak memory, joined matrices, identity, progress."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from engine import hostmem
from engine.experts.pool import Room
from engine.kernels.reference import ReferenceOps
from engine.models import gguf as gguf_file
from engine.models.load import load_model, required_bytes
from engine.models.names import JOINED, joined, unpaired_rows, untiled_rows
from engine.nn.experts import expert_banks
from tests.support.tiny import make_tiny
from tests.support.tiny_gguf import write_gguf

PEAK = """
import sys, torch
from engine.kernels.reference import ReferenceOps
from engine.models.gguf import GgufCheckpoint
from engine.models.load import load_model, required_bytes

class AsStored(ReferenceOps):
    weight_bytes = None
    def prepare(self, weight):
        return weight

def resident(what):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024

load_model(sys.argv[2], AsStored())  # whatever is allocated once is there already
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # peak starts anew
loaded = load_model(sys.argv[1], AsStored())
print(resident("VmHWM") - before, loaded.info.bytes)
"""


def peak_over_weights(big: Path, small: Path) -> float:
    ran = subprocess.run([sys.executable, "-c", PEAK, str(big), str(small)], capture_output=True, text=True, check=True)
    peak, weights = (int(n) for n in ran.stdout.split())
    assert weights > 100 << 20
    return peak / weights


BIG = {"hidden_size": 512, "head_dim": 64, "num_hidden_layers": 12, "num_experts": 12, "moe_intermediate_size": 512}


@pytest.mark.slow
def test_peak_memory_is_the_weights_plus_a_tenth(tmp_path) -> None:
    make_tiny("qwen3_moe", tmp_path / "small", torch.bfloat16)
    make_tiny("qwen3_moe", tmp_path / "big", torch.bfloat16, **BIG)
    assert peak_over_weights(tmp_path / "big", tmp_path / "small") < 1.10


@pytest.mark.slow
def test_peak_memory_of_gguf(tmp_path) -> None:
    write_gguf(make_tiny("qwen3_moe", tmp_path / "hf"), tmp_path / "small.gguf", Type.BF16)
    write_gguf(make_tiny("qwen3_moe", tmp_path / "hf2", torch.bfloat16, **BIG), tmp_path / "big.gguf", Type.BF16)
    assert peak_over_weights(tmp_path / "big.gguf", tmp_path / "small.gguf") < 1.10


HYBRID = {"attn.in", "delta.in", "moe.in"}


@pytest.mark.parametrize(("kind", "wholes"), [("qwen3_5_moe_text", HYBRID), ("deepseek_v3", {"mla.in", "mlp.in", "moe.in"})])
def test_joined_matrices_share_memory_with_their_parts(kind: str, wholes: set[str], tmp_path) -> None:
    make_tiny(kind, tmp_path, torch.bfloat16)
    weights = load_model(tmp_path, ReferenceOps()).weights
    assert {name.partition(".")[2] for name in weights} & set(JOINED) == wholes
    for whole in wholes:
        for layer in [name.partition(".")[0] for name in weights if name.partition(".")[2] == whole]:
            held = weights[f"{layer}.{whole}"]
            parts = [part for part in JOINED[whole] if f"{layer}.{part}" in weights]
            assert torch.equal(held, torch.cat([weights[f"{layer}.{part}"] for part in parts]))
            assert weights[f"{layer}.{parts[0]}"].data_ptr() == held.data_ptr()


def test_matrices_of_different_types_stay_apart() -> None:
    names = ["embed", "0.attn.q", "0.attn.k", "0.attn.v", "0.mlp.gate", "0.mlp.up", "0.mlp.down"]
    kinds = {"0.attn.v": "Q6_K"}
    assert joined(names, lambda name: kinds.get(name, "Q4_K")) == [
        ("embed", ["embed"]),
        ("0.attn.q", ["0.attn.q"]),
        ("0.attn.k", ["0.attn.k"]),
        ("0.attn.v", ["0.attn.v"]),
        ("0.mlp.in", ["0.mlp.gate", "0.mlp.up"]),
        ("0.mlp.down", ["0.mlp.down"]),
    ]


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_row_orders_are_inverses(heads, half, repeat) -> None:
    rows = torch.arange(heads * 2 * half)
    paired = rows.view(heads, 2, half).transpose(1, 2).reshape(-1)
    assert torch.equal(paired[list(unpaired_rows(heads, 2 * half))], rows)
    rows = torch.arange(7 + heads * repeat * half)
    tiled = torch.cat([rows[:7], rows[7:].view(heads, repeat, half).transpose(0, 1).reshape(-1)])
    assert torch.equal(tiled[list(untiled_rows(7, heads, repeat, half))], rows)


def test_identity_tells_weights_and_shapes_apart(tmp_path) -> None:
    def identity(name: str, **changes: object) -> str:
        make_tiny("llama", tmp_path / name, **changes)
        return load_model(tmp_path / name, ReferenceOps()).info.identity

    first = identity("a")
    assert identity("b") == first
    assert len({first, identity("c", seed=1), identity("d", num_attention_heads=2), identity("e", rms_norm_eps=1e-2)}) == 4


def test_progress_reaches_one_and_never_falls(tmp_path) -> None:
    make_tiny("qwen3_moe", tmp_path)
    seen: list[float] = []
    load_model(tmp_path, ReferenceOps(), lambda fraction, stage: seen.append(fraction))
    assert seen[0] == 0 and seen[-1] == pytest.approx(1) and seen == sorted(seen) and len(seen) > 20


def test_required_bytes_counts_what_is_kept(tmp_path) -> None:
    model = make_tiny("llama_tied_bias", tmp_path, torch.bfloat16)
    assert required_bytes(tmp_path) == 2 * sum(p.numel() for p in model.parameters())


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_available_memory_is_the_smallest_limit(tmp_path) -> None:
    meminfo = write(tmp_path / "meminfo", "MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    none = tmp_path / "none"
    assert hostmem.available_bytes(meminfo, none) == 50 * 1024
    write(tmp_path / "v2/memory.max", "40000\n")
    write(tmp_path / "v2/memory.current", "30000\n")
    write(tmp_path / "v2/memory.stat", "anon 5\ninactive_file 1000\nactive_file 400\n")
    assert hostmem.available_bytes(meminfo, tmp_path / "v2") == 11200
    write(tmp_path / "v2/memory.max", "max\n")
    assert hostmem.available_bytes(meminfo, tmp_path / "v2") == 50 * 1024
    write(tmp_path / "v1/memory/memory.limit_in_bytes", "40000\n")
    write(tmp_path / "v1/memory/memory.usage_in_bytes", "30000\n")
    assert hostmem.available_bytes(meminfo, tmp_path / "v1") == 10000
    write(tmp_path / "v1/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 1000\ntotal_active_file 400\n")
    assert hostmem.available_bytes(meminfo, tmp_path / "v1") == 11200
    assert hostmem.available_bytes(none, none) is None
    assert hostmem.total_bytes(meminfo, none) == 100 * 1024 and hostmem.total_bytes(meminfo, tmp_path / "v1") == 40000


def test_files_that_are_computed_on_are_not_available_although_they_are_page_cache(tmp_path) -> None:
    """30000 mapped bytes in a group of 60000: read already or not, used once or often, charged to it or to another."""
    meminfo = write(tmp_path / "meminfo", "MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    group, status = tmp_path / "v2", tmp_path / "status"
    write(group / "memory.max", "60000\n")

    def available(used: int, inactive: int, active: int, resident_kb: int) -> int | None:
        write(group / "memory.current", f"{used}\n")
        write(group / "memory.stat", f"inactive_file {inactive}\nactive_file {active}\n")
        write(status, f"VmRSS: 99 kB\nRssFile: {resident_kb} kB\n")
        return hostmem.available_bytes(meminfo, group, mapped=30000, status=status)

    assert hostmem.available_bytes(meminfo, tmp_path / "none", mapped=30000, status=status) == 50 * 1024 - 30000
    assert available(10000, 0, 0, 0) == 20000  # nothing of it was read yet
    assert available(40000, 30000, 0, 30) == 20000  # all of it
    assert available(40000, 0, 30000, 30) == 20000
    assert available(44000, 34000, 0, 30) == 20000  # and 4000 of another's that can go
    assert available(10000, 0, 0, 30) == 50 * 1024 - 30000  # another group pays for it


@pytest.mark.parametrize(
    ("own", "root", "limit", "used"),
    [
        ("0::/system.slice/moorage.service\n", "", "memory.max", "memory.current"),
        (
            "0::/user/shell\n4:cpu,memory:/system.slice/moorage.service\n",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
    ids=["v2", "v1"],
)
def test_the_limits_of_the_own_group_and_those_above_it_count(tmp_path, own: str, root: str, limit: str, used: str) -> None:
    meminfo, groups = write(tmp_path / "meminfo", "MemTotal: 900 kB\nMemAvailable: 800 kB\n"), write(tmp_path / "own", own)
    slice_ = tmp_path / "cg" / root / "system.slice"
    write(slice_ / limit, "300000\n")
    write(slice_ / used, "50000\n")
    write(slice_ / "moorage.service" / limit, "200000\n")
    write(slice_ / "moorage.service" / used, "40000\n")
    write(slice_ / "other.service" / limit, "1\n")
    write(slice_ / "other.service" / used, "0\n")
    assert hostmem.available_bytes(meminfo, tmp_path / "cg", groups) == 160000
    assert hostmem.total_bytes(meminfo, tmp_path / "cg", groups) == 200000
    write(slice_ / used, "290000\n")
    assert hostmem.available_bytes(meminfo, tmp_path / "cg", groups) == 10000, "the group above is fuller"
    outside = write(tmp_path / "outside", own.replace("/system.slice", "/../elsewhere"))
    assert hostmem.total_bytes(meminfo, tmp_path / "cg", outside) == 900 * 1024
    if not root:
        assert hostmem.pressure_file(tmp_path / "cg", groups) == hostmem.PRESSURE
        for group in (slice_, slice_ / "moorage.service"):
            write(group / "memory.pressure", "")
            assert hostmem.pressure_file(tmp_path / "cg", groups) == group / "memory.pressure"


def test_a_large_vocabulary_is_stepped_over(tmp_path) -> None:
    model = make_tiny("qwen3", tmp_path / "hf")
    words = [f"word{'x' * (i % 7)}" for i in range(20_000)]
    write_gguf(model, tmp_path / "plain.gguf")
    write_gguf(
        model, tmp_path / "vocabulary.gguf", arrays={"tokens": words, "scores": [0.5] * 20_000, "token_type": [1] * 20_000}
    )
    fields = gguf_file._open(tmp_path / "vocabulary.gguf").fields
    assert all(len(fields[f"tokenizer.ggml.{name}"].parts) == 3 for name in ("tokens", "scores", "token_type"))
    plain, vocabulary = (load_model(tmp_path / name, ReferenceOps()) for name in ("plain.gguf", "vocabulary.gguf"))
    assert plain.info.identity == vocabulary.info.identity


def flags_of_mapping(address: int) -> list[str]:
    """VmFlags of the mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(n, 16) for n in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest
    return []


class AsStored(ReferenceOps):
    weight_bytes = None

    def prepare(self, weight):
        return weight


needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)


@needs_huge_pages
def test_huge_pages_are_asked_for() -> None:
    bank = torch.empty(32 << 20, dtype=torch.uint8)
    assert not hostmem.prefer_huge_pages(bank.data_ptr(), 3 << 20), "too small to hold a whole one for certain"
    assert hostmem.prefer_huge_pages(bank.data_ptr(), bank.nbytes)
    assert "hg" in flags_of_mapping(bank.data_ptr() + (1 << 20))  # as proc(5) names MADV_HUGEPAGE
    read_into = hostmem.huge(4 << 20)
    assert "hg" in flags_of_mapping(ctypes.addressof(ctypes.c_char.from_buffer(read_into)))


@needs_huge_pages
def test_experts_that_are_copied_lie_in_huge_pages(tmp_path) -> None:
    """Into banks when a model is loaded, and into slots."""
    make_tiny("qwen3_moe", tmp_path, torch.bfloat16, hidden_size=512, moe_intermediate_size=1024, num_hidden_layers=1)
    loaded = load_model(tmp_path, AsStored())
    (bank,) = expert_banks(loaded.spec, loaded.weights)
    for held in (bank, Room(bank, 8).bank):
        for weight in (held.gate_up, held.down):
            assert weight.nbytes >= 4 << 20 and "hg" in flags_of_mapping(weight.data_ptr() + weight.nbytes // 2)


def test_no_huge_pages_is_no_error(monkeypatch) -> None:
    monkeypatch.delattr("engine.hostmem.mmap.MADV_HUGEPAGE")
    assert not hostmem.prefer_huge_pages(0, 1 << 30)


def test_experts_kept_in_host_memory_for_a_device_share_no_page(tmp_path) -> None:
    """A page cannot be registered with a device twice."""
    make_tiny("qwen3_moe", tmp_path, torch.bfloat16)
    apart, alike = load_model(tmp_path, ReferenceOps(), host=True), load_model(tmp_path, ReferenceOps())
    banks = [weight for name, weight in apart.weights.items() if name.endswith((".moe.gate_up", ".moe.down"))]
    pages = [page for bank in banks for page in range(bank.data_ptr() // 4096, -(-(bank.data_ptr() + bank.nbytes) // 4096))]
    assert len(banks) >= 4 and len(set(pages)) == len(pages)
    assert all(bank.data_ptr() % 4096 == 0 for bank in banks)
    assert all(torch.equal(weight.float(), alike.weights[name].float()) for name, weight in apart.weights.items())
