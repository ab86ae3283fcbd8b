"""Which records the disk tier has and which of them go first: budget, lifetime, daily cap. Pure bookkeeping, no files.

A record is a run of tokens: their KV rows and, for models with recurrent layers, the state at its end. Records form a tree like
the tokens do; one with children is never dropped before them. Its state may be: once a later record of the same conversation
has one, the older serves edits only, and is given up before anybody's last turn is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import msgspec

from engine.prefix.anchors import FIXED
from engine.prefix.policy import Segment, SegmentedLru

SHARED = "*"  # the owner of what several sessions read


class Record(msgspec.Struct, eq=False, array_like=True):
    """A struct, because a start makes one for each line of a large index: in C, a fifth of the time."""

    id: int
    above: int  # id of what it continues; 0 = a sequence starts here
    start: int
    end: int
    at: int = 0  # byte of the journal its tokens begin at, where it came from there
    first: int = 0  # of its tokens
    check: int = 0  # their XXH3
    kv_bytes: int = 0
    state_bytes: int = 0
    reads: int = 0
    born: float = 0.0  # wall clock, seconds
    used: float = 0.0
    kind: str = ""
    owner: str = ""
    key: bytes = b""
    stored: bool = False  # the files are on disk and may be read
    # of this process, not of the index on disk
    alive: bool = True
    children: int = 0
    parent: Any = None  # a Record
    nodes: list[Any] = []  # tree nodes whose tokens it holds

    def __repr__(self) -> str:
        return f"Record[{self.id:x} {self.start}:{self.end}]"

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.state_bytes

    @property
    def goes_on(self) -> bool:
        """Part of a conversation that was resumed: read itself, or the newest turn behind what was read."""
        above = self.parent
        return self.reads > 0 or (above is not None and above.reads > 0 and not above.fixed)

    @property
    def fixed(self) -> bool:
        return self.kind in FIXED

    @property
    def anchored(self) -> bool:
        """Tools and system text that several conversations read; of one only, they are a part of it and go with it."""
        return self.fixed and self.owner == SHARED


def _loaded_into(record: Record) -> int:
    """The segment of a record a restart finds: what was read again is worth more."""
    if record.owner == SHARED and record.anchored:
        return Segment.ANCHORED
    return Segment.PROTECTED if record.reads else Segment.PROBATION


class DiskIndex:
    """Records inside `budget` bytes. `resumes_anywhere`: a record is of use without a state (pure attention)."""

    def __init__(self, budget: int, resumes_anywhere: bool = True) -> None:
        self.records: dict[int, Record] = {}
        self.bytes = 0
        self.next_id = 1
        self.budget = budget
        self.resumes_anywhere = resumes_anywhere
        self.order: SegmentedLru[Record] = SegmentedLru(budget)
        self._superseded: OrderedDict[Record, None] = OrderedDict()

    def resize(self, budget: int) -> None:
        self.budget = budget
        self.order.resize(budget)

    def load(self, records: list[Record]) -> None:
        """Enter records read from a journal, parents before children; recency is that of their last use."""
        oldest = sorted(reversed(records), key=attrgetter("used"))  # of one path the last is the first to go
        for record in oldest:
            self._link(record)
        self.order.extend((r, r.kv_bytes + r.state_bytes, _loaded_into(r)) for r in oldest)

    def add(self, record: Record, segment: int = Segment.PROBATION) -> None:
        """Enter a new record; its parent (if any) is here."""
        self._enter(record, segment)
        each = record.parent
        while each is not None:  # ancestors stay fresher than what hangs on them, so the order meets leaves first
            each.used = max(each.used, record.used)
            self.order.touch(each, segment)
            each = each.parent

    def _enter(self, record: Record, segment: int) -> None:
        self._link(record)
        self.order.add(record, record.total_bytes, Segment.ANCHORED if record.anchored else segment)

    def _link(self, record: Record) -> None:
        self.records[record.id] = record
        self.next_id = max(self.next_id, record.id + 1)
        self.bytes += record.kv_bytes + record.state_bytes
        parent = record.parent
        if parent is not None:
            parent.children += 1
            if record.state_bytes and parent.state_bytes and not parent.fixed:
                self._superseded[parent] = None

    def use(self, record: Record, now: float, session: str) -> None:
        """A request of `session` resumed from `record`."""
        record.reads += 1
        if record in self._superseded:
            self._superseded.move_to_end(record)
        each: Record | None = record
        while each is not None:
            each.used = max(each.used, now)
            if each.owner != session:
                each.owner = SHARED
            self.order.touch(each, Segment.ANCHORED if each.anchored else Segment.PROTECTED)
            each = each.parent

    @contextmanager
    def pinned(self, record: Record | None) -> Iterator[None]:
        """`record` is about to be continued: meanwhile it counts as having a child, so nothing gives it up."""
        if record is not None:
            record.children += 1
        try:
            yield
        finally:
            if record is not None:
                record.children -= 1

    def victims(self, need: int) -> Iterator[tuple[Record, bool]]:
        """What to give up until `need` more bytes fit: (record, its state only). The caller drops each before the next."""
        while self.bytes + need > self.budget:
            if self._superseded:
                yield next(iter(self._superseded)), True
                continue
            record = next((r for r in self.order.order() if not r.children), None)
            if record is None:
                return
            yield record, False

    def expired(self, before: float) -> list[Record]:
        """Records last used before `before`, children before their parents."""
        old = [r for r in self.records.values() if r.used < before]
        return sorted(old, key=lambda r: -r.start)

    def with_children(self, record: Record) -> list[Record]:
        """`record` and everything that continues it, children before their parents: a parent's id is always the smaller one."""
        found = {record.id: record}
        for each in sorted(self.records.values(), key=lambda r: r.id):
            if each.parent is not None and each.parent.id in found:
                found[each.id] = each
        return sorted(found.values(), key=lambda r: -r.id)

    def useless(self, record: Record | None) -> bool:
        """Rows that no state and no later record can use."""
        return record is not None and not (self.resumes_anywhere or record.state_bytes or record.children)

    def drop_state(self, record: Record) -> None:
        self._superseded.pop(record, None)
        self.bytes -= record.state_bytes
        record.state_bytes = 0
        self.order.resize_key(record, record.total_bytes)

    def drop(self, record: Record) -> None:
        """Forget a record without children."""
        assert not record.children and record.alive
        del self.records[record.id]
        self.bytes -= record.total_bytes
        record.alive = record.stored = False
        self.order.drop(record)
        self._superseded.pop(record, None)
        if record.parent is not None:
            record.parent.children -= 1
            if not record.parent.children:
                self._superseded.pop(record.parent, None)
