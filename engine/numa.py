"""Memory of machines whose processors are nearer to one part of it: weights and caches lie in turn on the nodes of our cores.

Interleaved, not cut by who reads what: which experts a step reads is known when the router has spoken, and a thread helps others
when its own rows are done, so every thread reads from everywhere. In turn, the memory of all nodes works for each product, at the
price of reads that cross between them. On one node no call is made. Linux's calls by number: the C library does not have them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine.cores import parse_list, physical_cores
from engine.protocol import log_line

log = logging.getLogger(__name__)

SYSFS = Path("/sys/devices/system/node")
MBIND = {"x86_64": 237, "aarch64": 235}  # Linux's numbers of the calls
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
INTERLEAVE = 3  # MPOL_INTERLEAVE
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
    """The memory nodes of this process' cores."""
    return tuple(nodes_of(physical_cores()))


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


def _told(numbers: dict[str, int], nodes: Sequence[int] | None, call: Call | None, arguments: Callable) -> bool:
    nodes, number = our_nodes() if nodes is None else nodes, numbers.get(os.uname().machine)
    if len(nodes) < 2 or number is None:
        return False
    words = max(nodes) // BITS + 1
    mask = (ctypes.c_uint64 * words)(*(sum(1 << node % BITS for node in nodes if node // BITS == w) for w in range(words)))
    # the kernel reads one bit less than it is told
    done = (call or _syscall)(number, *arguments(mask, words * BITS + 1)) == 0
    if not done and call is None:
        log.debug(log_line("memory not interleaved", nodes=describe(nodes), why=os.strerror(ctypes.get_errno())))
    return done


def describe(nodes: Sequence[int] | None = None) -> str:
    """`0, 1`; "" on one node."""
    nodes = our_nodes() if nodes is None else nodes
    return ", ".join(map(str, nodes)) if len(nodes) > 1 else ""


def _syscall(number: int, *arguments: object) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call(ctypes.c_long(number), *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments))
