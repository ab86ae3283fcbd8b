"""Running the gateway: uvicorn on uvloop, bound before anything is promised, with errors a user can read."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import socket
import sys

import uvicorn

from gateway import tracing
from gateway.app import App
from gateway.config import Config
from gateway.cork import CorkedProtocol
from gateway.log_lines import log_to_stderr

log = logging.getLogger("moorage")

# A thread that wants the interpreter waits this long for one that computes. With the default of 5 ms a token is that late
# whenever the records thread writes; shorter costs more switches than it saves.
SWITCH_S = 0.0005
# Young objects before the collector looks through them. Requests leave few cycles behind, and with the default of 700 the
# objects of requests in flight and of records in the queue are looked through again and again; with 20,000, which 64 clients
# keep alive, it still took a twentieth of a busy gateway. To look through this many takes 3 ms, once in a long while.
GC_YOUNG = 50_000
# Streams of a stopping gateway get this long to end by themselves before they are cut (and recorded as cancelled).
GRACE_S = 10
BACKLOG = 2048
# New connections taken each time round the event loop. libuv takes one from a socket, and a turn under load is 10 ms long: the
# last of 64 agents that come at once would wait for 600 ms. Copies of the socket share its queue.
ACCEPTS = 16
# Bytes that glibc keeps for the next request instead of giving them back to the kernel, and below which it asks the kernel for
# none. A body of 200 KB would else be mapped, cleared and unmapped five times on its way, for a third of what the way costs.
MALLOC_KEEPS = 32 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


class CannotListen(Exception):
    """`str()` is one line for the user."""


def serve(config: Config, log_level: str = "info") -> None:
    """Serve until a signal comes. Raises CannotListen, and NoTracing when tracing is on without its packages."""
    log_to_stderr(log_level)
    if config.tracing.enabled:
        tracing.require()
    listener = bind(config.listen.host, config.listen.port, config.timeouts.idle)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d with the configuration of %s", host, port, config.source)
    if not config.keys and host not in ("127.0.0.1", "::1"):
        log.warning("anyone who reaches %s:%d may use it: no keys are configured; add a keys section", host, port)
    server = uvicorn.Server(
        uvicorn.Config(
            App(config),
            loop="uvloop",
            http=CorkedProtocol,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=75,  # longer than agents pause between turns of a busy session, shorter than NAT tables forget
        )
    )
    _keep_memory()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # what the imports made lives as long as we do; looking through it takes 9 ms each time
    gc.set_threshold(GC_YOUNG)
    server.run(sockets=[listener, *(listener.dup() for _ in range(ACCEPTS - 1))])


def _keep_memory() -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MALLOC_KEEPS)
        mallopt(M_TRIM_THRESHOLD, MALLOC_KEEPS)


def bind(host: str, port: int, patience: float) -> socket.socket:
    """A bound socket; the server makes it listen. Raises CannotListen with the remedy.

    A client that takes nothing of what it is sent for `patience` seconds is cut off by the system: whoever reads nothing would
    otherwise keep its connection, and what is written to it, for as long as it likes, also after its answer was given up.

    The protocol is named explicitly: asyncio turns Nagle off only on sockets that say IPPROTO_TCP, and accepted sockets inherit
    that. With `socket.create_server` they do not say it, and every streamed token would wait for the client's last ACK.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(patience * 1000)))
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener
    except (OSError, OverflowError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise CannotListen(f"cannot listen on {host}:{port} ({reason}). Stop who uses it, or choose another --port") from None
