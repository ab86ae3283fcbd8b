#!/usr/bin/env python3
"""What the prefix cache itself costs: restoring from disk, serving a hit, opening a large index. No model; real tensors, files.

    ops/bench/prefix_resources.py --scratch DIRECTORY_ON_THE_DISK --out docs/results/prefix-resources.json

restore: a conversation of Qwen3-30B-A3B's KV rows (96 KiB a token) comes back from record files that are in no page cache, in
turns with plain reads of the same files; the figure is the share of the plain speed. hit: from the message of a
request to its planned step, for a prompt that is wholly in memory, and what of it is not copying (a page, a recurrent state of
66 MB). index: 100,000 records, opened by a new process, with the journal's index and from the journal alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from engine.ipc import FrameReader, Generate, frame, token_array  # noqa: E402
from engine.kernels.ops import KVLayer, StateLayer  # noqa: E402
from engine.limits import Limits  # noqa: E402
from engine.nn.batch import PAGE, Cache  # noqa: E402
from engine.prefix.cache import RadixCache  # noqa: E402
from engine.prefix.disk import DiskConfig  # noqa: E402
from engine.prefix.journal import Frame, Put, Use, rewrite  # noqa: E402
from engine.prefix.states import TensorStorage  # noqa: E402
from engine.prefix.store import DiskStore  # noqa: E402
from engine.scheduler import Scheduler  # noqa: E402
from ops.bench import machine  # noqa: E402

WARM_UP = 2  # rounds that do not count: memory a virtual machine has not touched for long is given to it again page by page
CHUNK = 8 << 20  # bytes a plain read asks for
DISTURBED = 0.1  # share of the machine others used: a run beyond it counts only where all are
IDENTITY = b"prefix_resources"
OPENING = "import sys; from ops.bench.prefix_resources import open_index; open_index(sys.argv[1])"


def attention(pages: int, layers: int) -> Cache:
    """Qwen3-30B-A3B's KV layers: 4 heads of 128, bfloat16."""
    shape = (pages, 4, PAGE, 128)
    layer = [KVLayer(torch.ones(shape, dtype=torch.bfloat16), torch.ones(shape, dtype=torch.bfloat16)) for _ in range(layers)]
    return Cache(tuple(layer), (None,) * layers)


def hybrid(pages: int, slots: int) -> Cache:
    """One small attention layer and Qwen3.5-35B-A3B's 30 DeltaNet states (66 MB a sequence)."""
    kv = KVLayer(torch.ones(pages, 2, PAGE, 16, dtype=torch.bfloat16), torch.ones(pages, 2, PAGE, 16, dtype=torch.bfloat16))
    states = [StateLayer(torch.ones(slots, 8192, 3), torch.ones(slots, 32, 128, 128)) for _ in range(30)]
    return Cache((kv, *(None,) * 30), (None, *states))


def serve(cache: RadixCache, prompt: list[int]) -> float:
    """Open and close a lease on `prompt`, computing nothing; milliseconds `open` took."""
    began = time.perf_counter()
    lease = cache.open(prompt, session="s", anchors=())
    took = (time.perf_counter() - began) * 1e3
    lease.grow(len(prompt))
    lease.close(prompt, "stop")
    return took


