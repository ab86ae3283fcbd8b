"""What the worker's loop does after a wish to stop, with a clock that only moves when told."""

import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from gguf import GGMLQuantizationType as Type

from engine.build import build
from engine.config import EngineConfig
from engine.ipc import BACKGROUND, DRAIN_S, Done, Generate, RequestError
from engine.mapped import FileChanged
from engine.worker import WARM_S, Worker
from tests.engine.serve.fake_worker import fake_build
from tests.engine.serve.harness import Engine, generate
from tests.support.tiny import make_tiny
from tests.support.tiny_gguf import write_gguf


@dataclass
class Loop:
    """A worker without a socket or a process."""

    now: float = 0.0
    inbox: list = field(default_factory=list)
    sent: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = Worker(self, fake_build(EngineConfig(model="quick"), lambda *_: None), lambda: self.now)

    def receive(self, timeout):
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages) -> None:
        self.sent += messages

    def turn(self, *messages: Generate) -> None:
        self.inbox += messages
        self.worker._turn()

    def end(self, id: str) -> Done | RequestError:
        (end,) = (m for m in self.sent if m.id == id and isinstance(m, (Done, RequestError)))
        return end


def test_running_answers_end_and_no_new_ones_begin() -> None:
    loop = Loop()
    loop.turn(generate("old", [1], 20))
    loop.worker._stop()
    loop.turn(generate("new", [1], 1))
    assert loop.end("new").status == 503 and loop.end("new").code == "shutting_down"
    while not loop.worker._over():
        loop.turn()
    assert loop.end("old").completion == 20


def test_a_model_that_was_changed_underneath_ends_the_process_and_commits_nothing() -> None:
    loop = Loop()
    loop.turn(generate("kept", [1], 20))
    before = len(loop.sent)

    def changed(batch):
        raise FileChanged("model.gguf was changed")

    loop.worker._runner._forward = changed
    assert loop.worker.run() == 1
    end = loop.end("kept")
    assert (end.status, end.code, end.message) == (502, "model_changed", "model.gguf was changed")
    assert all(isinstance(m, RequestError) for m in loop.sent[before:])


def test_a_step_on_a_file_that_was_written_to_is_not_answered_with(tmp_path) -> None:
    """A start maps what it can, and looks at the file behind every step."""
    pytest.importorskip("engine.kernels.cpu", reason="only native kernels compute on a mapped file")
    file = tmp_path / "model.gguf"
    write_gguf(make_tiny("qwen3_moe", tmp_path / "hf", hidden_size=64, moe_intermediate_size=64), file, Type.Q8_0)
    config = EngineConfig(model=str(file), kernels="cpu", threads=1, max_context=256, kv_bytes=1 << 24)
    parts = build(config, lambda *_: None)
    assert parts.mapped > 0
    engine = Engine(parts)
    engine.run(generate("before", [5, 6, 7], 2))
    os.utime(file, ns=(1, 1))
    with pytest.raises(FileChanged):
        engine.run(generate("behind", [8, 9], 2))


def test_what_requests_may_ask_for_is_prepared_when_none_has_come_for_a_while() -> None:
    loop, done = Loop(), []

    def broken() -> None:
        done.append("broken")
        raise ValueError("no vocabulary")

    loop.worker._later.extend((broken, lambda: done.append("fine")))
    loop.turn(generate("a", [1], 3))
    loop.now = 10.0  # it runs: however long that takes, nothing is prepared
    while loop.worker._scheduler.busy:
        loop.turn()
    assert not done
    loop.now += WARM_S / 2
    loop.turn()
    assert not done
    loop.now += WARM_S / 2
    loop.turn()
    assert done == ["broken"]
    loop.turn()
    loop.turn()
    assert done == ["broken", "fine"]


def test_an_idle_worker_ends_at_once() -> None:
    loop = Loop()
    loop.turn()
    assert not loop.worker._over()
    loop.worker._stop()
    assert loop.worker._over()


def test_what_nobody_waits_for_is_not_waited_for() -> None:
    loop = Loop()
    loop.turn(generate("next", [1] * 3000, 0, priority=BACKGROUND))
    loop.worker._stop()
    assert loop.worker._over()


@pytest.mark.parametrize("signals", [1, 2])
def test_long_answers_are_waited_for_until_the_time_is_up_or_the_second_signal(signals) -> None:
    loop = Loop()
    loop.turn(generate("long", [1], 3000))
    for _ in range(signals):
        loop.worker._stop()
    if signals == 1:
        loop.now += DRAIN_S * 0.9
        assert not loop.worker._over()
        loop.now += DRAIN_S * 0.2
    assert loop.worker.run() == 0
    assert loop.end("long").code == "shutting_down"


TERMINATED = """
import os, signal, socket, time, weakref
from engine import worker
from engine.config import EngineConfig

class Thing:
    def __del__(self):
        if {deleted}:
            os.kill(os.getpid(), signal.SIGTERM)

def build(config, progress):
    thing = Thing()
    if not {deleted}:
        weakref.finalize(thing, os.kill, os.getpid(), signal.SIGTERM)
    del thing
    for _ in range(1000):
        time.sleep(0.01)

raise SystemExit(10 + worker.serve(EngineConfig(model="m"), socket.socketpair()[0], build))
"""


@pytest.mark.parametrize("deleted", [True, False], ids=["__del__", "finalize"])
def test_a_wish_to_stop_while_loading_is_heard_inside_of_a_finalizer(deleted: bool) -> None:
    """What is raised there goes nowhere but to stderr."""
    done = subprocess.run([sys.executable, "-c", TERMINATED.format(deleted=deleted)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
