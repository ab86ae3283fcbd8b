"""The HTTP server beside the engine's supervisor, in one event loop, until a signal, or until the engine cannot run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from types import FrameType

from uvicorn.config import Config
from uvicorn.server import Server

from engine.api.service import Service
from engine.app import create_app
from engine.config import EngineConfig
from engine.ipc import DRAIN_S
from engine.supervisor import EngineFailed, Supervisor

log = logging.getLogger("moorage")

CLOSE_S = 5  # for connections to take in their last bytes, once every answer is over


async def serve(supervisor: Supervisor, config: EngineConfig, name: str, sock: socket.socket) -> int:
    """Serve on `sock`. Returns the process's exit code: 0 after a signal, 1 when the engine cannot run."""
    app = create_app(supervisor, name, config.model)
    server = _Server(
        supervisor,
        Config(
            app,
            http="httptools",
            access_log=False,
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=int(DRAIN_S) + CLOSE_S,
            server_header=False,
        ),
    )
    host, port = sock.getsockname()[:2]
    log.info("listening on http://%s:%s (model `%s` is loading, see /health)", host, port, name)
    for number in (signal.SIGINT, signal.SIGTERM):  # until uvicorn takes them over, and after
        signal.signal(number, server.handle_exit)
    watch = asyncio.create_task(_watch(supervisor, app.state.service, server))
    try:
        await server.serve(sockets=[sock])
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
    return 1 if watch.done() and not watch.cancelled() and watch.result() else 0


class _Server(Server):
    """Ends in order: no new connections, DRAIN_S for the answers that run, then an error for each that is left.

    A second signal does not wait. When the connections have ended uvicorn lets the application stop the engine.
    """

    def __init__(self, supervisor: Supervisor, config: Config) -> None:
        super().__init__(config)
        self._supervisor, self._loop = supervisor, asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own would end the process by the signal in the end, and without the engine's flush at the second one."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._asked)

    def _asked(self) -> None:
        if self.should_exit:
            self._cut("the server was stopped before this answer was complete")
            return
        self.should_exit = True
        if self._supervisor.serving:
            log.info("ending: running answers have %.0f s, a second signal ends them now", DRAIN_S)
            late = f"the server is shutting down and this answer took longer than {DRAIN_S:.0f} s"
            self._loop.call_later(DRAIN_S, self._cut, late)

    def _cut(self, message: str) -> None:
        if self._supervisor.serving:
            log.warning("%d answers are cut off: %s", self._supervisor.serving, message)
            self._supervisor.end_requests(message)


async def _watch(supervisor: Supervisor, service: Service, server: Server) -> bool:
    """Tell when the model is ready; end the server when it never will be. Returns True for the latter."""
    ready = asyncio.create_task(_tell_ready(supervisor))
    engine = asyncio.create_task(supervisor.wait_failed())
    text = asyncio.create_task(service.text_failed.wait())
    try:
        await asyncio.wait({engine, text}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (ready, engine, text):
            task.cancel()
    message = service.text_error or (supervisor.state.message if supervisor.state.phase == "failed" else "")
    if not message:
        return False
    await supervisor.stop()  # what the engine still has to say comes before the reason, which users read last
    print(f"moorage: {message}", file=sys.stderr, flush=True)
    server.should_exit = True
    return True


async def _tell_ready(supervisor: Supervisor) -> None:
    with contextlib.suppress(EngineFailed):
        state = await supervisor.wait_ready()
        gc.freeze()  # imports and vocabulary stay: looking through them for garbage would hold up an answer
        log.info("ready: pid=%s engine=%s max_context=%s", os.getpid(), state.pid, state.max_context)
