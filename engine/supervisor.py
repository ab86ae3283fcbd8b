"""Starts, watches and restarts the engine process for the API process, and carries its messages. Imports no torch.

One `Supervisor` per server. The worker connects back over a Unix socket in a private directory; its log goes to our stderr.
When it dies, or hangs for HANG_S, every request in flight ends with one clear error and a new process is started; a model that
cannot be loaded is final.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine import early
from engine.config import EngineConfig, dump_config
from engine.connection import Connection
from engine.ipc import (
    Cancel,
    Control,
    ControlReply,
    Done,
    Failed,
    FrameReader,
    FromWorker,
    Generate,
    Loading,
    Ready,
    RequestError,
    Started,
    Tokens,
    frame,
)
from engine.state import EngineState, Stream

log = logging.getLogger(__name__)

WORKER = early.COMMAND
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # waits before the 1st, 2nd, ... restart in a row
STEADY_S = 60.0  # a process that was ready for this long starts the backoff afresh
LOADING_DEATHS = 3  # deaths before Ready in a row that are final: what kills it while loading will kill it again
STOP_S = 35.0  # time to end after SIGTERM; the prefix cache gives its disk writer 30 s of it
HANG_S = 300.0  # a step lasts seconds; after this long without a word while work is there, it will not end
SOON_S = 1.0  # a signal to the whole process group ends the worker before the API process has begun to stop
EXIT_S = 1.0  # a process that crashed is gone this soon after its socket; then its end can be told in the error


HINTS = {
    signal.SIGKILL: " (often: out of memory)",
    signal.SIGBUS: " (often: the model's file was cut short while it was mapped, or its disk failed)",
}


class EngineFailed(Exception):
    """The engine cannot run. The message is one line for the user."""


class Supervisor:
    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] = WORKER,
        backoff_s: Sequence[float] = BACKOFF_S,
        hang_s: float = HANG_S,
    ) -> None:
        self.state = EngineState()
        self._config, self._command, self._backoff_s, self._hang_s = config, tuple(command), tuple(backoff_s), hang_s
        self._heard = 0.0  # when the worker last said something, or had nothing to say
        self._killed = ""  # why we ended the process ourselves
        self._streams: dict[str, Stream] = {}
        self._controls: dict[str, asyncio.Future[ControlReply]] = {}
        self._control_ids = 0
        self._writer: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | early.Early | None = None
        self._connections: asyncio.Queue[Connection] = asyncio.Queue()
        self._changed, self._stopping = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- life

    async def start(self) -> None:
        """Start the engine process and return at once; it is ready when `state.ready` (see `wait_ready`). Once is enough."""
        if self._task is not None:
            return
        self._dir = Path(tempfile.mkdtemp(prefix="moorage-"))  # mkdtemp makes it 0700
        connected = partial(Connection, self._connections.put_nowait)
        self._server = await asyncio.get_running_loop().create_unix_server(connected, path=str(self._dir / "engine"))
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._over)

    async def wait_ready(self) -> EngineState:
        """Raises EngineFailed when it never will be."""
        await self._until(lambda: self.state.phase in ("ready", "failed", "stopped"))
        if not self.state.ready:
            raise EngineFailed(self.state.message)
        return self.state

    async def wait_failed(self) -> str:
        """Return the one line that says why the engine cannot run, when that is so. The server should then exit non-zero."""
        await self._until(lambda: self.state.phase in ("failed", "stopped"))
        return self.state.message

    def end_requests(self, message: str) -> None:
        """End every request now, with an error that says `message`."""
        for id in list(self._streams):
            self.cancel(id, "shutting down")
        self._fail_all(503, "shutting_down", message)

    async def stop(self) -> None:
        """Let the worker flush and end it."""
        if self._task is None or self._stopping.is_set():
            return
        self._stopping.set()
        if self._process is not None:
            self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=STOP_S)
        if not done:
            log.warning("the engine did not end within %.0f s after SIGTERM and is killed", STOP_S)
            self._signal(signal.SIGKILL)
            await self._task
        self._set(phase="stopped", message="the server is shutting down")
        self._fail_all(503, "shutting_down", "the server is shutting down")
        self._server.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _until(self, condition) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._changed.set()

    def _over(self, task: asyncio.Task[None]) -> None:
        """A bug in the supervision must not leave requests waiting for ever."""
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("the supervision of the engine ended", exc_info=problem)
            message = f"the supervision of the engine met a bug in itself ({type(problem).__name__}: {problem})"
            self._set(phase="failed", message=message)
            self._fail_all(500, "internal_error", message)

    # --- the process

    async def _run(self) -> None:
        failures = deaths = 0
        while True:
            started = time.monotonic()
            self._killed = ""
            how = await self._one_process()
            if how == describe_exit(0):  # somebody stopped it; most often all of us, by a signal to the whole group
                await self._stopped_within(SOON_S)
            if self.state.phase == "failed" or self._stopping.is_set():
                return
            was_ready = self.state.ready
            deaths = 0 if was_ready else deaths + 1
            failures = 0 if was_ready and time.monotonic() - started > STEADY_S else failures
            if deaths >= LOADING_DEATHS or (how == describe_exit(2) and not was_ready):
                self._set(phase="failed", message=f"the engine {how} while loading {self._config.model}, {deaths} times in a row")
                return
            wait = self._backoff_s[min(failures, len(self._backoff_s) - 1)]
            failures += 1
            log.error("the engine %s and is started again in %.1f s", how, wait)
            self._set(
                phase="restarting",
                fraction=0.0,
                stage="restarting",
                message=f"the engine {how}",
                restarts=self.state.restarts + 1,
            )
            self._fail_all(502, "engine_restarted", f"the engine {how} and is being restarted: retry in a moment")
            if await self._stopped_within(wait):
                return

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    async def _one_process(self) -> str:
        """Run one worker from start to end and say how it ended."""
        while not self._connections.empty():  # of a process that died between connecting and being noticed
            self._connections.get_nowait().transport.close()
        try:
            process = await self._start(str(self._dir / "engine"), dump_config(self._config))
        except OSError as problem:  # too many processes, no memory
            return f"could not be started ({problem.strerror})"
        self._process = process
        self._set(pid=process.pid)
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        ended = asyncio.create_task(process.wait())
        connecting = asyncio.create_task(self._connections.get())
        try:
            await asyncio.wait({ended, connecting}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                connection = connecting.result()
                self._writer = connection.transport
                watch = asyncio.create_task(self._watch(process))
                try:
                    connection.listen(self._received)
                    await connection.closed
                finally:
                    watch.cancel()
                    self._writer = None
                    connection.transport.close()
                await self._reap(process)
            code = await ended
            return self._killed or describe_exit(code)
        finally:
            connecting.cancel()
            ended.cancel()

    async def _start(self, socket: str, config: str) -> asyncio.subprocess.Process | early.Early:
        begun = early.take() if self._command == WORKER else None
        if begun and await begun.told(socket, config):
            return begun
        arguments = ("--socket", socket, "--config", config)
        return await asyncio.create_subprocess_exec(*self._command, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=2)

    async def _watch(self, process: asyncio.subprocess.Process | early.Early) -> None:
        """Ask a silent worker that has work for a sign of life, which it gives after every step; kill it when none comes."""
        pause, before = self._hang_s / 10, time.monotonic()
        self._heard = before
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            if not self.state.ready or not (self._streams or self._controls) or now - before > 2 * pause:
                self._heard = now  # nothing to say, or this process itself was stopped for a while
            before, silent = now, now - self._heard
            if silent > self._hang_s:
                self._killed = f"hung (no sign of life for {silent:.0f} s) and was killed"
                log.error("the engine %s; if single steps take that long here, lower --prefill-chunk", self._killed)
                process.kill()
                return
            if silent > pause:
                self._set(message=f"the engine has said nothing for {silent:.0f} s: a step takes very long or it hangs")
                log.warning("%s", self.state.message)
                self._send(Control(id="sign-of-life", verb="status"))

    def _hear(self) -> None:
        self._heard = time.monotonic()
        if self.state.ready and self.state.message:
            self._set(message="")

    async def _reap(self, process: asyncio.subprocess.Process | early.Early) -> None:
        """The socket is closed; a process that still lives is of no use."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), EXIT_S)
            return
        self._fail_all(502, "engine_restarted", "the engine closed its connection and is being restarted: retry in a moment")
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            log.error("the engine closed its socket but did not end: it is killed")
            process.kill()

    # --- messages

    def _received(self, frames: FrameReader, data: memoryview) -> bool:
        """False when it could not be read: the process is then of no use."""
        self._hear()
        try:
            messages = frames.feed(data)
        except ValueError as problem:  # msgspec's errors are ValueErrors
            self._killed = f"sent a message that cannot be read ({problem}) and was ended"
            return False
        for message in messages:
            self._take(message)
        return True

    def _take(self, message: FromWorker) -> None:
        match message:
            case Started() | Tokens():
                if stream := self._streams.get(message.id):
                    stream.put(message)
            case Done() | RequestError():
                if stream := self._streams.pop(message.id, None):
                    stream.put(message)
            case ControlReply():
                future = self._controls.pop(message.id, None)
                if future and not future.done():
                    future.set_result(message)
            case Loading():
                if not self.state.ready:
                    phase = "restarting" if self.state.restarts else "loading"
                    self._set(phase=phase, fraction=message.fraction, stage=message.stage)
            case Ready():
                self._set(
                    phase="ready", fraction=1.0, stage="", message="",
                    model=message.model, max_context=message.max_context, vocab=message.vocab,
                )  # fmt: skip
            case Failed():
                self._set(phase="failed", message=message.message)
                self._fail_all(503, "engine_failed", message.message)

    def _send(self, message: Generate | Cancel | Control) -> bool:
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(frame(message))
        return True

    def _fail_all(self, status: int, code: str, message: str) -> None:
        for stream in self._streams.values():
            stream.put(RequestError(id=stream.id, status=status, code=code, message=message))
        self._streams.clear()
        for id, future in self._controls.items():
            if not future.done():
                future.set_result(ControlReply(id=id, body={}, error=message, status=status))
        self._controls.clear()

    # --- requests

    @property
    def serving(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def generate(self, request: Generate) -> Stream:
        """Send a request. An engine that is not ready answers with an error in the stream, never with an exception."""
        stream = Stream(self, request.id)
        if request.id in self._streams:
            raise ValueError(f"request id {request.id} is in use")
        if self.state.ready and self._send(request):
            self._streams[request.id] = stream
        else:
            stream.put(RequestError(id=request.id, status=503, code="engine_not_ready", message=self.not_ready()))
        return stream

    def not_ready(self) -> str:
        """One line for clients that come too early."""
        s = self.state
        if s.phase == "loading":
            return f"the model is loading ({s.fraction:.0%}, {s.stage}): retry in a moment"
        if s.phase == "failed":
            return f"the engine cannot run: {s.message}"
        return "the server is shutting down" if s.phase == "stopped" else "the engine is being restarted: retry in a moment"

    def cancel(self, id: str, reason: str) -> None:
        if id in self._streams:
            self._send(Cancel(id=id, reason=reason))

    async def control(self, verb: str, timeout: float = 30.0, **args: Any) -> ControlReply:
        """Ask the worker. Errors come as a reply with `error` and an HTTP `status`."""
        self._control_ids += 1
        id = f"control-{self._control_ids}"
        if not self.state.ready or not self._send(Control(id=id, verb=verb, args=args)):
            return ControlReply(id=id, body={}, error=self.not_ready(), status=503)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._controls[id] = future
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            self._controls.pop(id, None)
            text = f"the engine did not answer {verb} within {timeout:.0f} s: a step takes very long or it hangs"
            return ControlReply(id=id, body={}, error=text, status=504)


def describe_exit(code: int) -> str:
    """`-9` -> `was killed by SIGKILL (...)`."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in iter(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}{HINTS.get(-code, '')}"
