"""The link: order, pieces, how many copies at once, and who is told when it ends."""

import threading

import pytest

from engine.experts.link import CopyFailed, Link, TakenBack
from engine.experts.slots import Fetch


def fetches(*keys: int) -> list[Fetch]:
    return [Fetch(key, key) for key in keys]


class Gate:
    """Copies pieces of a byte each, in order; those of `held` keys wait until it is opened."""

    def __init__(self, *held: int) -> None:
        self.held, self.begun, self.order, self.go_on = set(held), threading.Event(), [], threading.Event()

    def __call__(self, key: int, slot: int, part: int) -> int:
        self.order.append((key, part))
        if key in self.held:
            self.begun.set()
            assert self.go_on.wait(10)
        return 1


def test_experts_come_one_after_the_other_piece_by_piece() -> None:
    gate = Gate()
    link = Link(gate, parts=3)
    link.submit(fetches(0, 1, 2, 3))
    times = [link.wait(key) for key in range(4)]
    link.close()
    assert gate.order == [(key, part) for key in range(4) for part in range(3)] and times == sorted(times) and link.bytes == 12


def test_all_workers_share_the_pieces_of_one_expert() -> None:
    together = threading.Barrier(4)

    def copy(key: int, slot: int, part: int) -> int:
        together.wait(10)
        return 1

    link = Link(copy, workers=4, parts=4)
    link.submit(fetches(7))
    assert link.wait(7) > 0 and link.bytes == 4
    link.close()


def test_what_is_behind_comes_when_there_is_nothing_else_and_can_hurry() -> None:
    gate = Gate(0)
    link = Link(gate, parts=2)
    link.submit(fetches(0))
    assert gate.begun.wait(10)
    link.submit(fetches(1, 2), behind=True)
    link.submit(fetches(3))
    link.hurry([2, 3, 9])
    gate.go_on.set()
    for key in range(4):
        link.wait(key)
    link.close()
    assert [key for key, part in gate.order if part == 0] == [0, 3, 2, 1]


def test_of_what_is_taken_back_no_further_piece_begins() -> None:
    gate = Gate(0)
    link = Link(gate, parts=3)
    link.submit(fetches(0, 1))
    assert gate.begun.wait(10)
    assert link.cancel([0, 1, 5]) == [1], "a piece of 0 is on its way"
    gate.go_on.set()
    with pytest.raises(TakenBack):
        link.wait(0)
    assert gate.order == [(0, 0)]
    link.submit(fetches(1))  # may be asked for again
    link.wait(1)
    link.close()


def test_what_was_taken_back_half_way_goes_on_when_it_is_needed_after_all() -> None:
    gate = Gate(0)
    link = Link(gate, parts=3)
    link.submit(fetches(0), behind=True)
    assert gate.begun.wait(10)
    assert link.cancel([0]) == []
    link.hurry([0])
    gate.go_on.set()
    link.wait(0)
    assert gate.order == [(0, 0), (0, 1), (0, 2)]
    link.close()


def test_what_has_come_is_checked_once_whole() -> None:
    seen = []

    def check(key: int, slot: int) -> None:
        seen.append((key, link.bytes))
        if key:
            raise OSError("damaged")

    link = Link(lambda key, slot, part: 1, workers=2, parts=5, check=check)
    link.submit(fetches(0))
    link.wait(0)
    link.submit(fetches(1))
    with pytest.raises(CopyFailed, match="damaged"):
        link.wait(1)
    link.close()
    assert seen == [(0, 5), (1, 10)]


def test_the_first_that_came_is_told_and_a_failure_counts_as_come() -> None:
    go_on, pieces = threading.Event(), []

    def copy(key: int, slot: int, part: int) -> int:
        pieces.append((key, part))
        if key == 2:
            raise OSError("torn")
        if key > 2:
            go_on.wait(10)
        return 1

    link = Link(copy, parts=2)
    link.submit([Fetch(2, 0), Fetch(1, 1), Fetch(3, 2)])
    assert link.first([2]) == [2] and link.first([1, 3]) == [1]
    with pytest.raises(CopyFailed, match="torn"):
        link.wait(2)
    go_on.set()
    assert set(link.first([1, 3])) >= {1}
    link.close()
    assert (2, 1) not in pieces, "what has failed is not read to its end"


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_queued_when_it_closes_fails(parts: int) -> None:
    gate = Gate(0)
    link = Link(gate, parts=parts)
    link.submit(fetches(0, 1))
    assert gate.begun.wait(10)
    closing = threading.Thread(target=link.close)
    closing.start()
    with pytest.raises(CopyFailed, match="closed"):
        link.wait(1)
    gate.go_on.set()
    closing.join(10)
    if parts == 1:
        assert link.wait(0) > 0
    else:
        with pytest.raises(CopyFailed, match="closed"):
            link.wait(0)
    assert not link.alive
    link.submit(fetches(5))
    with pytest.raises(CopyFailed, match="closed"):
        link.wait(5)


def test_one_piece_at_a_time_of_what_is_behind() -> None:
    lock, at_once, most = threading.Lock(), 0, 0
    begun, real = threading.Event(), threading.Event()

    def copy(key: int, slot: int, part: int) -> int:
        nonlocal at_once, most
        if key == 9:
            real.set()
            return 1
        with lock:
            at_once += 1
            most = max(most, at_once)
        begun.set()
        assert real.wait(10), "a worker is free for what is needed meanwhile"
        with lock:
            at_once -= 1
        return 1

    link = Link(copy, workers=4, parts=4)
    link.submit(fetches(0, 1), behind=True)
    assert begun.wait(10)
    with link._lock:
        assert not link._can_begin(), "seven pieces are left, and three workers have nothing to do"
    link.submit(fetches(9))
    for key in (9, 0, 1):
        link.wait(key)
    link.close()
    assert most == 1
