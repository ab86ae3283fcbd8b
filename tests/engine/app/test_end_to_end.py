"""The command line, the HTTP process and the engine process together, on a tiny random checkpoint with a real tokenizer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from engine.cli import main as engine_main
from tests.support.engine_process import call_cli, one_line, run_cli, serving
from tests.support.text import tool, write_tokenizer
from tests.support.tiny import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # each test starts a server or asks one that others use

HI = [{"role": "user", "content": "The quick brown fox"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, the transformers model that saved it)"""
    path = tmp_path_factory.mktemp("tiny")
    model = make_tiny("qwen3_moe", path, vocab_size=700, max_position_embeddings=1024)
    return write_tokenizer(path, "json_calls"), model


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with serving(
        checkpoint[0], tmp_path_factory.mktemp("log") / "log", "--kernels", "reference", "--max-context", "1024"
    ) as running:
        early = running.http.get("/health")
        assert early.status_code in (200, 503), "the port answers before the model is loaded"
        running.wait_ready()
        yield running


def test_neither_process_ever_imports_torch(checkpoint, tmp_path):
    """Whatever is asked of an engine with native kernels."""
    pytest.importorskip("engine.kernels.cpu", reason="without the native kernels the engine process computes with torch")
    options = ("--kernels", "cpu", "--max-context", "512", "--kv-disk", str(tmp_path / "kv"))
    with serving(checkpoint[0], tmp_path / "log", *options) as running:
        running.wait_ready()
        http = running.http
        assert http.post("/v1/experts/trace", json={"action": "start"}).json()["recording"]
        for body in (
            {"prompt": "The quick brown fox " * 20, "logprobs": 2, "temperature": 0.7, "top_p": 0.9},
            {"prompt": "The quick brown fox " * 20 + "jumps", "echo": True, "logprobs": 1, "n": 2},
        ):
            assert http.post("/v1/completions", json={"model": "tiny", "max_tokens": 5, **body}).status_code == 200
        constrained = {"messages": HI, "tools": [tool("f", city="string")], "tool_choice": "required", "max_tokens": 20}
        assert http.post("/v1/chat/completions", json={"model": "tiny", **constrained}).status_code == 200
        assert "trace" in http.post("/v1/experts/trace", json={"action": "stop"}).json()
        assert http.post("/v1/cache/rebuild", json={"kv_bytes": 8 << 20, "flush": "ram"}).status_code == 200
        assert http.post("/v1/completions", json={"model": "tiny", "max_tokens": 5, "prompt": "a new one"}).status_code == 200
        for verb in ("status", "requests", "cache/status", "memory/status", "experts/status"):
            assert http.get(f"/v1/{verb}").status_code == 200
        for pid in (running.process.pid, running.engine_pid()):
            held = Path(f"/proc/{pid}/maps").read_text()
            assert "msgspec" in held and "torch" not in held and "transformers" not in held


def test_greedy_text_is_the_same_streamed_whole_alone_and_from_the_cache(server):
    def ask(**more):
        return server.openai.chat.completions.create(model="tiny", messages=HI, temperature=0, max_tokens=24, **more)

    whole = ask(extra_body={"ignore_eos": True})
    again = ask(extra_body={"ignore_eos": True})
    text = "".join(c.choices[0].delta.content or "" for c in ask(stream=True, extra_body={"ignore_eos": True}) if c.choices)
    assert whole.choices[0].message.content == again.choices[0].message.content == text and text
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (24, "length")
    assert again.usage.prompt_tokens_details.cached_tokens > whole.usage.prompt_tokens_details.cached_tokens == 0


def test_logprobs_from_outside_equal_transformers(server, checkpoint):
    tokens = [5, 99, 300, 17, 650, 3, 3, 41]
    made = server.openai.completions.create(model="tiny", prompt=tokens, echo=True, logprobs=5, max_tokens=1, temperature=0)
    with torch.no_grad():
        truth = torch.log_softmax(checkpoint[1](torch.tensor([tokens])).logits[0].double(), -1)
    scored = made.choices[0].logprobs.model_dump()
    assert scored["token_ids"][: len(tokens)] == tokens and scored["token_logprobs"][0] is None
    for i, token in enumerate(tokens[1:]):
        assert abs(scored["token_logprobs"][i + 1] - truth[i, token].item()) < 1e-3
        best = truth[i].topk(5)
        assert [t for t, _ in scored["top_token_ids"][i + 1]] == best.indices.tolist()
    assert scored["token_ids"][-1] == truth[-1].argmax().item()


