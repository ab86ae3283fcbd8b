"""How far something long has come, on a terminal and in a log."""

from __future__ import annotations

import io

from engine.memory import gib
from engine.progress import EVERY_S, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_log_a_line_now_and_then() -> None:
    log, now = io.StringIO(), [100.0]
    with progress(gib, log, lambda: now[0]) as update:
        for done in range(2, 9):
            update(done << 30, 8 << 30)
            now[0] += EVERY_S / 2
    # from 2 to 4 GiB in EVERY_S: what was there at the first look is no speed
    assert log.getvalue().splitlines() == [
        "4.00 GiB of 8.00 GiB, about 10 s left",
        "6.00 GiB of 8.00 GiB, about 5 s left",
        "8.00 GiB of 8.00 GiB, about 0 s left",
    ]


def test_what_is_quick_or_does_not_move_says_no_more_than_it_knows() -> None:
    log, now = io.StringIO(), [0.0]
    with progress(str, log, lambda: now[0]) as update:
        update(0, 5)
        assert log.getvalue() == ""
        now[0] += EVERY_S
        update(0, 5)
    assert log.getvalue() == "0 of 5\n"


def test_a_terminal_has_a_bar() -> None:
    terminal = Terminal()
    with progress(lambda count: f"{count} tokens", terminal) as update:
        update(3, 4)
        update(4, 4)
    assert "4 tokens of 4 tokens" in terminal.getvalue() and "\x1b[" in terminal.getvalue()
