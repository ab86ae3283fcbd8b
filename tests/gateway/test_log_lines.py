"""Log lines: written together while the loop runs, at once when they matter, and never lost on the way out."""

import asyncio
import io
import logging
import re

from gateway.log_lines import BATCH_LINES, LineHandler, say


def logger(stream: io.StringIO) -> logging.Logger:
    made = logging.Logger("moorage")
    made.addHandler(LineHandler(stream))
    return made


def test_without_a_loop_lines_are_written_at_once() -> None:
    out = io.StringIO()
    logger(out).info("listening on %s", "http://x")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO moorage listening on http://x\n", out.getvalue())


async def test_lines_of_a_moment_are_written_together_and_in_order() -> None:
    out = io.StringIO()
    log = logger(out)
    for i in range(3):
        log.info("line %d", i)
    assert out.getvalue() == ""
    while not out.getvalue():
        await asyncio.sleep(0.01)
    assert [line[-1] for line in out.getvalue().splitlines()] == ["0", "1", "2"]
    log.info("next")
    while "next" not in out.getvalue():
        await asyncio.sleep(0.01)


async def test_a_warning_is_written_at_once_behind_what_waited() -> None:
    out = io.StringIO()
    log = logger(out)
    log.info("first")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("second")
    first, second, *trace = out.getvalue().splitlines()
    assert first.endswith("INFO moorage first") and second.endswith("ERROR moorage second") and "ValueError: why" in trace[-1]


async def test_many_lines_do_not_wait() -> None:
    out = io.StringIO()
    log = logger(out)
    for i in range(BATCH_LINES + 1):
        log.info("line %d", i)
    assert out.getvalue().count("\n") == BATCH_LINES


async def test_what_waits_is_written_when_logging_shuts_down() -> None:
    out = io.StringIO()
    log = logger(out)
    log.info("last words")
    logging.shutdown([lambda: log.handlers[0]])
    assert "last words" in out.getvalue()


def test_what_is_said_reads_as_what_is_logged(monkeypatch) -> None:
    log, out = logging.getLogger("moorage"), io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [LineHandler(out)])
    monkeypatch.setattr(log, "level", logging.INFO)
    log.manager._clear_cache()
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        log.log(level, "%s", "request 100% ok")
        say(log, level, "request 100% ok")
    lines = [line.split(" ", 2)[2] for line in out.getvalue().splitlines()]
    assert lines == ["INFO moorage request 100% ok"] * 2 + ["WARNING moorage request 100% ok"] * 2
    log.manager._clear_cache()


def test_others_who_listen_hear_it_too(monkeypatch) -> None:
    log, out, other, seen = logging.getLogger("moorage"), io.StringIO(), logging.Handler(), []
    other.emit = lambda record: seen.append(record.getMessage())
    for where in (logging.root, log):
        with monkeypatch.context() as patch:
            patch.setattr(logging.root, "handlers", [LineHandler(out)])
            patch.setattr(where, "handlers", [*where.handlers, other])
            say(log, logging.WARNING, "50% done")
    assert seen == ["50% done"] * 2 and out.getvalue().count("WARNING moorage 50% done\n") == 2
