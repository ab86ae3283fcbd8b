"""The engine process, begun before the command line is read: it imports what it needs while the API process does the same.

It waits on a pipe for what it is to serve. When the pipe closes without a word, because the command line was wrong or the port is
taken, it ends. This file imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

COMMAND = (sys.executable, "-m", "engine.process")
WAIT = "--wait"


class Early:
    """A process that waits; `told` makes it the engine's. As `asyncio.subprocess.Process`, as far as the supervisor asks."""

    def __init__(self, pid: int, watch: int, pipe: int) -> None:
        self.pid, self.returncode = pid, None
        self._watch, self._pipe = watch, pipe

    async def told(self, socket: str, config: str) -> bool:
        """What it is to serve; from now on the running event loop watches it. False when it is gone already."""
        import asyncio

        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._watch, self._reap)
        try:
            os.write(self._pipe, f"{socket}\n{config}\n".encode())
        except OSError:
            return False
        finally:
            os.close(self._pipe)
        return True

    async def wait(self) -> int:
        await self._ended.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._watch)
        os.close(self._watch)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


_begun: Early | None = None


def begin(arguments: list[str]) -> None:
    """If these arguments of the command line are going to serve. Where a process cannot be watched nothing is begun."""
    global _begun
    if arguments[:1] != ["serve"] or "--help" in arguments:
        return
    end, pipe = os.pipe()
    try:
        pid = os.posix_spawn(
            COMMAND[0],
            [*COMMAND, WAIT],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, end, 0), (os.POSIX_SPAWN_DUP2, 2, 1)],
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
        )
        _begun = Early(pid, os.pidfd_open(pid), pipe)  # refused in some containers
    except OSError:
        os.close(pipe)
    finally:
        os.close(end)


def take() -> Early | None:
    """Once."""
    global _begun
    early, _begun = _begun, None
    return early
