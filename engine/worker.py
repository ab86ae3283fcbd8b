"""The engine process: one loop that receives, schedules, computes, samples and sends.

Started by `engine.supervisor`. It lives as long as its socket: when the API process goes away the loop ends. SIGTERM lets running
answers end (DRAIN_S at most, a second SIGTERM ends them), flushes the prefix cache and ends with code 0. Owns the process
(socket, signals, threads); decisions are the scheduler's.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from engine import experts_control
from engine.build import BuildError, Parts, build
from engine.cache_control import BadCommand, rebuild
from engine.config import EngineConfig, parse_config
from engine.elastic import Elastic
from engine.experts.devices import memory_info
from engine.ipc import (
    DRAIN_S,
    Cancel,
    Control,
    ControlReply,
    Failed,
    FrameReader,
    FromWorker,
    Generate,
    Loading,
    Ready,
    RequestError,
    ToWorker,
    frame,
)
from engine.lean import device_full
from engine.mapped import FileChanged
from engine.promises import Promise
from engine.protocol import log_line
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.step import Step
from engine.stores import stores_of

log = logging.getLogger(__name__)

RECEIVE = 1 << 20  # bytes a receive asks for: a long prompt arrives in few calls
BROKEN_STEPS = 3  # failed steps in a row after which the process ends and is started afresh
RATE_WINDOW_S = 10.0
WARM_S = 2.0  # without a request before what one might wait for is done: whoever saw us become ready asks sooner
IDLE_S = 0.2  # between two looks at the prefix cache's writer when nothing else happens
STALLED_S = 0.05  # wait before planning again when nothing could run; only a scheduler bug leads here, and it must not spin

Build = Callable[[EngineConfig, Callable[[float, str], None]], Parts]


class Gone(Exception):
    """The API process closed the socket."""


class Channel:
    """The worker's end of the socket. `wake` becomes readable when a signal arrives."""

    def __init__(self, sock: socket.socket, wake: socket.socket) -> None:
        self._sock, self._wake = sock, wake
        self._poll = select.poll()
        for end in (sock, wake):
            self._poll.register(end, select.POLLIN)
        self._frames = FrameReader(to_worker=True)

    def receive(self, timeout: float | None) -> list[ToWorker]:
        """Messages that have arrived; waits up to `timeout` seconds (None: until one or a signal arrives). Raises Gone."""
        ready = self._poll.poll(None if timeout is None else math.ceil(timeout * 1e3))
        if not ready:
            return []
        files = [file for file, _ in ready]
        if self._wake.fileno() in files:
            self._wake.recv(64)
        if self._sock.fileno() not in files:
            return []
        with _gone_on_error():
            data = self._sock.recv(RECEIVE)
        if not data:
            raise Gone
        return self._frames.feed(data)

    def send(self, messages: Iterable[FromWorker]) -> None:
        """Blocks while the API process does not read: a slow reader slows generation, memory stays bounded. Raises Gone."""
        data = b"".join(map(frame, messages))
        if data:
            with _gone_on_error():
                self._sock.sendall(data)


@contextlib.contextmanager
def _gone_on_error():
    try:
        yield
    except (ConnectionError, BrokenPipeError) as problem:
        raise Gone from problem


