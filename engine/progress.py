"""How far something long has come: a bar on a terminal; in a log, a script or a container a line now and then. Goes to stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

EVERY_S = 5.0  # between two lines where there is no terminal

Update = Callable[[int, int], None]  # done, total


@contextlib.contextmanager
def progress(
    text: Callable[[int], str] = str, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Update]:
    """Yields what to call with (done, total), as often as one likes. `text` says an amount as people read it, e.g. `gib`."""
    file = file or sys.stderr
    if not file.isatty():
        yield _Lines(text, file, clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn(), console=Console(file=file)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, description=f"{text(done)} of {text(total)}")


class _Lines:
    def __init__(self, text: Callable[[int], str], file: TextIO, clock: Callable[[], float]) -> None:
        self._text, self._file, self._clock = text, file, clock
        self._began = self._said = clock()
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """A line, if the last one is EVERY_S old; what was there before the first call took no time and is not counted."""
        now = self._clock()
        if self._first is None:
            self._first = done
        if now - self._said < EVERY_S:
            return
        self._said, came = now, done - self._first
        left = f", about {(now - self._began) * (total - done) / came:.0f} s left" if came > 0 else ""
        print(f"{self._text(done)} of {self._text(total)}{left}", file=self._file, flush=True)
