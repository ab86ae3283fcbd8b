"""From the journal back to records and tree: what a restart finds on disk. Reads no files and decides no eviction."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from engine.prefix.journal import Drop, DropState, Frame, Put, Spent, Use
from engine.prefix.radix import Node, RadixTree
from engine.prefix.records import Record

MANY = 10_000  # records: below it a collection takes milliseconds
FEW = 64  # frames: a journal as short as this is never worth rewriting


@contextmanager
def no_garbage_collection(objects: Callable[[], int]) -> Iterator[None]:
    """A large index is millions of live objects and no garbage; looking for it would double the time to open.

    `objects` counts them afterwards: where they are many they are set aside for good, or each full collection while serving
    would go through them (0.3 s for 100,000 records).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if objects() >= MANY:
            gc.freeze()
        if was_on:
            gc.enable()


@dataclass
class Recovered:
    """Records whose ancestors are all here, bound to tree nodes; `stale` when half of the journal is of no use."""

    records: list[Record] = field(default_factory=list)  # parents before children
    puts: list[Put] = field(default_factory=list)  # of `records`
    spent: Counter[int] = field(default_factory=Counter)  # bytes written by hour
    orphans: int = 0  # what they continue is not here, or their tokens are taken
    next_id: int = 1  # ids are never used twice, not even those of records that went
    stale: bool = False

    def frames(self) -> list[Frame]:
        """A journal that says the same with nothing stale in it."""
        frames: list[Frame] = list(self.puts)
        frames += [Use(r.id, r.used, r.reads, r.owner) for r in self.records if r.reads]
        frames += [Spent(hour, size) for hour, size in self.spent.items()]
        lost = tuple(p.id for p, r in zip(self.puts, self.records, strict=True) if p.state_bytes and not r.state_bytes)
        frames.append(DropState(lost))
        return frames


def recover(frames: Sequence[Frame], tree: RadixTree) -> Recovered:
    """Replay `frames` and hang what is left of them on `tree`."""
    found = Recovered()
    puts: dict[int, Put] = {}
    gone_states: set[int] = set()
    uses: dict[int, Use] = {}
    for frame in frames:
        if type(frame) is Put:
            puts[frame.id] = frame
            found.next_id = max(found.next_id, frame.id + 1)
        elif isinstance(frame, Drop):
            for each in frame.ids:
                puts.pop(each, None)
        elif isinstance(frame, DropState):
            gone_states.update(frame.ids)
        elif isinstance(frame, Use):
            uses[frame.id] = frame
        else:
            found.spent[frame.hour] = frame.bytes
    made: dict[int, Record] = {}
    for put in sorted(puts.values(), key=lambda p: p.id):  # a parent's id is always the smaller one
        record = _attach(put, made, tree)
        if record is None:
            found.orphans += 1
            continue
        record.state_bytes = 0 if put.id in gone_states else put.state_bytes
        use = uses.get(put.id)
        if use is not None:
            record.used, record.reads, record.owner = max(use.at, put.born), use.reads, use.owner
        made[put.id] = record
        found.puts.append(put)
    found.records = list(made.values())
    for record in sorted(found.records, key=lambda r: -r.start):
        if record.parent is not None:
            record.parent.used = max(record.parent.used, record.used)
    needed = len(found.puts) + len(uses) + len(found.spent)
    found.stale = len(frames) > 2 * needed + FEW
    return found


def _attach(put: Put, made: dict[int, Record], tree: RadixTree) -> Record | None:
    """The record of `put` with its tree node, or None when what it continues is not here or its tokens are taken."""
    tokens = np.frombuffer(put.tokens, np.int32)
    parent = made.get(put.parent)
    above: Node | None = tree.root
    if put.parent:
        above = parent.nodes[0] if parent is not None else None
        while above is not None and above.start >= put.start:
            above = above.parent
        if above is None or above.end < put.start:
            return None
        if above.end > put.start:
            above = tree.split(above, put.start)
    if not len(tokens) or above.end != put.start or int(tokens[0]) in above.children:
        return None
    node = tree.graft(above, tokens)
    node.kind = put.kind
    node.key = put.key
    record = Record(put.id, parent, put.start, put.start + len(tokens), put.born)
    record.kv_bytes, record.kind, record.owner, record.key = put.kv_bytes, put.kind, put.owner, put.key
    record.stored = True
    bind(tree, record, [node])
    return record


def bind(tree: RadixTree, record: Record, nodes: Sequence[Node]) -> None:
    """`nodes`, deepest first, hold the tokens of `record`."""
    record.nodes = list(nodes)
    for node in nodes:
        tree.set_record(node, record)
