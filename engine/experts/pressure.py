"""When memory is given back because it runs short, and when it is taken again. Decides; moves nothing.

Shrinking must come before the kernel kills somebody, growing may wait: two thresholds far apart and a calm time between
the last shortage and the first growth keep it from swinging.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.hostmem import available_bytes, pressure_file

STALLED = 10.0  # percent of the last ten seconds in which every task waited for memory: the machine is thrashing
SHORT = 0.04  # of the machine's memory available: below it the kernel is about to drop the page cache it works with
SHORT_LEAST = 256 << 20  # bytes; a small machine or container is short at this, whatever its share
PLENTY = 3.0  # times what counts as short, left over after growing: room for another program's ordinary steps
STEP = 1 / 8  # of what is wanted, given or taken at once
CALM_S = 60.0  # without shortage before anything is taken again
PAUSE_S = 2.0  # between two shrinks: the figures need a moment to follow


@dataclass(frozen=True)
class Memory:
    available: int  # bytes that may still be taken
    stalled: float  # percent of the last ten seconds all tasks waited for memory


class Governor:
    """On a machine (or in a container) of `total` bytes."""

    def __init__(self, total: int) -> None:
        self._short = max(SHORT_LEAST, int(total * SHORT))
        self._shrunk = self._shortage = float("-inf")  # when memory was last given back, when it was last short

    def target(self, now: float, have: int, floor: int, wanted: int, memory: Memory) -> int:
        """How many bytes there should be of what can move: `have` now, `floor` at least, `wanted` at most."""
        step = max(1, int(wanted * STEP))
        if self.short(memory):
            self._shortage = now
            if now - self._shrunk < PAUSE_S or have <= floor:
                return have
            self._shrunk = now
            missing = max(0, 2 * self._short - memory.available)  # ends clearly above the threshold, not at it
            return max(floor, have - max(step, missing))
        if have >= wanted or now - self._shortage < CALM_S:
            return have
        more = min(step, wanted - have)
        return have + more if memory.available - more >= PLENTY * self._short else have

    def short(self, memory: Memory) -> bool:
        return memory.available < self._short or memory.stalled >= STALLED


def read_memory(pressure: Path | None = None, available: Callable[..., int | None] = available_bytes, mapped: int = 0) -> Memory:
    """What the kernel says now; what cannot be read counts as no shortage. `mapped` bytes of files are computed on."""
    free = available(mapped=mapped) if mapped else available()
    return Memory(free if free is not None else 1 << 62, _stalled(pressure or pressure_file()))


def read_device(info: Callable[[], tuple[int, int]]) -> Memory:
    """The same of a device with a memory of its own; `info` tells its free and all bytes, as torch.cuda.mem_get_info does.

    Nothing waits there for memory as it does under PSI: who finds none fails. What cannot be read counts as no shortage.
    """
    try:
        return Memory(info()[0], 0.0)
    except RuntimeError:
        return Memory(1 << 62, 0.0)


def _stalled(path: Path) -> float:
    """`full avg10=1.23 ...` -> 1.23"""
    try:
        line = next(line for line in path.read_text().splitlines() if line.startswith("full"))
        return float(line.split("avg10=")[1].split()[0])
    except (OSError, StopIteration, IndexError, ValueError):
        return 0.0  # a kernel without PSI
