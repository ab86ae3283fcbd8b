"""Where prefill keeps a recurrent state: the anchors of a request, its end, and a coarse grid. Pure planning.

A state costs tens of megabytes on a large hybrid, so a cold conversation of sixty turns must not leave sixty of them: tools and
system text always, the last turns always (edits happen near the end), the rest thinned to a spacing that bounds the count.
A place where prompts were seen to part is learned: what stands before a date in the system text, or before the files of a project
in the first message, is computed twice and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.ipc import Anchor

GRID = 8192  # tokens: the most a prefill repeats when an edit hits a place nobody anchored
MIN_GAP = 128  # tokens: two page lengths; a state that saves less than this is not worth its bytes
EDIT_GAP = 512  # tokens between the borders of messages that are kept in case one of them is edited: a chunk of a prefill
WEAK = 0.5  # weight: below it an anchor is such a border, of which one is as good as its neighbour
LAST = 3  # anchors at the end that are kept whatever their distance: last user message, last tool result, generation prompt
TAIL = 32  # tokens the last stop may stand before the prompt's end: a regenerated answer repeats at most these
FIXED = frozenset(("tools", "system", "client_breakpoint"))  # shared by many requests or named by the client
BRANCH = "branch"  # where this prompt parts from what was sent before; the next one that changes there resumes here


@dataclass(frozen=True)
class Stop:
    offset: int
    kind: str
    weight: float


def parting(depth: int, common: int, length: int) -> list[Anchor]:
    """Where a prompt of `length` tokens that resumes at `common` parts from what was sent before, if that is far behind."""
    worth_it = depth - common >= MIN_GAP and depth < length
    return [Anchor(offset=depth, kind=BRANCH, weight=0.6)] if worth_it else []


def plan(anchors: Sequence[Anchor], common: int, length: int, most: int) -> list[Stop]:
    """Stops in (common, length - 1], ascending, at most about `most`, for a prompt of `length` tokens of which `common` exist."""
    found = {
        a.offset: Stop(a.offset, a.kind, a.weight) for a in sorted(anchors, key=lambda a: a.weight) if common < a.offset < length
    }
    if length - 1 > common and not any(offset >= length - 1 - TAIL for offset in found):
        found[length - 1] = Stop(length - 1, "turn", 0.5)
    ordered = [found[offset] for offset in sorted(found)]
    spacing = max(MIN_GAP, (length - common) // max(most, 1))
    strong = [s for s in ordered if s.weight >= WEAK or s.kind in FIXED]
    kept: list[Stop] = []
    for index, stop in enumerate(strong):
        near = stop.offset - (kept[-1].offset if kept else common) < spacing
        if not near or stop.kind in FIXED or stop.kind == BRANCH or index >= len(strong) - LAST:
            kept.append(stop)
    borders = [s for s in ordered if s.weight < WEAK and s.kind not in FIXED]
    return _with_grid(_filled(kept, borders, common, max(spacing, EDIT_GAP)), common)


def _filled(kept: Sequence[Stop], borders: Sequence[Stop], start: int, gap: int) -> list[Stop]:
    """`kept` with those of `borders` that are `gap` behind the stop before them and not just in front of the next one."""
    out: list[Stop] = []
    left = list(borders)
    for stop in kept:
        while left and left[0].offset < stop.offset:
            border = left.pop(0)
            if border.offset - (out[-1].offset if out else start) >= gap and stop.offset - border.offset >= MIN_GAP:
                out.append(border)
        out.append(stop)
    return out


def _with_grid(stops: Sequence[Stop], start: int) -> list[Stop]:
    """`stops` with more between those that are far apart."""
    out: list[Stop] = []
    for stop in stops:
        while stop.offset - (out[-1].offset if out else start) > GRID + GRID // 4:
            out.append(Stop((out[-1].offset if out else start) + GRID, "grid", 0.2))
        out.append(stop)
    return out
