"""Memory of machines whose processors are nearer to one part of it: weights and caches lie in turn on the nodes of our cores.

Interleaved, not cut by who reads what: which experts a step reads is known when the router has spoken, and a thread helps others
when its own rows are done, so every thread reads from everywhere. In turn, the memory of all nodes works for each product, at the
price of reads that cross between them. On one node no call is made. Linux's calls by number: the C library does not have them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine.cores import parse_list, physical_cores
from engine.protocol import log_line

log = logging.getLogger(__name__)

SYSFS = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
MBIND = {"x86_64": 237, "aarch64": 235}  # Linux's numbers of the calls
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
INTERLEAVE = 3  # MPOL_INTERLEAVE
MOVE = 2  # MPOL_MF_MOVE: what no other process has mapped
RUN = 2 << 20  # bytes of a file that move together: a folio is moved as a whole, and this is the largest
EVEN = 1.3  # times its share: the most of a file that may lie on one node without being moved
LOOK = 61  # every so many pages of a file are looked at: a prime, or every page looked at were the same node's turn
BITS = 64  # of a word of the mask of nodes

Call = Callable[..., int]  # like syscall(2): a number and arguments; 0 is success


def nodes_of(cores: Iterable[int], sysfs: Path = SYSFS) -> dict[int, list[int]]:
    """Memory node -> those of `cores` next to it, ascending. Empty where the system does not tell."""
    wanted, found = set(cores), {}
    for folder in sysfs.glob("node[0-9]*"):
        try:
            mine = sorted(wanted & set(parse_list((folder / "cpulist").read_text())))
        except (OSError, ValueError):
            continue
        if mine:
            found[int(folder.name.removeprefix("node"))] = mine
    return dict(sorted(found.items()))


@functools.cache
def our_nodes() -> tuple[int, ...]:
    """The memory nodes of this process' cores, as far as it may have memory there; no more than one where Linux refuses."""
    nodes = allowed_nodes(nodes_of(physical_cores()))
    if len(nodes) > 1:
        page = mmap.mmap(-1, mmap.PAGESIZE)
        if not interleave(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE, nodes):
            return nodes[:1]
    return nodes


def allowed_nodes(nodes: Iterable[int], status: Path = STATUS) -> tuple[int, ...]:
    """Those of `nodes` that have memory which this process may take (a cpuset's `mems`); all where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            name, _, listed = line.partition(":")
            if name == "Mems_allowed_list":
                return tuple(sorted(set(nodes) & set(parse_list(listed))))
    return tuple(nodes)


def spread(cores: Sequence[int], count: int, sysfs: Path = SYSFS) -> list[int]:
    """`count` of `cores`, as evenly from every node as they come; all of them where there is one node or they are too few."""
    nodes = list(nodes_of(cores, sysfs).values())
    if len(nodes) < 2 or count >= len(cores):
        return list(cores)
    turns = [core for place in range(max(map(len, nodes))) for node in nodes for core in node[place : place + 1]]
    return sorted(turns[:count])


def interleave(address: int, size: int, nodes: Sequence[int] | None = None, call: Call | None = None) -> bool:
    """Have the whole pages of [address, address + size) lie in turn on our nodes, if not touched yet. False: they do not."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    return length > 0 and _told(MBIND, nodes, call, lambda mask, bits: (begin, length, INTERLEAVE, mask, bits, 0))


def interleave_thread(nodes: Sequence[int] | None = None, call: Call | None = None) -> bool:
    """The same for everything this thread touches first: pages of files that it reads, too."""
    return _told(SET_MEMPOLICY, nodes, call, lambda mask, bits: (INTERLEAVE, mask, bits))


def even_out(address: int, size: int, nodes: Sequence[int] | None = None, call: Call | None = None) -> int:
    """Have the pages of a mapped file at `address`, a page's, lie in turn also if somebody read or wrote them before on one node:
    runs of it are moved. Returns how many bytes were told where to lie; what another process has mapped, too, stays.
    """
    nodes, number = our_nodes() if nodes is None else nodes, MOVE_PAGES.get(os.uname().machine)
    if len(nodes) < 2 or number is None:
        return 0
    end = address + size
    found = _pages(number, range(address, end, LOOK * mmap.PAGESIZE), None, call)
    if not found or max(map(found.count, nodes)) * len(nodes) <= EVEN * len(found):
        return 0
    pages, targets = array("Q"), array("i")
    for turn, run in enumerate(range(address, end, RUN)):
        pages.extend(range(run, min(run + RUN, end), mmap.PAGESIZE))
        targets.extend([nodes[turn % len(nodes)]] * (len(pages) - len(targets)))
    return len(pages) * mmap.PAGESIZE if _pages(number, pages, targets, call) else 0


def _pages(number: int, pages: Iterable[int], targets: array[int] | None, call: Call | None) -> list[int]:
    """move_pages(2): where each of our pages lies then, below zero where it does not; nothing where Linux refuses."""
    pages = array("Q", pages)
    status = array("i", bytes(4 * len(pages)))
    where = (targets.buffer_info()[0] if targets else 0, status.buffer_info()[0])
    done = (call or _syscall)(number, 0, len(pages), pages.buffer_info()[0], *where, MOVE)
    return status.tolist() if done >= 0 else []


def _told(numbers: dict[str, int], nodes: Sequence[int] | None, call: Call | None, arguments: Callable) -> bool:
    nodes, number = our_nodes() if nodes is None else nodes, numbers.get(os.uname().machine)
    if len(nodes) < 2 or number is None:
        return False
    words = max(nodes) // BITS + 1
    mask = (ctypes.c_uint64 * words)(*(sum(1 << node % BITS for node in nodes if node // BITS == w) for w in range(words)))
    # the kernel reads one bit less than it is told
    done = (call or _syscall)(number, *arguments(mask, words * BITS + 1)) == 0
    if not done:
        _warn(describe(nodes), os.strerror(ctypes.get_errno()) if ctypes.get_errno() else "refused")
    return done


@functools.cache
def _warn(nodes: str, why: str) -> None:
    """Once each."""
    what = "in a container the capability SYS_NICE allows it (docker: --cap-add SYS_NICE)"
    log.warning(log_line("memory not interleaved", nodes=nodes, why=why, hint=what))


def describe(nodes: Sequence[int] | None = None) -> str:
    """`0, 1`; "" on one node."""
    nodes = our_nodes() if nodes is None else nodes
    return ", ".join(map(str, nodes)) if len(nodes) > 1 else ""


def _syscall(number: int, *arguments: object) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call(ctypes.c_long(number), *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments))
