"""Where memory lies on a machine of several nodes, with a made-up /sys and recorded calls. test_two_nodes.py emulates one."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from pathlib import Path

import pytest

from engine import numa
from engine.numa import (
    INTERLEAVE,
    MBIND,
    MOVE_PAGES,
    RUN,
    SET_MEMPOLICY,
    allowed_nodes,
    describe,
    even_out,
    interleave,
    interleave_thread,
    nodes_of,
    our_nodes,
    spread,
)


@pytest.fixture
def sysfs(tmp_path) -> Path:
    """Two nodes of four cores, one of memory only, one whose list is no list."""
    for name, cores in {"node0": "0-3", "node1": "4-7", "node2": "", "node10": "x", "possible": "0-10"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores + "\n")
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """What the kernel is asked, the mask as whole words."""
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "", "", "", "x86_64")))
    made = []

    def call(number, *arguments):
        made.append((number, *(list(a) if hasattr(a, "__len__") else a for a in arguments)))
        return 0

    call.made = made
    return call


def test_the_nodes_of_our_cores(sysfs) -> None:
    assert nodes_of([6, 1, 0], sysfs) == {0: [0, 1], 1: [6]}
    assert nodes_of([4, 5], sysfs) == {1: [4, 5]}
    assert nodes_of([0], sysfs / "missing") == {}


def test_fewer_threads_than_cores_come_from_every_node(sysfs) -> None:
    assert spread(range(8), 4, sysfs) == [0, 1, 4, 5]
    assert spread([0, 1, 2, 3, 4], 4, sysfs) == [0, 1, 2, 4]
    assert spread(range(8), 8, sysfs) == list(range(8))
    assert spread([0, 1, 2], 2, sysfs) == [0, 1, 2]  # one node: nothing to spread over


def test_memory_lies_in_turn_on_several_nodes(calls) -> None:
    assert interleave(0x10800, 0x5000, (0, 1), calls)
    assert interleave(0x10000, 0x5000, (1, 66), calls)
    assert interleave_thread((0, 1), calls)
    assert calls.made == [
        (MBIND["x86_64"], 0x11000, 0x4000, INTERLEAVE, [0b11], 65, 0),
        (MBIND["x86_64"], 0x10000, 0x5000, INTERLEAVE, [0b10, 0b100], 129, 0),
        (SET_MEMPOLICY["x86_64"], INTERLEAVE, [0b11], 65),
    ]
    assert describe((0, 1)) == "0, 1"


def test_on_one_node_nothing_is_called(calls) -> None:
    for nodes in ((), (0,), (3,)):
        assert not interleave(0x10000, 0x5000, nodes, calls) and not interleave_thread(nodes, calls)
        assert describe(nodes) == ""
    assert not interleave(0x10001, 0x1000, (0, 1), calls)  # no whole page
    assert calls.made == []


def test_a_kernel_that_refuses_is_no_error() -> None:
    assert not interleave(0x10000, 0x5000, (0, 1), lambda *_: -1)
    assert not even_out(0x10000, 0x5000, (0, 1), lambda *_: -1)


def test_a_refusal_is_one_warning_that_says_what_to_do(caplog) -> None:
    numa._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not interleave_thread((0, 1), lambda *_: -1)
    (line,) = caplog.messages
    assert line.startswith('memory not interleaved nodes="0, 1"') and "SYS_NICE" in line


def test_nodes_without_memory_for_us_are_none(tmp_path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nMems_allowed:\t0000000b\nMems_allowed_list:\t0-1,3\n")
    assert allowed_nodes([0, 1, 2], status) == (0, 1)
    assert allowed_nodes([2], status) == ()
    assert allowed_nodes([0, 2], tmp_path / "missing") == (0, 2)


@pytest.mark.parametrize("refused", [False, True])
def test_where_linux_refuses_we_have_one_node(monkeypatch, refused) -> None:
    monkeypatch.setattr(numa, "nodes_of", lambda cores: {0: [0], 1: [1]})
    monkeypatch.setattr(numa, "allowed_nodes", tuple)
    monkeypatch.setattr(numa, "_syscall", lambda *_: -refused)
    our_nodes.cache_clear()
    try:
        assert our_nodes() == ((0,) if refused else (0, 1))
    finally:
        our_nodes.cache_clear()


class Placed:
    """A made-up kernel that knows where pages lie and moves them."""

    def __init__(self, nodes) -> None:
        self.nodes, self.moved = nodes, 0

    def __call__(self, number, process, count, pages, targets, status, flags) -> int:
        assert (number, process, flags) == (MOVE_PAGES["x86_64"], 0, 2)
        addresses = (ctypes.c_uint64 * count).from_address(pages)
        if targets:
            wanted = (ctypes.c_int * count).from_address(targets)
            self.moved += count
            self.nodes |= dict(zip(addresses, wanted, strict=True))
        (ctypes.c_int * count).from_address(status)[:] = [self.nodes[a] for a in addresses]
        return 0


def test_a_file_that_lies_on_one_node_is_moved_in_runs(calls) -> None:
    begin, end = 1 << 30, (1 << 30) + 3 * RUN + 5 * mmap.PAGESIZE
    pages = range(begin, end, mmap.PAGESIZE)
    kernel = Placed(dict.fromkeys(pages, 7))
    assert even_out(begin, end - begin, (5, 7), kernel) == end - begin
    assert kernel.nodes == {page: (5, 7)[(page - begin) // RUN % 2] for page in pages}


def test_a_file_that_lies_in_turn_stays(calls) -> None:
    """Page by page, as the kernel lays them, and in runs."""
    for run in (mmap.PAGESIZE, RUN):
        pages = range(0, 4 * RUN, mmap.PAGESIZE)
        kernel = Placed({page: page // run % 2 for page in pages})
        assert even_out(0, 4 * RUN, (0, 1), kernel) == 0 and kernel.moved == 0


def test_this_machine_answers() -> None:
    assert all(isinstance(node, int) for node in our_nodes())