class Rate:
    """Events per second over the last RATE_WINDOW_S seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        self._seen.append((now, count))
        while self._seen[0][0] < now - RATE_WINDOW_S:
            self._seen.popleft()

    def per_second(self, now: float) -> float:
        recent = [(t, n) for t, n in self._seen if t >= now - RATE_WINDOW_S]
        return round(sum(n for _, n in recent) / RATE_WINDOW_S, 2)


class Worker:
    """The loop over a built model."""

    def __init__(
        self, channel: Channel, parts: Parts, clock: Callable[[], float] = time.monotonic, promise: Promise | None = None
    ) -> None:
        self._channel, self._parts, self._clock = channel, parts, clock
        self._scheduler = Scheduler(parts.prefix, parts.limits, clock, parts.grammars)
        self._runner = Runner(parts.forward, parts.library)
        self._born = clock()
        self._memory = Elastic(stores_of(parts, self._scheduler), promise=promise, device=memory_info(), mapped=parts.mapped)
        self._context = parts.limits.max_context  # as the API process was told
        self._broken = 0
        self._prefilled, self._decoded = Rate(), Rate()
        self._replies: list[FromWorker] = []
        self._later = deque(parts.later)
        self._rested = clock()  # since when nobody has asked for anything
        self._end_at: float | None = None  # when the loop ends although requests still run

    def run(self) -> int:
        """Until the API process goes away, SIGTERM or `shutdown`. Returns the exit code."""
        code = 0
        try:
            while not self._over():
                self._turn()
        except Gone:
            log.info("the API process is gone; the engine ends")
        except _TooBroken:
            code = 1
        self._scheduler.shutdown()
        self._parts.prefix.shutdown()
        with contextlib.suppress(Gone):
            self._flush()
        return code

    def _turn(self) -> None:
        idle = self._memory.tick(self._clock())
        if self._parts.prefix.tick():
            idle = min(idle, IDLE_S)
        if self._later:
            idle = min(idle, WARM_S)
        for message in self._channel.receive(0.0 if self._scheduler.busy else idle):
            self._handle(message)
        self._warm()
        step = self._scheduler.plan()
        if step:
            self._compute(step)
        self._flush()
        if not step and self._scheduler.busy:
            for message in self._channel.receive(STALLED_S):
                self._handle(message)

    def _warm(self) -> None:
        """One thing that a request might otherwise wait for, once WARM_S have passed without any."""
        now = self._clock()
        if self._scheduler.busy:
            self._rested = now
        elif self._later and now - self._rested >= WARM_S:
            try:
                self._later.popleft()()
            except Exception:  # whoever needs it meets the error again
                log.exception("preparing what requests may ask for failed")

    def _over(self) -> bool:
        """After a wish to stop: when no request is left that a client waits for, or the time for them is up."""
        return self._end_at is not None and (not self._scheduler.serving or self._clock() >= self._end_at)

    def _flush(self) -> None:
        if self._scheduler.limits.max_context != self._context:
            self._context = self._scheduler.limits.max_context
            self._replies.append(ready(self._parts, self._context))
        messages = [*self._scheduler.outbox, *self._replies]
        self._scheduler.outbox.clear()
        self._replies.clear()
        self._channel.send(messages)

    def _compute(self, step: Step) -> None:
        try:
            outcomes = self._runner.run(step)
        except (MemoryError, *device_full()):
            self._fail(
                step, 507, "out_of_memory", "the engine ran out of memory in this step: lower --prefill-chunk or --max-running"
            )
            return
        except FileChanged as problem:
            log.critical("%s: the engine process ends to be started afresh", problem)
            self._scheduler.fail(step, 502, "model_changed", str(problem))
            raise _TooBroken from problem
        except Exception as problem:
            log.exception("a step of %d sequences failed", len(step))
            self._fail(
                step, 500, "step_failed", f"the engine failed to compute this request ({type(problem).__name__}: {problem})"
            )
            return
        self._broken = 0
        self._scheduler.commit(step, outcomes)
        now = self._clock()
        sampled = sum(c.sample for c in step)
        self._decoded.add(now, sampled)
        self._prefilled.add(now, sum(c.end - c.start for c in step) - sampled)

    def _fail(self, step: Step, status: int, code: str, message: str) -> None:
        self._scheduler.fail(step, status, code, message)
        self._broken += 1
        if self._broken >= BROKEN_STEPS:
            log.critical("%d steps in a row failed: the engine process ends to be started afresh", self._broken)
            raise _TooBroken

    # --- messages

    def _handle(self, message: ToWorker) -> None:
        try:
            match message:
                case Generate() if self._end_at is not None:
                    self._replies.append(_shutting_down(message.id))
                case Generate():
                    self._scheduler.submit(message)
                case Cancel():
                    self._scheduler.cancel(message.id, message.reason)
                case Control():
                    self._replies.append(self._answer(message))
        except Exception as problem:  # one bad message must not end the others
            log.exception("message %s failed", message.id)
            text = f"{type(problem).__name__}: {problem}"
            if isinstance(message, Control):
                self._replies.append(ControlReply(id=message.id, body={}, error=text, status=500))
            else:
                self._replies.append(RequestError(id=message.id, status=500, message=text))

    def _answer(self, control: Control) -> ControlReply:
        verbs: dict[str, Callable[[], dict[str, object]]] = {
            "status": self._status,
            "requests": lambda: {"requests": self._scheduler.requests()},
            "cache.status": self._parts.prefix.status,
            "cache.rebuild": lambda: rebuild(self._parts.prefix, control.args.get("options", {}), self._memory),
            "memory.status": self._memory.status,
            "experts.status": lambda: experts_control.status(self._parts.experts),
            "experts.trace": lambda: experts_control.record(self._parts.experts, control.args.get("options", {})),
            "cache.forget": lambda: self._parts.prefix.delete_session(str(control.args["session"])),
            "shutdown": self._stop,
        }
        if control.verb not in verbs:
            text = f"no such control verb: {control.verb}; there are {', '.join(verbs)}"
            return ControlReply(id=control.id, body={}, error=text, status=404)
        try:
            return ControlReply(id=control.id, body=verbs[control.verb]())
        except BadCommand as problem:
            return ControlReply(id=control.id, body={}, error=str(problem), status=400)

    def _status(self) -> dict[str, object]:
        now, limits = self._clock(), self._scheduler.limits
        return {
            "uptime_s": round(now - self._born, 1),
            "running": len(self._scheduler.running),
            "queued": len(self._scheduler.queue),
            "max_running": limits.max_running,
            "max_queue": limits.max_queue,
            "max_context": limits.max_context,
            "decode_tok_s": self._decoded.per_second(now),
            "prefill_tok_s": self._prefilled.per_second(now),
            "counters": dict(self._scheduler.counters),
        }

    def _stop(self) -> dict[str, object]:
        """A signal handler: the loop looks at what it leaves. The second wish to stop does not wait."""
        now = self._clock()
        self._end_at = now if self._end_at is not None else now + DRAIN_S
        return {"stopping": True}


def _shutting_down(request: str) -> RequestError:
    text = "the engine is shutting down: retry when it is back"
    return RequestError(id=request, status=503, code="shutting_down", message=text)


class _TooBroken(Exception):
    pass


def serve(config: EngineConfig, sock: socket.socket, build: Build) -> int:
    """Load, say so, run. Returns the exit code of the process."""
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    channel = Channel(sock, wake)
    # While loading there is nothing to flush. An exception would be lost if the signal came inside of a finalizer.
    signal.signal(signal.SIGTERM, lambda *_: leave(0))
    try:
        parts = build(config, _progress(channel))
    except (BuildError, MemoryError) as problem:
        channel.send([Failed(message=str(problem) or "not enough memory to load the model")])
        return 1
    except Exception as problem:
        log.exception("loading failed")
        channel.send([Failed(message=f"loading {config.model} failed: {type(problem).__name__}: {problem}")])
        return 1
    worker = Worker(channel, parts, promise=Promise())
    signal.signal(signal.SIGTERM, lambda *_: worker._stop())
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    channel.send([ready(parts, parts.limits.max_context)])
    gc.freeze()  # what was loaded stays: looking through it for garbage would hold up an answer
    try:
        return worker.run()
    finally:
        signal.set_wakeup_fd(-1)  # its socket closes with this function


def ready(parts: Parts, context: int) -> Ready:
    return Ready(model=parts.model, max_context=context, vocab=parts.limits.vocab)


def _progress(channel: Channel) -> Callable[[float, str], None]:
    """Sends `Loading` when the stage changes or a percent is done."""
    last = (-1, "")

    def report(fraction: float, stage: str) -> None:
        nonlocal last
        if (int(fraction * 100), stage) != last:
            last = (int(fraction * 100), stage)
            channel.send([Loading(fraction=fraction, stage=stage)])

    return report


def main(build: Build = build) -> int:
    path, given = _arguments(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API process ends us in order
    try:
        config = parse_config(given)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname).1s engine %(message)s",
        datefmt="%H:%M:%S",
    )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as problem:
        print(f"cannot reach the API process at {path}: {problem.strerror}", file=sys.stderr)
        return 2
    try:
        return serve(config, sock, build)
    except Gone:
        log.info(log_line("the API process is gone; the engine ends"))
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun; a second wish for it must not interrupt it


def _arguments(words: Sequence[str]) -> tuple[str, str]:
    """Socket and configuration. What the API process says is read without argparse, which takes longer to import than to ask."""
    if len(words) == 4 and words[::2] == ["--socket", "--config"]:
        return words[1], words[3]
    from argparse import ArgumentParser

    parser = ArgumentParser(prog="engine.worker", description="The engine process; started by the API process.")
    parser.add_argument("--socket", required=True, help="Unix socket of the API process")
    parser.add_argument("--config", required=True, help="engine configuration as JSON")
    args = parser.parse_args(words)
    return args.socket, args.config


def leave(code: int) -> NoReturn:
    """End the process now. All that had to be kept is flushed; taking gigabytes apart object by object would take seconds."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