def forget(files: list[Path]) -> None:
    """Take `files` out of the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def plain_read(files: list[Path], buffer: memoryview) -> float:
    """Seconds to read `files` one after the other into a buffer that is used again and again."""
    began = time.perf_counter()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while os.readv(fd, [buffer]):
            pass
        os.close(fd)
    return time.perf_counter() - began


def restore(scratch: Path, tokens: int, layers: int, rounds: int) -> dict:
    prompt = [n % 50_000 for n in range(tokens)]
    storage = TensorStorage(attention(-(-tokens // PAGE) + 2, layers))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        disk, store = DiskConfig(budget=1 << 40), DiskStore(Path(folder), IDENTITY)
        cache = RadixCache(storage, pages=-(-tokens // PAGE) + 2, slots=2, disk=disk, store=store)
        serve(cache, prompt)
        while cache.tick():
            cache.disk.collect(wait_s=60)
        files = sorted(Path(store.directory).glob("*/*.kv"))
        size, buffer = sum(f.stat().st_size for f in files), memoryview(bytearray(CHUNK))
        plain, ours = [], []
        for _ in range(rounds + WARM_UP):
            forget(files)
            plain.append(size / plain_read(files, buffer) / 1e9)
            cache.flush("ram")
            forget(files)
            lease = cache.open([*prompt, 1], session="s", anchors=())
            assert lease.match.source == "disk" and lease.match.common == tokens, lease.match
            ours.append(size / lease.match.restore_ms / 1e6)
            lease.close(prompt, "stop")
        cache.shutdown()
    plain, ours = plain[WARM_UP:], ours[WARM_UP:]
    share = statistics.median(o / p for o, p in zip(ours, plain, strict=True))
    return {"tokens": tokens, "files": len(files), "gb": size / 1e9, "plain_gb_s": plain, "restore_gb_s": ours, "share": share}


def hit(tokens: int, rounds: int) -> dict:
    """Medians in milliseconds of full hits, for a hybrid model: from the message to the planned step, in `open`, copying."""
    prompt = [n % 50_000 for n in range(tokens)]
    storage = TensorStorage(hybrid(-(-tokens // PAGE) + 4, 2))
    cache = RadixCache(storage, pages=-(-tokens // PAGE) + 4, slots=2, state_budget=8 * storage.state_bytes)
    serve(cache, prompt)
    limits = Limits(max_context=tokens + PAGE, vocab=50_000, max_running=1, max_queue=1, prefill_chunk=512)
    scheduler, reader = Scheduler(cache, limits, time.monotonic), FrameReader(to_worker=True)
    served, opened, copied, opening, copying = [], [], [], [0.0], [0.0]
    cache.open = _timed(cache.open, opening)
    storage.load, storage.copy_page = _timed(storage.load, copying), _timed(storage.copy_page, copying)
    for n in range(rounds + WARM_UP):
        data = frame(Generate(id=str(n), tokens=token_array([*prompt, n]), max_new=1, session="s"))
        opening[0] = copying[0] = 0.0
        began = time.perf_counter()
        (request,) = reader.feed(data)
        scheduler.submit(request)
        step = scheduler.plan()
        served.append((time.perf_counter() - began) * 1e3)
        assert step and (step[0].start, step[0].end) == (tokens, tokens + 1), step
        opened.append(opening[0])
        copied.append(copying[0])
        scheduler.cancel(request.id, "measured")
        scheduler.outbox.clear()
    added = [s - c for s, c in zip(served, copied, strict=True)][WARM_UP:]
    names = {"served_ms": served, "open_ms": opened, "copy_ms": copied}
    return {
        "tokens": tokens,
        **{k: statistics.median(v[WARM_UP:]) for k, v in names.items()},
        "added_ms": statistics.median(added),
        "added": added,
    }


def _timed(work: Callable[..., object], spent: list[float]) -> Callable[..., object]:
    """`work`, adding the milliseconds it takes to `spent[0]`."""

    def timed(*args: object, **more: object) -> object:
        began = time.perf_counter()
        try:
            return work(*args, **more)
        finally:
            spent[0] += (time.perf_counter() - began) * 1e3

    return timed


def index(scratch: Path, records: int, rounds: int) -> dict:
    """Seconds a new process needs to open a journal of `records` records: conversations of 50 turns, 300 tokens each.

    As it is after an orderly stop, and (`journal_alone`) as a server's first 100,000 records leave it that is then killed.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        store = DiskStore(Path(folder), IDENTITY)
        journal = Path(store.directory) / "journal"
        rewrite(journal, _frames(records))
        store.load()
        store.stop(60)
        found = _opened(folder, rounds)
        journal.with_name("index").unlink()
        alone = _opened(folder, rounds)
        return {"records": records, "journal_mb": journal.stat().st_size / 1e6, **found, "journal_alone": alone}


def _opened(folder: str, rounds: int) -> dict:
    """Medians over new processes that open what is in `folder`; a run that others disturbed counts only where all are such."""
    runs = []
    for _ in range(rounds):
        share, own = machine.Share.start(), _cpu_seconds()
        out = subprocess.run([sys.executable, "-c", OPENING, folder], cwd=ROOT, capture_output=True, text=True, check=True)
        runs.append({**json.loads(out.stdout), "others": share.foreign(_cpu_seconds() - own)})
    counted = [r for r in runs if r["others"] <= DISTURBED] or runs
    return {**{key: statistics.median(r[key] for r in counted) for key in ("wall_s", "cpu_s", "others")}, "runs": runs}


def _cpu_seconds() -> float:
    """Of this process and the children it waited for."""
    return sum(os.times()[:4])


def _frames(records: int) -> list[Frame]:
    tokens = torch.arange(300, dtype=torch.int32)
    frames: list[Frame] = []
    for n in range(records):
        turn, talk = n % 50, n // 50
        data = (tokens + talk * 1000 + turn).numpy().tobytes()
        key = n.to_bytes(16, "little")
        frames.append(Put(n + 1, n if turn else 0, turn * 300, 0, 0, "turn-end", f"s{talk}", time.time(), key, data))
        if turn % 10 == 0:
            frames.append(Use(n + 1, time.time(), 3, f"s{talk}"))
    return frames


def open_index(folder: str) -> None:
    """Open the cache over `folder` and print what that took."""
    storage = TensorStorage(attention(4, 1))
    wall, cpu = time.perf_counter(), time.process_time()
    store = DiskStore(Path(folder), IDENTITY)
    cache = RadixCache(storage, pages=4, slots=1, disk=DiskConfig(budget=1 << 40), store=store)
    took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "records": len(cache.disk.index.records)}
    print(json.dumps(took))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk to measure")
    parser.add_argument("--tokens", type=int, default=8192, help="of the conversation that is restored")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hits", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    share, own = machine.Share.start(), _cpu_seconds()
    found = {
        "machine": machine.describe(ROOT),
        "restore": restore(args.scratch, args.tokens, args.layers, args.rounds),
        "hit": [hit(tokens, args.rounds * 4) for tokens in args.hits],
        "index": index(args.scratch, args.records, args.rounds),
    }
    found["others"] = share.foreign(_cpu_seconds() - own)
    print(json.dumps({k: v for k, v in found.items() if k != "machine"}, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