def test_a_seed_repeats_and_a_ban_holds(server):
    def ask(**more):
        made = server.openai.chat.completions.create(model="tiny", messages=HI, max_tokens=16, **more)
        return made.choices[0].message.content

    assert ask(seed=5, temperature=1.5) == ask(seed=5, temperature=1.5) != ask(seed=6, temperature=1.5)
    greedy = server.openai.completions.create(model="tiny", prompt=[7, 8], max_tokens=1, temperature=0, logprobs=0)
    first = greedy.choices[0].logprobs.model_dump()["token_ids"][0]
    other = server.openai.completions.create(
        model="tiny", prompt=[7, 8], max_tokens=1, temperature=0, logprobs=0, logit_bias={str(first): -100}
    )
    assert other.choices[0].logprobs.model_dump()["token_ids"][0] != first


def test_concurrent_streams_do_not_disturb_each_other(server):
    from concurrent.futures import ThreadPoolExecutor

    def ask(i):
        made = server.openai.completions.create(model="tiny", prompt=[10 + i, 20, 30 + i], max_tokens=12, temperature=0)
        return made.choices[0].text

    alone = [ask(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone


def test_context_too_long_and_tools_over_the_wire(server):
    reply = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "word " * 2000}]})
    assert reply.status_code == 400 and "1024" in reply.json()["error"]["message"]
    made = server.openai.chat.completions.create(
        model="tiny", messages=HI, tools=[tool()], max_tokens=8, temperature=0, reasoning_effort="none"
    )
    assert made.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_client_that_leaves_frees_the_engine(server):
    before = server.http.get("/v1/status").json()["counters"].get("done_cancelled", 0)
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    ) as r:
        next(r.iter_lines())
    end = time.monotonic() + 30
    while (status := server.http.get("/v1/status").json())["running"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert status["counters"].get("done_cancelled", 0) == before + 1, "it ended because nobody listens, not because it was done"


def test_kill_9_of_the_engine_in_mid_stream(server):
    """The stream ends in an error, health says so, and the next request is answered by a new process."""
    pid = server.engine_pid()
    lines = []
    body = {"messages": HI, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            lines.append(line)
            if len(lines) == 8:
                os.kill(pid, signal.SIGKILL)
    text = "\n".join(lines)
    assert '"error"' in lines[-2] + lines[-1] and "SIGKILL" in text and "[DONE]" not in text and '"finish_reason":"' not in text
    server.wait_ready()
    assert server.engine_pid() != pid
    assert server.openai.chat.completions.create(model="tiny", messages=HI, max_tokens=2).choices
    assert server.http.get("/health").json()["restarts"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_in_order_with_code_0(checkpoint, tmp_path, number):
    with serving(checkpoint[0], tmp_path / "log") as running:
        running.wait_ready()
        worker = running.engine_pid()
        running.process.send_signal(number)
        assert running.process.wait(60) == 0
        assert not Path(f"/proc/{worker}").exists()
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_in_mid_stream_lets_the_answer_end_a_second_one_tells_the_client(checkpoint, tmp_path, signals):
    """Never a torn connection: the answer is whole, or its last event says why it is not."""
    with serving(checkpoint[0], tmp_path / "log", "--max-context", "1024") as running:
        running.wait_ready()
        body = {"messages": HI, "max_tokens": 40 if signals == 1 else 900, "ignore_eos": True, "stream": True, "logprobs": True}
        lines = []
        with running.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            for line in reply.iter_lines():
                lines += [line] if line else []
                if len(lines) == 2:
                    running.process.send_signal(signal.SIGTERM)
                if len(lines) > 1 and signals == 2 and "a second signal" in running.log.read_text():
                    running.process.send_signal(signal.SIGTERM)
                    signals = 0
        assert running.process.wait(60) == 0
    whole = lines[-1] == "data: [DONE]"
    assert whole or '"code":"shutting_down"' in lines[-1], lines[-1]
    assert len([x for x in lines if '"logprob"' in x]) == 40 or not whole or body["max_tokens"] == 900
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_mistakes_at_the_command_line_are_one_line(server, tmp_path, checkpoint):
    port = server.base.rsplit(":", 1)[1]
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"x")
    one_line(run_cli("serve", str(tmp_path / "none")), "no such file")
    one_line(run_cli("serve", str(tmp_path / "empty")), "config.json")
    one_line(run_cli("serve", str(tmp_path / "weights.bin")), ".gguf")
    one_line(run_cli("serve", str(checkpoint[0]), "--port", port), port, "in use")
    one_line(run_cli("serve", str(checkpoint[0]), "--kv-memory", "lots"), "lots")
    one_line(run_cli("serve", str(checkpoint[0]), "--kernels", "magic"), "kernels")


def test_the_cache_is_seen_and_changed_from_the_command_line(server):
    def moorage_cache(*arguments: str) -> subprocess.CompletedProcess:
        return call_cli(engine_main, "cache", *arguments, "--url", server.base)

    own = [{"role": "user", "content": "Nobody else asks the server of these tests to look into its cache."}]
    server.openai.chat.completions.create(model="tiny", messages=own, max_tokens=2, extra_body={"moorage": {"session": "a/b"}})
    assert json.loads(moorage_cache("status").stdout)["ram"]["pages"] > 0
    assert json.loads(moorage_cache("delete", "a/b").stdout)["ram_tokens"] > 0
    assert json.loads(moorage_cache("rebuild", "--flush", "all").stdout)["status"]["ram"]["nodes"] >= 0
    one_line(moorage_cache("rebuild"), "nothing to do", "--flush")
    one_line(moorage_cache("rebuild", "--disk", "many"), "many")
    one_line(moorage_cache("rebuild", "--disk", "1G"), "--kv-disk")
    one_line(moorage_cache("rebuild", "--flush", "everything"), "ram, disk or all")
    one_line(run_cli("cache", "status", "--url", "http://127.0.0.1:9", module="gateway.cli"), "no engine answers")
    shown = run_cli("cache", "--help", module="gateway.cli").stdout
    assert all(verb in shown for verb in ("status", "rebuild", "delete"))


def test_memory_is_seen_and_moved_from_the_command_line(server):
    def moorage_memory(*arguments: str) -> subprocess.CompletedProcess:
        return call_cli(engine_main, "memory", *arguments, "--url", server.base)

    seen = json.loads(moorage_memory("status").stdout)["stores"]
    half = seen["kv_bytes"]["bytes"] // 2
    moved = json.loads(moorage_memory("set", "--kv", str(half), "--running", "2").stdout)["memory"]["stores"]
    assert 0 < moved["kv_bytes"]["bytes"] <= half and moved["max_running"]["units"] == 2
    ask = [{"role": "user", "content": "Say something short."}]
    assert server.openai.chat.completions.create(model="tiny", messages=ask, max_tokens=2).usage.completion_tokens == 2
    whole = (str(seen["kv_bytes"]["bytes"]), str(seen["max_running"]["units"]))
    back = json.loads(moorage_memory("set", "--kv", whole[0], "--running", whole[1]).stdout)["memory"]["stores"]
    assert back["kv_bytes"]["units"] == seen["kv_bytes"]["units"]
    one_line(moorage_memory("set"), "nothing to do", "--kv")
    one_line(moorage_memory("set", "--kv", "1K"), "smallest context")
    one_line(moorage_memory("set", "--experts", "1G"), "expert")


def test_memory_moves_while_requests_run_and_wait_and_none_is_refused(server):
    from concurrent.futures import ThreadPoolExecutor

    def ask(i: int) -> tuple[int, str]:
        body = {"prompt": [10 + i, 20, 30 + i], "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        reply = server.http.post("/v1/completions", json=body)
        return reply.status_code, reply.json()["choices"][0]["text"] if reply.status_code == 200 else reply.text

    def rebuild(**wanted: int) -> int:
        return server.http.post("/v1/cache/rebuild", json=wanted).status_code

    stores = server.http.get("/v1/memory/status").json()["stores"]
    whole, places = stores["kv_bytes"]["bytes"], stores["max_running"]["units"]
    alone = [ask(i) for i in range(5)]
    assert all(status == 200 for status, _ in alone)
    assert rebuild(max_running=1) == 200
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(ask, i) for i in range(5)]
        end = time.monotonic() + 60
        while not ((seen := server.http.get("/v1/status").json())["running"] and seen["queued"]):
            assert time.monotonic() < end, seen
        moves = [rebuild(kv_bytes=size, max_running=running) for size in (whole // 2, whole) for running in (2, 1)]
        assert moves == [200] * 4
        assert [each.result() for each in answers] == alone
    assert rebuild(kv_bytes=whole, max_running=places) == 200


def test_models_that_cannot_be_loaded_end_the_server_with_one_line(checkpoint, tmp_path):
    def edit(directory: Path, **changes: object) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | changes))

    for name, change, words in (
        ("unknown", lambda d: edit(d, model_type="nonesuch"), ("nonesuch", "qwen3_moe")),
        ("truncated", lambda d: os.truncate(d / "model.safetensors", 5000), ("model.safetensors", "truncated")),
        ("mismatch", lambda d: edit(d, hidden_size=64), ("model.embed_tokens.weight", "[700, 48]", "[700, 64]")),
        ("no tokenizer", lambda d: (d / "tokenizer.json").unlink(), ("tokenizer.json",)),
    ):
        directory = tmp_path / name
        directory.mkdir()
        for file in checkpoint[0].iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        change(directory)
        one_line(run_cli("serve", str(directory), "--port", "0"), *words)
    much = run_cli("serve", str(checkpoint[0]), "--port", "0", "--kv-memory", "900T")
    one_line(much, f"{900 << 10}.00 GiB", "GiB are available")


def test_help_teaches():
    text = run_cli("serve", "--help").stdout
    assert "Example" in text and "loopback" in text and "/health" in text
    shown = run_cli("--help").stdout
    assert all(verb in shown for verb in ("serve", "models", "status"))
