"""ops/bench: the arithmetic of the tables. Nothing is timed here."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture
def bench(load):
    return load("engine")


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
    samples = bench.run_rounds([ours, peer], cells, rounds=3, warm_up=1)
    assert calls == ["llama.cpp", "moorage", "moorage", "llama.cpp", "llama.cpp", "moorage", "moorage", "llama.cpp"]
    (row,) = bench.summarise(samples, cells, ["moorage", "llama.cpp"])
    assert (row["moorage"], row["llama.cpp"], row["ratio to llama.cpp"], row["rounds"]) == (20, 10, 2.0, 3)
    assert "| decode | 0 | 3 | 20 | 10 | 2.0 |" in bench.table([row])


def test_a_turn_is_measured_behind_a_resident_prompt(bench) -> None:
    server = Turns(sys.modules["engine_http"], "moorage", 0.5)
    over = bench.OverHttp(server, tokens=8)
    assert over.measure(bench.Cell("turn", 64)) == 40.0
    assert [asked[:2] for asked in server.asked] == [(64, 1), (64 + 20, 1)]
    assert over.measure(bench.Cell("decode", 64)) == pytest.approx(10.0)


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


class Turns:
    """A server that answers in a given time and says how much of a prompt it did not know."""

    def __init__(self, http, name: str, first: float) -> None:
        self.http, self.name, self.first = http, name, first
        self.asked: list[tuple[int, int, int]] = []

    def cpu_seconds(self) -> float:
        return 0.0

    def stream(self, prompt, count, place=-1):
        self.asked.append((len(prompt), count, place))
        return self.http.Reply(self.first, self.first + 0.1 * (count - 1), count, 20)


def test_turns_behind_a_resident_prompt(load, monkeypatch) -> None:
    resident = load("engine_resident")
    monkeypatch.setattr(resident.machine.Share, "foreign", lambda share, own: 0.0)
    http = sys.modules["engine_http"]
    ours, peer = Turns(http, "moorage", 0.5), Turns(http, "llama.cpp", 1.0)
    bench = resident.Bench([ours, peer], [0, 64, 128], tokens=11)
    for number, kind, size in [
        (0, "decode", 64),
        (0, "extend", 128),
        (0, "step", 4),
        (0, "crowd", 0),
        (0, "fresh", 32),
        (1, "extend", 128),
    ]:
        bench.measure(resident.Cell(kind, size), number)
    assert ours.asked[:3] == [(64, 11, 1), (128 + 20, 1, 2), (64 + 4, 1, 1)]
    assert ours.asked[3:7] == [(16, 11, -1)] * 4
    assert ours.asked[7:8] == [(32, 1, 3)], "in a place that no resident prompt has"
    assert [s.engine for s in bench.samples[-2:]] == ["llama.cpp", "moorage"], "who is first alternates"
    rows = {row["kind"]: row for row in resident.summarise(bench.samples)}
    assert (rows["decode"]["moorage"], rows["decode"]["ratio to llama.cpp"]) == (10.0, 1.0)
    assert (rows["extend"]["moorage"], rows["extend"]["ratio to llama.cpp"], rows["extend"]["rounds"]) == (40.0, 2.0, 2)
    assert rows["step"]["moorage"] == 8.0
    assert rows["crowd"]["moorage"] == 40.0
    assert (rows["fresh"]["moorage"], rows["fresh"]["ratio to llama.cpp"]) == (64.0, 2.0)
    assert "| extend | 128 | 2 | 40.0 | 20.0 | 2.0 |" in resident.table(list(rows.values()))


def test_an_engine_without_a_batch_has_no_crowd(load, monkeypatch) -> None:
    resident = load("engine_resident")
    monkeypatch.setattr(resident.machine.Share, "foreign", lambda share, own: 0.0)
    http = sys.modules["engine_http"]
    ours, alone = Turns(http, "moorage", 0.5), Turns(http, "transformers", 1.0)
    bench = resident.Bench([ours, alone], [0, 64, 128], tokens=11)
    for kind, size in [("crowd", 0), ("decode", 64)]:
        bench.measure(resident.Cell(kind, size), 0)
    crowd, decode = resident.summarise(bench.samples)
    assert (crowd["moorage"], crowd["transformers"], decode["transformers"]) == (40.0, "", 10.0)
    assert len(resident.table([crowd, decode]).splitlines()) == 4


@pytest.mark.parametrize("usage", [{"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}])
def test_what_vllm_computed_is_what_it_did_not_know(load, usage: dict) -> None:
    load("engine_resident")
    server = sys.modules["engine_http"].Vllm(1, 1, 0.0)
    assert server.read({"choices": [{}]}) == (True, None)
    assert server.read({"choices": [], "usage": usage}) == (False, (2, 5))
    assert server.read({"choices": [], "usage": usage | {"prompt_tokens_details": None}}) == (False, (2, 9))


def test_what_a_token_costs_each_thread(load) -> None:
    threads = load("engine_threads")
    before = {(1, 1): ("a", 100.0, 0.0, 1), (1, 2): ("b", 0.0, 0.0, 0)}
    after = {(1, 1): ("a", 300.0, 50.0, 11), (1, 2): ("b", 1.0, 9.0, 9), (1, 3): ("c", 800.0, 0.0, 0)}
    found = threads.per_token(before, after, 10)
    assert found == [
        {"name": "c", "main": False, "runs_us": 80.0, "waits_us": 0.0, "sleeps": 0.0},
        {"name": "a", "main": True, "runs_us": 20.0, "waits_us": 5.0, "sleeps": 1.0},
    ], "busiest first, idle ones left out"
    samples = [
        threads.Sample("x", n, gap, 1e6 / gap, 1.0, foreign, [n]) for n, gap, foreign in [(0, 9, 0.5), (1, 12, 0), (2, 10, 0)]
    ]
    (row,) = threads.summarise(samples)
    assert (row["gap_us"], row["best_gap_us"], row["threads"], row["rounds"]) == (11.0, 10, [2], 2)


def test_own_threads_are_counted(load) -> None:
    counts = load("engine_threads").counts_of(os.getpid())
    assert counts[os.getpid(), os.getpid()][1] > 0


def test_what_a_layer_spends_outside_of_its_kernels(load) -> None:
    profile = load("engine_profile")
    times = {"step": 100.0, "forward": 90.0, "layers": 80.0, "layers' kernels": 76.0, "kernel linear": 70.0, "kernel embed": 10.0}
    times |= dict.fromkeys(("plan", "make_batch", "sampling", "commit", "send"), 2.0)
    calls = {"linear": 3, "embed": 1, "layers": 3}
    found = profile.summary([(times, calls, {})] * 3, {"linear": 1.0, "embed": 1.0})
    assert found["layers_outside_kernels"] == pytest.approx(0.05)
    assert found["layers_outside_kernels_and_doors"] == pytest.approx(1 - 73 / 80)
    assert found["step_outside_kernels"] == pytest.approx(0.2)


@pytest.mark.parametrize(("shape", "kind"), [("qwen3moe", "Q4_K_M"), ("qwen35moe", "BF16"), ("deepseek2", "Q8_0")])
def test_a_made_up_model_loads_as_its_family(load, monkeypatch, tmp_path, shape: str, kind: str) -> None:
    from engine.models.load import open_complete  # before `load` puts a bench of that name in the way
    from engine.text.tokenizer import load_tokenizer

    make = load("make_gguf")
    for name, value in {
        "EXPERTS": 8,
        "LITE_EXPERTS": 8,
        "HIDDEN": 256,
        "VOCAB": 4352,
    }.items():  # the real ones would be gigabytes
        monkeypatch.setattr(make, name, value)
    out = tmp_path / "model.gguf"
    monkeypatch.setattr(sys, "argv", ["make_gguf.py", shape, kind, str(out), "--layers", "4"])
    assert make.main() == 0
    spec = open_complete(out).spec
    assert (len(spec.layers), spec.vocab, spec.layers[3].ffn.experts) == (4, 4352, 8)
    tokenizer = load_tokenizer(str(out))
    assert all(tokenizer.token_bytes(i).isalpha() for i in range(256, 4096)), "the benches' prompts are text"


def test_starts_are_told_apart_by_what_and_by_cold_files(load) -> None:
    bench = load("engine_start")
    starts = [
        bench.Start("moorage", cold, n, 1.0 + n + cold, 2.0 + n, 0.1 + n, 110 + n, 0.0)
        for cold in (True, False)
        for n in range(3)
    ]
    cold, warm = bench.summarise(starts, weights=100)
    assert (cold["files"], cold["ready"], cold["first_token"], cold["peak of weights"]) == ("cold", 3.0, 3.0, 1.12)
    assert (warm["files"], warm["ready"], warm["weights"], warm["rounds"]) == ("warm", 2.0, 1.1, 3)


def test_prompts_after_a_start_are_told_apart_by_size_and_by_first_and_second(load) -> None:
    bench = load("engine_start")
    found = [{"what": "moorage", "round": n, "seconds": [1.0 + n, 2.0, 0.5, 1.0]} for n in range(3)]
    found += [{"what": "llama.cpp", "round": n, "seconds": [1.0, 2.0, 1.0, 4.0]} for n in range(3)]
    rows = bench.summarise_prompts(found, [64, 512])
    assert [(r["prompt"], r["time"]) for r in rows] == [(64, "first"), (512, "first"), (64, "second"), (512, "second")]
    assert [(r["moorage"], r["ratio to llama.cpp"]) for r in rows] == [(2.0, 0.5), (2.0, 1.0), (0.5, 2.0), (1.0, 4.0)]


def test_a_dropped_file_is_read_whole(load, tmp_path) -> None:
    bench = load("engine_start")
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"x")
    assert bench.files_of(tmp_path) == [tmp_path / "a", tmp_path / "b" / "c"]
    assert bench.read_rate(tmp_path / "a") > 0


def session(turns: int, text: str) -> str:
    """A recorded session: each turn one tool call, its result, an answer."""
    said = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    for n in range(turns):
        call = {"type": "toolCall", "id": f"c{n}", "name": "read", "arguments": {"path": "a"}}
        said += [
            {"role": "assistant", "content": [call]},
            {"role": "toolResult", "toolCallId": f"c{n}", "content": [{"type": "text", "text": text}]},
        ]
    return "".join(json.dumps({"type": "message", "message": m}) + "\n" for m in said)


@pytest.mark.parametrize("tokens", [1, 100, 600, 900, 2000, 100_000])
def test_a_session_gives_requests_or_one_line(load, tmp_path, monkeypatch, tokens) -> None:
    (tmp_path / "s.jsonl").write_text(session(12, "x" * 400))
    requests = load("agent_requests")
    monkeypatch.setattr(
        sys, "argv", ["agent_requests", str(tmp_path / "s.jsonl"), str(tmp_path / "out"), "--tokens", str(tokens)]
    )
    try:
        requests.main()
    except SystemExit as problem:
        assert str(problem).startswith("agent_requests: ") and "\n" not in str(problem)
        return
    live = [json.loads(line) for line in (tmp_path / "out.live.jsonl").read_text().splitlines()]
    assert len(live) >= 3 and any(m["content"] == requests.PLACEHOLDER for m in live[-1]["messages"])
