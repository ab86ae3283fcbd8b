"""kill -9 of the engine in the middle of an answer: a clear error, a written record, a new engine. And clients that go away."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import openai
import pytest

from .agent import ask, client
from .harness import MODEL, Service, eventually, get, service

pytestmark = pytest.mark.slow

LONG = 20_000  # tokens: the engine must be in the middle of them when the signal comes


@pytest.fixture
def own(demo_model, tmp_path):
    with service(tmp_path, demo_model) as up:
        yield up


def worker_of(up: Service) -> int:
    """Pid of the engine process below the engine's API process."""
    parent = up.engine.popen.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (worker,) = [int(pid) for pid in children if b"engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return worker


def open_stream(up: Service):
    options = {"model": MODEL, "stream": True, "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    stream = client(up, timeout=120).chat.completions.create(messages=[{"role": "user", "content": "Count."}], **options)
    next(iter(stream))
    return stream


def test_kill_9_of_the_worker_mid_stream(own: Service) -> None:
    stream = open_stream(own)
    worker = worker_of(own)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(openai.APIError) as broken:
        for _ in stream:
            pass
    assert "engine" in str(broken.value).lower() and "Traceback" not in str(broken.value)
    (record,) = own.records(1)
    assert record["outcome"] != "ok" and record["error"]["message"]
    assert record["answer"]["channels"], "what had been streamed is recorded"
    after = eventually(lambda: (h := get(own.engine.url + "/health")) and h[0] == 200 and h[1], 60, "the restart")
    assert worker_of(own) != worker and after["restarts"] == 1
    assert ask(client(own), [{"role": "user", "content": "What is 2 + 2?"}]).finish in ("stop", "tool_calls")


def test_kill_9_of_the_whole_engine_is_a_clear_error_and_a_record(own: Service) -> None:
    stream = open_stream(own)
    os.killpg(own.engine.popen.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    assert own.records(1)[0]["outcome"] != "ok"
    with pytest.raises(openai.APIStatusError) as refused:
        ask(client(own), [{"role": "user", "content": "Hello?"}])
    assert refused.value.status_code in (502, 503) and "engine" in refused.value.message.lower()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_goes_away_stops_the_engines_work(own: Service, stream: bool) -> None:
    def status() -> dict:
        return get(own.engine.url + "/v1/status")[1]

    if stream:
        open_stream(own).close()
    else:
        ask_whole = client(own, timeout=3).chat.completions.create
        with pytest.raises(openai.APITimeoutError):
            messages = [{"role": "user", "content": "Count."}]
            ask_whole(messages=messages, model=MODEL, max_tokens=LONG, extra_body={"ignore_eos": True})
    (record,) = own.records(1)
    assert record["outcome"] == "cancelled"
    eventually(lambda: not status()["running"], 20, "the end of the cancelled request")
    counters = status()["counters"]
    assert counters["done_cancelled"] == 1 and counters["sampled_tokens"] < LONG, "ended because nobody listens"
