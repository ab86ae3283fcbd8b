"""The API process from its first line: the engine process is started before what HTTP needs is imported, both take their time."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import socket
import sys

from engine.config import EngineConfig
from engine.lean import modules_alone
from engine.supervisor import Supervisor

ALONE = ("uvicorn", "prometheus_client")  # of which modules are used; the rest is a command line, and servers of their own


def run_server(config: EngineConfig, name: str, sock: socket.socket) -> int:
    """Serve on `sock`. Returns the process's exit code: 0 after a signal, 1 when the engine cannot run."""
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname).1s api    %(message)s",
        datefmt="%H:%M:%S",
    )
    with asyncio.Runner(loop_factory=_loop) as runner:
        return runner.run(_serve(config, name, sock))


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


async def _serve(config: EngineConfig, name: str, sock: socket.socket) -> int:
    supervisor = Supervisor(config)
    await supervisor.start()
    gc.disable()  # what is imported stays
    try:
        for package in ALONE:
            modules_alone(package)
        server = await asyncio.to_thread(importlib.import_module, "engine.server")
        gc.enable()
        return await server.serve(supervisor, config, name, sock)
    finally:
        await supervisor.stop()  # a second time where all went well
