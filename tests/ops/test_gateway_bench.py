"""ops/bench/gateway.py: its arithmetic, its requests, and that client and upstream understand each other. Nothing is timed."""

import base64
import importlib.util
import json
import sys

import pytest

from .conftest import ROOT

BENCH = ROOT / "ops" / "bench"


def load(monkeypatch, name: str, alias: str):
    spec = importlib.util.spec_from_file_location(alias, BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, alias, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(monkeypatch):
    # By hand and without the folder on the path: its gateway.py has the name of our package.
    for name in ("machine", "sse_upstream", "gateway_bodies", "gateway_peers"):
        load(monkeypatch, name, name)
    return load(monkeypatch, "gateway", "bench_gateway")


def sample(bench, target: str, number: int, first: int, rate: float):
    return bench.Sample("ttft 40 KB", target, number, {"first_50": first, "first_95": 2 * first, "per_second": rate}, 0.0)


def test_what_is_added_is_paired_within_a_round(bench) -> None:
    # the second round is slow for both: the difference stays, and the median does not mix rounds
    figures = [(1, 100, 1100), (2, 5000, 6100), (3, 120, 1020)]
    samples = [sample(bench, n, r, v, 1.0) for r, direct, ours in figures for n, v in (("direct", direct), ("moorage", ours))]
    assert bench.added(samples, "ttft 40 KB", "moorage", "first_50") == 1000
    assert bench.added(samples, "ttft 40 KB", "moorage", "first_95", "first_50") == 2100
    assert "| 40 KB of messages | 1.00 | 2.10 | 0.12 |" in "\n".join(bench.tables(samples, ["direct", "moorage"]))


def test_a_cell_without_samples_shows_a_dash(bench) -> None:
    assert "| 0.3 KB of messages | - | - | - |" in "\n".join(bench.tables([], ["direct", "moorage"]))


@pytest.mark.parametrize("size", [0.3, 40, 200])
def test_requests_have_the_size_they_say_and_are_the_same_every_time(bench, size: float) -> None:
    raw = bench.bodies.body("calls", size)
    data = json.loads(raw)
    text = sum(len(m["content"]) for m in data["messages"])
    assert 0.9 < text / (size * 1000) < 1.3 and len(data["tools"]) == 12
    bench.bodies.body.cache_clear()
    assert bench.bodies.body("calls", size) == raw


@pytest.mark.parametrize("size", [40, 200])
def test_a_conversation_grows_from_request_to_request_and_has_the_size_it_says(bench, size: float) -> None:
    requests = [json.loads(raw)["messages"] for raw in bench.bodies.session(size)]
    assert len(requests) == bench.bodies.TURNS and all(b[: len(a)] == a for a, b in zip(requests, requests[1:], strict=False))
    sizes = [sum(len(m["content"]) for m in messages) / 1000 for messages in requests]
    assert 0.95 * size < sizes[0] < 1.05 * size and size + 15 < sizes[-1] < size + 19
    assert all(len(b) - len(a) == 2 for a, b in zip(requests, requests[1:], strict=False))


def test_every_conversation_of_the_load_client_is_a_new_one(bench) -> None:
    with bench.peers.Upstream() as upstream, bench.peers.Client() as client:
        bodies = tuple(json.dumps({"q": f"{bench.bodies.SESSION} {i}"}).encode() for i in range(3))
        asked = bench.peers.Direct(upstream.port).session(bodies, bench.bodies.SESSION) | {"requests": 7, "seconds": 60}
        (got,) = client.run({"seconds": 60, "groups": [asked]})
    assert (got["count"], got["bad"], len(got["first"]), len(got["opening"])) == (7, 0, 7, 3)


def test_requests_a_second_are_also_told_as_a_share_of_the_yardsticks(bench) -> None:
    rates = [("asgi", 1, 1000), ("moorage", 1, 400), ("asgi", 2, 3000), ("moorage", 2, 1500), ("moorage", 3, 9)]
    samples = [bench.Sample("plain x8", name, number, {"per_second": rate}, 0.0) for name, number, rate in rates]
    assert "| the same, share of asgi's, 8 clients | 0.45 | 1.00 |" in "\n".join(bench.tables(samples, ["moorage", "asgi"]))
    assert "share" not in "\n".join(bench.tables(samples, ["moorage"]))


@pytest.mark.parametrize("peer", ["Bare", "Asgi"])
def test_the_pass_throughs_give_on_what_the_upstream_says(bench, peer: str) -> None:
    made = getattr(bench.peers, peer)
    with bench.peers.Upstream() as upstream, bench.peers.Client() as client, made(upstream.port) as bare:
        kinds = ("plain", "calls", "chunks")
        asked = [bare.group(kind, bench.bodies.body(kind, 40)) | {"concurrency": 2, "requests": 6} for kind in kinds]
        *got, seen = client.run({"seconds": 60, "groups": [*asked, bare.health() | {"requests": 3}]})
    assert [(g["count"], g["bad"]) for g in got] == [(6, 0)] * 3 and (seen["count"], seen["bad"]) == (3, 0)
    for kind, g in zip(kinds, got, strict=True):
        bench.bodies.check(kind, g["sample"])


@pytest.mark.parametrize("kind", ["plain", "calls", "chunks", "paced"])
def test_client_and_upstream_agree_on_every_kind_of_answer(bench, kind: str) -> None:
    with bench.peers.Upstream() as upstream, bench.peers.Client() as client:
        direct = bench.peers.Direct(upstream.port)
        look = direct.health()
        asked = direct.group(kind, bench.bodies.body(kind, 40)) | {"concurrency": 2, "requests": 6, "stamps": kind == "paced"}
        got, seen = client.run({"seconds": 60, "groups": [asked, look | {"requests": 3}]})
    assert (got["count"], got["bad"], len(got["first"])) == (6, 0, 6) and seen["count"] == 3
    assert len(got["stamps"]) == (600 if kind == "paced" else 0)
    bench.bodies.check(kind, got["sample"])


def test_a_wrong_answer_stops_the_bench(bench) -> None:
    with pytest.raises(SystemExit, match="wrong answer"):
        bench.bodies.check("plain", 'data: {"choices":[{"delta":{"content":"no"}}]}\n\ndata: [DONE]\n\n')


def test_bad_answers_are_counted_and_shown(bench) -> None:
    with bench.peers.Upstream() as upstream, bench.peers.Client() as client:
        group = {"port": upstream.port, "path": "/elsewhere/v1", "body": base64.b64encode(b"{}").decode(), "requests": 2}
        (got,) = client.run({"seconds": 60, "groups": [group]})
    assert (got["count"], got["bad"]) == (0, 2) and '"status": "ok"' in got["sample"]


def test_the_page_has_the_figures_of_the_run(bench) -> None:
    """Every row of the tables in docs/results.md is what `gateway.py` makes of docs/results/gateway.json."""
    data = json.loads((ROOT / "docs/results/gateway.json").read_text())
    samples = [bench.Sample(**s) for s in data["samples"] if s["foreign"] <= bench.MAX_FOREIGN]
    page, names = (ROOT / "docs/results.md").read_text(), ["direct", *data["idle_mb"]]
    rows = [*bench.tables(samples, names), *bench.beside_table(samples, names)]
    assert len(rows) > 20 and [row for row in rows if row and row not in page] == []
    assert f"Idle: {data['idle_mb']['moorage']:.0f} MB" in page
