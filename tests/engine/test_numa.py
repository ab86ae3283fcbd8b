"""Where memory lies on a machine of several nodes, with a made-up /sys and recorded calls: no such machine is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.numa import INTERLEAVE, MBIND, SET_MEMPOLICY, describe, interleave, interleave_thread, nodes_of, our_nodes, spread


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


def test_this_machine_answers() -> None:
    assert all(isinstance(node, int) for node in our_nodes())
