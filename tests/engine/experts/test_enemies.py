"""What breaks packs: killed and full disks while they are written, damage while they are read, indexes that lie."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine.experts.call import Unreadable
from engine.experts.executor import Tier, TieredExperts
from engine.experts.filepool import Pack
from engine.experts.pack import PackError, read_index, write_pack
from engine.kernels.reference import ReferenceOps
from tests.engine.experts.tiers import EXPERTS, LAYERS, banks, step

ROOT = Path(__file__).resolve().parents[3]
# Packs the same banks as `whole`; argv: directory, most bytes a file may have, layer at which to wait for the end.
PACKING = """
import resource, sys, time
from engine.experts.pack import write_pack
from engine.kernels.reference import ReferenceOps
from tests.engine.experts.tiers import LAYERS, banks
directory, most, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
from pathlib import Path
pool = banks(ReferenceOps(), "f32")
if most:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
def bank(layer):
    if layer == stop:
        time.sleep(600)
    return pool[layer]
try:
    write_pack(Path(directory), "model", LAYERS, bank, lambda done, total: None)
except OSError as problem:
    sys.exit(f"errno {problem.errno}")
"""


def packing(directory: Path, most: int = 0, stop: int = -1) -> subprocess.Popen:
    command = [sys.executable, "-c", PACKING, str(directory), str(most), str(stop)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)


def write(directory: Path) -> None:
    pool = banks(ReferenceOps(), "f32")
    write_pack(directory, "model", LAYERS, lambda layer: pool[layer], lambda done, total: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "p"
    write(directory)
    return directory


def same(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in ("experts.bin", "index.json"))


def test_a_pack_that_was_killed_goes_on_and_has_the_same_bytes(tmp_path, whole) -> None:
    directory, stop = tmp_path / "p", LAYERS - 1
    process = packing(directory, stop=stop)
    try:
        while not (directory / "index.json").exists() or read_index(directory).done < stop:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)  # polls a condition
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    (directory / "index.json.tmp").write_text('{"half of')  # what a death while it was replaced leaves
    with pytest.raises(PackError, match="run the same `pack` again"):
        Pack(directory)
    write(directory)
    assert same(directory, whole)


def test_a_disk_that_fills_up_costs_the_layer_that_was_being_written(tmp_path, whole) -> None:
    directory, size = tmp_path / "p", read_index(whole).size
    process = packing(directory, most=size * 3 // 2 // LAYERS)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and said.strip().startswith("errno"), said
    assert read_index(directory).done == 1
    write(directory)
    assert same(directory, whole)


def test_a_pack_that_is_cut_under_load_ends_that_step_and_no_other(tmp_path, whole) -> None:
    write(tmp_path / "p")
    path = tmp_path / "p" / "experts.bin"
    before, ops, generator = path.read_bytes(), ReferenceOps(), torch.Generator().manual_seed(0)
    pool = banks(ops, "f32")
    experts = TieredExperts(Pack(tmp_path / "p").pools[0], ops, Tier(EXPERTS, workers=4))
    failed = 0
    for turn in range(30):
        if turn == 10:
            os.truncate(path, len(before) // 2)
        if turn == 20:
            path.write_bytes(before)  # in place: the same file that is open
        for layer in range(LAYERS):
            x, ids, weights = step(generator, 2)
            want = ops.moe(x, ids, weights, pool[layer].gate_up, pool[layer].down, "silu")
            try:
                assert torch.equal(experts.run(layer, x, ids, weights), want)
            except Unreadable:
                failed += 1
                assert 10 <= turn < 20
            experts.slots.check()
    assert failed
    experts.close()


def lies() -> list:
    """An index with one thing changed: (path into it, value)."""
    wrong = [None, -1, 0, 1.5, "x", [], {}, 1 << 70]
    top = ["version", "source", "layers", "experts", "act", "kinds", "layout", "checksums"]
    part = [("kinds", 0, side, name) for side in ("gate_up", "down") for name in ("kind", "rows", "cols", "bytes")]
    paths = [(name,) for name in top] + [("kinds", 0), ("layout", 0), ("checksums", 0), *part]
    return [(path, value) for path in paths for value in wrong]


def test_an_index_that_lies_is_refused_or_its_experts_are(tmp_path, whole) -> None:
    directory = tmp_path / "p"
    directory.mkdir()
    os.link(whole / "experts.bin", directory / "experts.bin")
    truth, opened = json.loads((whole / "index.json").read_text()), []
    for path, value in lies():
        index = copy.deepcopy(truth)
        *way, last = path
        place = index
        for each in way:
            place = place[each]
        if place[last] == value and type(place[last]) is type(value):
            continue
        place[last] = value
        (directory / "index.json").write_text(json.dumps(index))
        try:
            Pack(directory, "model").close()
            opened.append((path, value))
        except PackError as problem:
            assert "\n" not in str(problem)
    # The kernels know their types, and every expert is compared with its checksum when it is first read.
    later = {("act",), ("checksums", 0), *(("kinds", 0, side, "kind") for side in ("gate_up", "down"))}
    assert {path for path, _ in opened} <= later
