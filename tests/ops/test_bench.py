"""ops/bench: the arithmetic of the tables. Nothing is timed here."""

import importlib.util
import os
import subprocess
import sys

import pytest

from .conftest import ROOT


@pytest.fixture
def bench(ops, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "ops" / "bench"))
    spec = importlib.util.spec_from_file_location("bench_engine", ROOT / "ops/bench/engine.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_engine", module)
    spec.loader.exec_module(module)
    return module


class Fake:
    """An engine whose speeds are given, one a call."""

    def __init__(self, name: str, speeds: list[float], calls: list[str]) -> None:
        self.name, self.speeds, self.calls = name, iter(speeds), calls

    def cpu_seconds(self) -> float:
        return 0.0

    def measure(self, cell) -> float:
        self.calls.append(self.name)
        return next(self.speeds)


def test_peers_alternate_and_the_ratio_is_of_pairs(bench, monkeypatch) -> None:
    monkeypatch.setattr(bench.machine.Share, "foreign", lambda share, own: 0.0)
    calls: list[str] = []
    # warm-up first, then three rounds: a slow second round hits both, and the paired ratio does not move
    ours, peer = Fake("moorage", [1, 20, 2, 30], calls), Fake("llama.cpp", [1, 10, 1, 10], calls)
    cells = [bench.Cell("decode", 0)]
    samples = bench.run_rounds([ours, peer], cells, rounds=3)
    assert calls == ["llama.cpp", "moorage", "moorage", "llama.cpp", "llama.cpp", "moorage", "moorage", "llama.cpp"]
    (row,) = bench.summarise(samples, cells, ["moorage", "llama.cpp"])
    assert (row["moorage"], row["llama.cpp"], row["ratio to llama.cpp"], row["rounds"]) == (20, 10, 2.0, 3)
    assert "| decode | 0 | 3 | 20 | 10 | 2.0 |" in bench.table([row])


def test_noisy_rounds_do_not_count(bench) -> None:
    def sample(engine: str, number: int, speed: float, foreign: float):
        return bench.Sample(engine, "decode", 0, number, speed, foreign)

    samples = [
        sample("moorage", 0, 2, 0.5),
        sample("llama.cpp", 0, 9, 0.0),
        sample("moorage", 1, 30, 0.01),
        sample("llama.cpp", 1, 10, 0.02),
    ]
    cells, peers = [bench.Cell("decode", 0)], ["moorage", "llama.cpp"]
    (row,) = bench.summarise(samples, cells, peers)
    assert (row["rounds"], row["ratio to llama.cpp"], row["foreign"]) == (1, 3.0, 0.02)
    (row,) = bench.summarise(samples[:2], cells, peers)
    assert (row["rounds"], row["foreign"]) == (1, 0.5), "when nothing was quiet, say so"


def test_descendants_and_their_cpu_time_are_counted(bench) -> None:
    burn = "import time, sys\nwhile time.process_time() < 0.4: pass\nprint(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert child.pid in bench.machine.descendants(os.getpid())
        assert bench.machine.process_seconds([child.pid]) >= 0.25
        child.stdin.close()


def test_foreign_share_leaves_our_own_work_out(bench, monkeypatch) -> None:
    times = iter([(100.0, 50.0), (110.0, 52.0), (110.0, 52.0)])  # 10 s of core time, 2 idle
    monkeypatch.setattr(bench.machine.Share, "_read", staticmethod(lambda: next(times)))
    share = bench.machine.Share.start()
    assert share.foreign(own_seconds=6.0) == pytest.approx(0.2)
    assert share.foreign(own_seconds=9.0) == 0.0
