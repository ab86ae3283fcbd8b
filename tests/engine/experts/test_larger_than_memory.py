"""A model whose experts are twice the memory its engine may have runs with the same answers, in a control group or a ulimit."""

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.build import choose_kernels
from engine.packing import pack_model
from tests.support.tiny import make_tiny

pytestmark = pytest.mark.slow

ROOMY = 1500 << 20  # for slots, for another that takes memory, and three times what counts as short left over
LIMIT = 600 << 20  # the interpreter with torch takes 200 MiB, and loading wants 256 of work space
SIZES = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 100, "num_hidden_layers": 8, "num_experts_per_tok": 4}
ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import json, sys
from pathlib import Path
import engine.kernels.cpu
import engine.build
from engine.build import BuildError, build
engine.build.promised = lambda: 0  # engines of other tests run beside this one, outside of its limit
from engine.config import EngineConfig
from tests.engine.serve.harness import Engine, generate
config = EngineConfig(model=sys.argv[1], kernels="cpu", threads=1, max_context=256, max_running=4, **json.loads(sys.argv[2]))
def memory(key):  # not getrusage: that remembers the parent's peak
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
before = memory("VmRSS")
try:
    parts = build(config, lambda fraction, stage: None)
except BuildError as problem:
    print(json.dumps({"refused": str(problem)}))
    sys.exit()
loading = memory("VmHWM") - before
engine = Engine(parts)
prompts = [[5, 6, 7, 8, 9], list(range(3, 60)), [11, 12], [90]]
engine.run(*(generate(f"r{i}", prompt, 16) for i, prompt in enumerate(prompts)))
pool = parts.experts.placement["pool_bytes"]
out = {"pool": pool, "loading": loading, "tokens": [engine.tokens(f"r{i}") for i in range(4)], "peak": memory("VmHWM")}
if parts.experts.slots:
    counts = parts.experts.slots.slots.counts
    out |= {"fetched": counts.fetched, "evicted": counts.evicted}
print(json.dumps(out))
"""


# The engine, and 16 MiB a look more of another's in the same group: looks are three seconds apart, as far as the engine knows.
SQUEEZED = """
import json, sys, mmap
import engine.kernels.cpu
import engine.build
engine.build.promised = lambda: 0
from engine.build import build
from engine.config import EngineConfig
from engine.elastic import Elastic
from engine.hostmem import available_bytes
from engine.stores import stores_of
from tests.engine.serve.harness import Engine, generate
config = EngineConfig(model=sys.argv[1], kernels="cpu", threads=1, max_context=256, max_running=4, **json.loads(sys.argv[2]))
parts = build(config, lambda fraction, stage: None)
served, now, taken, seen = Engine(parts), 0.0, [], []
elastic = Elastic(stores_of(parts, served.scheduler))
slots = parts.experts.slots
def look():
    global now
    now += 3.0
    elastic.tick(now)
    seen.append((slots.capacity, available_bytes()))
def answer(name):
    served.run(generate(name, list(range(3, 60)), 16))
    return served.tokens(name)
first, wanted = answer("a"), slots.capacity
while slots.capacity > slots.least and len(taken) < 100:
    block = mmap.mmap(-1, 16 << 20)
    block[:] = bytes(16 << 20)
    taken.append(block)
    look()
short = answer("b")
taken.clear()
while slots.capacity < wanted and len(seen) < 1000:
    look()
print(json.dumps({"answers": [first, short, answer("c")], "wanted": wanted, "least": slots.least, "seen": seen}))
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Path, Path]:
    pytest.importorskip("engine.kernels.cpu", reason="the native kernels are not built here")
    model, pack = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("pack")
    made = make_tiny("qwen3_moe", model, torch.bfloat16, **SIZES)
    (model / "model.safetensors").unlink()
    made.to(torch.bfloat16).save_pretrained(model, max_shard_size="128MB")  # a ulimit counts the mapping of a whole file
    pack_model(model, pack, choose_kernels("cpu", 1), lambda done, total: None)
    return model, pack


def answer(model: Path, options: dict[str, object], before: Callable[[], None] | None = None, child: str = CHILD) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", child, str(model), json.dumps(options)]
    done = subprocess.run(command, env=environment, preexec_fn=before, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"code {done.returncode}: {done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def control_group(limit: int = LIMIT) -> Iterator[Callable[[], None]]:
    """A fresh group of `limit` bytes; yields what a child calls to enter it. Skips where none can be made."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = root / f"moorage-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError as problem:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here ({problem})")
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


@contextlib.contextmanager
def ulimit() -> Iterator[Callable[[], None]]:
    """Of private writable memory, as `ulimit -d` sets it: address space counts there, so nothing can be reserved to grow into."""
    if torch.version.cuda:
        pytest.skip("this torch has CUDA's libraries, whose data alone exceeds the limit")
    yield lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


@pytest.fixture(scope="module")
def whole(packed) -> dict:
    """What an engine with all the memory there is finds."""
    return answer(packed[0], {"kv_bytes": 1 << 24})


def test_loading_holds_nothing_twice(whole) -> None:
    """The file's pages count while they are copied; at most a tenth of the pool, and what the engine itself takes."""
    assert whole["pool"] < whole["loading"] < 1.1 * whole["pool"] + (64 << 20)


@pytest.mark.parametrize("limited", [control_group, ulimit])
def test_experts_of_twice_the_memory_give_the_same_answers(packed, whole, limited) -> None:
    (model, pack), want = packed, whole
    assert want["peak"] > 2 * LIMIT
    with limited() as enter:
        got = answer(model, {"kv_bytes": 1 << 24, "experts_pack": str(pack), "expert_bytes": 160 << 20}, enter)
        assert "refused" not in got, got["refused"]
        assert got["pool"] >= 2 * LIMIT and got["tokens"] == want["tokens"]
        assert got["peak"] < want["peak"] - got["pool"] // 2 and got["evicted"] > 0
        if limited is control_group:
            assert "pack its experts" in answer(model, {"kv_bytes": 1 << 24}, enter)["refused"]


def test_memory_that_another_takes_is_given_back_before_the_kernel_kills_and_taken_again_later(packed) -> None:
    """In a real control group, whose figures decide: who else takes memory there would get both killed."""
    model, pack = packed
    with control_group(ROOMY) as enter:
        got = answer(model, {"kv_bytes": 1 << 24, "experts_pack": str(pack), "expert_bytes": 320 << 20}, enter, SQUEEZED)
    slots = [count for count, _ in got["seen"]]
    assert min(slots) == got["least"] < got["wanted"] == slots[-1], "shrunk to the least, and grown back"
    assert min(free for _, free in got["seen"]) > 64 << 20, "something is always free"
    assert got["answers"][0] == got["answers"][1] == got["answers"][2]
