"""Ports for servers that tests start as processes: no two in a run get the same one, and no outgoing connection is given it."""

from __future__ import annotations

import os
import random
import socket

# Below the ports that systems give to outgoing connections (32768 and up on Linux): one of those may take any port between the
# moment it is found free and the moment its server binds it. Every test process has a share of its own.
FIRST, LAST, SHARES = 20_000, 32_000, 8
_SHARE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
_SIZE = (LAST - FIRST) // SHARES
_left = random.sample(range(FIRST + _SHARE * _SIZE, FIRST + (_SHARE + 1) * _SIZE), _SIZE)


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on and that was not given out before."""
    while _left:
        port = _left.pop()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"none of {_SIZE} ports is free")
