"""What each session sent before, as marks on the tree: the measure of a lost prefix. Bounded in sessions and marks.

A mark is the node where a sequence of the session ended. When the tree forgets that node the mark moves up to its parent, so the
figure may fall short after long times, never claim too much.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from engine.prefix.base import Match
from engine.prefix.radix import Node, Walk

MARKS = 64  # branches remembered a session: a dozen titles and sub-agents between two turns, each with what was prepared for it
SESSIONS = 4096  # sessions remembered; an idle one that falls out is "first" again


@dataclass(frozen=True)
class Known:
    """`depth`: longest common prefix with anything sent before; `grows`: the prompt continues one of these to its end."""

    depth: int
    grows: bool


def explain(match: Match, walk: Walk, known: Known | None, node: Node | None, length: int) -> Match:
    """`match`, resumed at `node`, of a prompt of `length` tokens: with what of `known` is lost, and why it is not longer."""
    common = match.common
    lost = max(0, min(known.depth, length - 1) - common) if known else 0
    reason = at = ""
    if known is None:
        reason = "first"
    elif lost:
        ghost = next((n for n in walk.path if n.pages is None), None)
        reason = "no-checkpoint" if ghost is None or ghost.start >= known.depth else ghost.gone or "not-computed"
        at = f"token[{common}]"
    elif not known.grows:
        reason, at = "token-mismatch", f"token[{known.depth}]"
    anchor = f"{node.kind}@{common}" if node is not None and node.end == common and node.kind else ""
    return replace(match, reason=reason, at=at, anchor=anchor, lost=lost)


class History:
    def __init__(self) -> None:
        self._marks: OrderedDict[str, OrderedDict[Node, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marks)

    def sessions(self) -> list[str]:
        return list(self._marks)

    def known(self, session: str, walk: Walk, length: int) -> Known | None:
        """What of a prompt of `length` tokens, walked as `walk`, this session sent before. None for a new session."""
        marks = self._marks.get(session)
        if not marks:
            return None
        on_path, depth, grows = set(walk.path), 0, False
        for mark in marks:
            node: Node | None = mark
            while node is not None and node not in on_path:
                node = node.parent
            here = min(node.end, walk.depth) if node is not None else 0
            depth = max(depth, here)
            grows = grows or (node is mark and walk.depth >= mark.end) or here == length
        return Known(depth, grows)

    def note(self, session: str, node: Node) -> None:
        """The session sent (or was answered with) the sequence that ends at `node`."""
        marks = self._marks.setdefault(session, OrderedDict())
        self._marks.move_to_end(session)
        above = node.parent
        while above is not None:
            if session in above.marks:  # grew: one mark a branch is enough
                self._unmark(session, above)
            above = above.parent
        marks[node] = None
        marks.move_to_end(node)
        node.marks = {session, *node.marks}
        if len(marks) > MARKS:
            self._unmark(session, next(iter(marks)))
        if len(self._marks) > SESSIONS:
            self.forget(next(iter(self._marks)))

    def _unmark(self, session: str, node: Node) -> None:
        self._marks[session].pop(node, None)
        node.marks = node.marks - {session}

    def moved_up(self, node: Node) -> None:
        """`node` leaves the tree: its marks go to the parent."""
        for session in list(node.marks):
            self._unmark(session, node)
            if node.parent is not None and node.parent.parent is not None:
                self._marks[session][node.parent] = None
                node.parent.marks = {session, *node.parent.marks}

    def forget(self, session: str) -> list[Node]:
        """Drop a session; returns the nodes it had ended at."""
        nodes = list(self._marks.pop(session, ()))
        for node in nodes:
            node.marks = node.marks - {session}
        return nodes
