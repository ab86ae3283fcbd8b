"""Log lines on stderr, cheap enough for one a request: the date is made once a second, lines of a moment are written together.

Writing each by itself costs little, but gives the interpreter away each time, and the records thread then has to be waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
# What `kill -9` may lose of lines below WARNING, and what a reader waits for them; as for records.
BATCH_S = 0.05
BATCH_LINES = 256


class Line(logging.Formatter):
    """FORMAT."""

    def __init__(self) -> None:
        super().__init__(FORMAT)
        self._second, self._date = 0, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return self.date(record.created)

    def date(self, at: float) -> str:
        if (second := int(at)) != self._second:
            self._second, self._date = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._date},{int((at - second) * 1000):03d}"


class LineHandler(logging.StreamHandler):
    """From WARNING on, and outside the event loop, every line is written at once."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._line = Line()
        self.setFormatter(self._line)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._add(record.levelno, self.format(record))
        except Exception:
            self.handleError(record)

    def say(self, level: int, name: str, text: str) -> None:
        """What `emit` does with a record that has nothing but these."""
        self._add(level, f"{self._line.date(time.time())} {logging.getLevelName(level)} {name} {text}")

    def _add(self, level: int, line: str) -> None:
        try:
            self._lines.append(line + self.terminator)
            if level >= logging.WARNING or len(self._lines) >= BATCH_LINES:
                self.flush()
            elif len(self._lines) == 1:
                asyncio.get_running_loop().call_later(BATCH_S, self.flush)
        except RuntimeError:  # no loop runs in this thread
            self.flush()

    def flush(self) -> None:
        with self.lock:
            lines, self._lines = self._lines, []
            if lines:
                self.stream.write("".join(lines))
            super().flush()


def log_to_stderr(level: str) -> None:
    """All log lines of this process to stderr, without looking up what FORMAT does not show: caller, thread and process."""
    logging.basicConfig(level=level.upper(), handlers=[LineHandler()])
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # the switch that logging's own documentation names for this


def say(log: logging.Logger, level: int, text: str) -> None:
    """`log.log(level, text)` for the line that every request has: without a LogRecord when it would come to our handler alone."""
    if not log.isEnabledFor(level):
        return
    handlers = logging.root.handlers
    ours = handlers[0] if len(handlers) == 1 and not log.handlers and not log.filters else None
    if type(ours) is LineHandler and log.parent is logging.root and log.propagate and not ours.level and not ours.filters:
        ours.say(level, log.name, text)
    else:
        log.log(level, "%s", text)
