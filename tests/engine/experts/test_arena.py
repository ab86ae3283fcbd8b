"""The link: order, how many copies at once, and who is told when it ends."""

import threading
import time

import pytest

from engine.experts.arena import MANY, CopyFailed, Link
from engine.experts.slots import Fetch


def fetches(count: int) -> list[Fetch]:
    return [Fetch(key, key) for key in range(count)]


def test_a_few_come_one_after_the_other() -> None:
    at_once, most, order = 0, 0, []

    def copy(key: int, slot: int) -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        order.append(key)
        time.sleep(0.005)
        at_once -= 1
        return 1

    link = Link(copy, workers=4, few=1)
    link.submit(fetches(MANY - 1))
    times = [link.wait(key) for key in range(MANY - 1)]
    link.close()
    assert most == 1 and order == list(range(MANY - 1)) and times == sorted(times) and link.bytes == MANY - 1


def test_many_are_copied_by_all() -> None:
    together, begun, lock = threading.Barrier(4), 0, threading.Lock()

    def copy(key: int, slot: int) -> int:
        nonlocal begun
        with lock:
            begun += 1
            first = begun <= 4
        if first:
            together.wait(10)
        return 1

    link = Link(copy, workers=4, few=1)
    link.submit(fetches(MANY + 4))
    for key in range(MANY + 4):
        link.wait(key)
    link.close()


def test_the_first_that_came_is_told_and_a_failure_counts_as_come() -> None:
    go_on = threading.Event()

    def copy(key: int, slot: int) -> int:
        if key == 2:
            raise OSError("torn")
        if key > 2:
            go_on.wait(10)
        return 1

    link = Link(copy, few=1)
    link.submit([Fetch(2, 0), Fetch(1, 1), Fetch(3, 2)])
    assert link.first([2]) == [2] and link.first([1, 3]) == [1]
    with pytest.raises(CopyFailed, match="torn"):
        link.wait(2)
    go_on.set()
    assert set(link.first([1, 3])) >= {1}
    link.close()


def test_what_is_queued_when_it_closes_fails() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def copy(key: int, slot: int) -> int:
        begun.set()
        go_on.wait(10)
        return 1

    link = Link(copy)
    link.submit(fetches(2))
    assert begun.wait(10)
    closing = threading.Thread(target=link.close)
    closing.start()
    with pytest.raises(CopyFailed, match="closed"):
        link.wait(1)
    go_on.set()
    closing.join(10)
    assert link.wait(0) > 0 and not link.alive
    link.submit([Fetch(5, 0)])
    with pytest.raises(CopyFailed, match="closed"):
        link.wait(5)
