"""From the journal back to records and tree: what a restart finds on disk. Reads no files and decides no eviction."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.prefix.journal import Frame, Put, Spent, Use
from engine.prefix.ledger import Ledger
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
    orphans: int = 0  # what they continue is not here, or their tokens are taken
    stale: bool = False


def recover(ledger: Ledger, tree: RadixTree) -> Recovered:
    """Bind the records a journal comes to to each other and hang them on `tree`."""
    found = Recovered()
    made: dict[int, Record] = {}
    for record in ledger.records.values():
        parent = made.get(record.above)
        above = _above(tree, record, parent)
        if above is None or record.end == record.start or record.first in above.children:
            found.orphans += 1
            continue
        node = tree.restore(above, record, ledger.tokens(record))
        record.parent, record.nodes = parent, [node]
        made[record.id] = record
    found.records = list(made.values())
    for record in reversed(found.records):
        if record.parent is not None and record.parent.used < record.used:
            record.parent.used = record.used
    needed = len(made) + sum(r.reads > 0 for r in found.records) + len(ledger.spent)
    found.stale = ledger.frames > 2 * needed + FEW
    return found


def frames(ledger: Ledger, records: Sequence[Record]) -> Iterator[Frame]:
    """A journal of `records`, which came from `ledger`, that says the same with nothing stale in it."""
    for record in records:
        yield put(record, ledger.tokens(record).read().tobytes())
        if record.reads:
            yield Use(record.id, record.used, record.reads, record.owner)
    yield from (Spent(hour, size) for hour, size in ledger.spent.items())


def put(record: Record, tokens: bytes) -> Put:
    """The frame that makes `record` known."""
    sizes, what = (record.kv_bytes, record.state_bytes), (record.kind, record.owner, record.born, record.key)
    return Put(record.id, record.above, record.start, *sizes, *what, tokens)


def _above(tree: RadixTree, record: Record, parent: Record | None) -> Node | None:
    """The node `record` continues, cut where it does; None when it is not here."""
    start = record.start
    if not record.above:
        return None if start else tree.root
    node: Node | None = parent.nodes[0] if parent is not None else None
    while node is not None and node.start >= start:
        node = node.parent
    if node is None or node.end <= start:
        return node if node is not None and node.end == start else None
    return tree.split(node, start)


def bind(tree: RadixTree, record: Record, nodes: Sequence[Node]) -> None:
    """`nodes`, deepest first, hold the tokens of `record`."""
    record.nodes = list(nodes)
    for node in nodes:
        tree.set_record(node, record)
