"""Tensors that remember: every row of a page and every state says which token prefix it was computed from."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.prefix.cache import RadixCache
from engine.prefix.disk import DiskConfig
from engine.prefix.store import DiskStore


def digest(tokens: Sequence[int]) -> int:
    """A value that depends on every token, as a KV row and a recurrent state do."""
    return int.from_bytes(hashlib.blake2b(",".join(map(str, tokens)).encode(), digest_size=8).digest(), "little")


class FakeStorage:
    """`Storage` whose rows are digests. Row r of page p is `rows[p][r]`; slot s holds `slots[s]`."""

    row_bytes = 8

    def __init__(self, pages: int, slots: int, *, page: int, hybrid: bool) -> None:
        self.page = page
        self.page_bytes = page * self.row_bytes
        self.state_bytes = 8 if hybrid else 0
        self.rows = [[0] * page for _ in range(pages)]
        self.slots = [0] * slots

    def copy_page(self, source: int, target: int) -> None:
        self.rows[target] = list(self.rows[source])

    def save(self, slot: int) -> int:
        return self.slots[slot]

    def load(self, blob: int, slot: int) -> None:
        self.slots[slot] = blob

    def clear(self, slot: int) -> None:
        self.slots[slot] = digest(())

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.rows[page] = [-1] * self.page

    def give_back_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.slots[slot] = -1

    def read_rows(self, pages: Sequence[int], start: int, count: int) -> list[memoryview]:
        rows = [self.rows[pages[at // self.page]][at % self.page] for at in range(start, start + count)]
        return [memoryview(b"".join(row.to_bytes(8, "little") for row in rows))]

    def write_rows(self, pages: Sequence[int], start: int, count: int, data: memoryview, skip: int) -> None:
        for n in range(count):
            row = int.from_bytes(data[(skip + n) * 8 : (skip + n + 1) * 8], "little")
            self.rows[pages[(start + n) // self.page]][(start + n) % self.page] = row

    def pack(self, blob: int) -> list[memoryview]:
        return [memoryview(blob.to_bytes(8, "little"))]

    def unpack(self, data: memoryview) -> int:
        return int.from_bytes(data, "little")


class Sequence_:
    """A running sequence: computes tokens as the decoder would, through its lease."""

    def __init__(self, cache: RadixCache, tokens: Sequence[int], **kw) -> None:
        self.cache, self.tokens = cache, list(tokens)
        self.lease = cache.open(tokens, session=kw.pop("session", "s"), anchors=kw.pop("anchors", ()), **kw)
        self.done = self.lease.match.common
        self.check()

    def check(self) -> None:
        """What the lease hands out is exactly what a cold run would have computed."""
        storage = self.cache.storage
        for at in range(self.done):
            page = self.lease.pages[at // storage.page]
            assert storage.rows[page][at % storage.page] == digest(self.tokens[: at + 1]), f"row {at} is not this sequence's"
        if storage.state_bytes:
            assert storage.slots[self.lease.slot] == digest(self.tokens[: self.done]), "state is not this sequence's"

    def run(self, upto: int | None = None) -> Sequence_:
        """Prefill up to `upto` tokens, pausing where the cache asks."""
        upto = len(self.tokens) if upto is None else upto
        while self.done < upto:
            stop = self.lease.next_stop(self.done, upto)
            assert self.done < stop <= upto
            self.lease.grow(stop)
            self._compute(stop)
            self.lease.checkpoint(self.tokens[:stop])
        return self

    def decode(self, tokens: Sequence[int]) -> Sequence_:
        for token in tokens:
            self.tokens.append(token)
            self.lease.grow(len(self.tokens))
            self._compute(len(self.tokens))
        return self

    def _compute(self, upto: int) -> None:
        storage = self.cache.storage
        for at in range(self.done, upto):
            page = self.lease.pages[at // storage.page]
            storage.rows[page][at % storage.page] = digest(self.tokens[: at + 1])
        self.done = upto
        storage.slots[self.lease.slot] = digest(self.tokens[:upto])

    def close(self, reason: str = "stop") -> Sequence_:
        self.lease.close(self.tokens[: self.done], reason)
        return self


def make(
    pages: int = 64,
    slots: int = 4,
    *,
    page: int = 4,
    hybrid: bool = False,
    states: int = 8,
    root: Path | None = None,
    most_pages: int | None = None,
    **disk,
) -> RadixCache:
    """A small cache; `states` state blobs fit its budget; it may grow to `most_pages`.

    With `root`, a disk tier there, its DiskConfig changed by `disk`."""
    storage = FakeStorage(most_pages or pages, slots, page=page, hybrid=hybrid)
    sizes = {"pages": pages, "slots": slots, "most_pages": most_pages}
    budget = storage.state_bytes * states
    if root is None:  # `disk` is of no use then
        return RadixCache(storage, **sizes, state_budget=budget)
    identity = disk.pop("identity", b"i" * 16)
    clock = disk.pop("clock", time.time)
    config = DiskConfig(**{"budget": 1 << 20, **disk})
    store = DiskStore(root, identity)
    return RadixCache(storage, **sizes, state_budget=budget, disk=config, store=store, wall=clock)


def written(cache: RadixCache) -> None:
    """Wait until everything queued is on disk."""
    while cache.tick():
        cache.disk.collect(wait_s=10)


def kill(cache: RadixCache) -> None:
    """What kill -9 leaves once the queue was empty: files and journal as they are, the lock let go."""
    written(cache)
    assert cache.disk._store.stop(10)


def audit(cache: RadixCache, running: Sequence[Sequence_] = ()) -> None:
    """Every page reference is accounted for; locks, ghosts and segments agree with the tree."""
    refs = [0] * cache.pool.most
    for sequence in running:
        for page in sequence.lease.pages:
            refs[page] += 1
    nodes, ghosts, states = 0, 0, 0
    stack = list(cache.tree.root.children.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        nodes += 1
        assert len(node.tokens) > 0 and node.parent.end == node.start
        if node.pages is None:
            ghosts += len(node.tokens) if node.record is None else 0
            assert node.state is None and all(c.pages is None for c in node.children.values())
            assert node not in cache.ram.page_order
        else:
            assert len(node.pages) == (node.end - 1) // cache.page - node.start // cache.page + 1
            for page in node.pages:
                refs[page] += 1
            assert (node in cache.ram.page_order) == (node.locks == 0)
        states += node.state is not None
        if node.record is not None:
            record = node.record
            assert record.alive and node in record.nodes and record.start <= node.start and node.end <= record.end
            assert node.parent is cache.tree.root or node.parent.record is not None
        assert (node.state is not None) == (node in cache.ram.state_order)
        assert node.locks >= sum(child.locks for child in node.children.values())
    for job in cache.disk._store.jobs() if cache.disk else ():
        for page in job.pages:
            refs[page] += 1
    assert refs == [cache.pool.refs(page) for page in range(cache.pool.most)]
    assert cache.pool.free == refs.count(0) - (cache.pool.most - cache.pool.total)
    assert (nodes, ghosts) == (cache.tree.nodes, cache.tree.ghost_tokens)
    if cache.disk:
        index = cache.disk.index
        assert index.bytes == sum(r.total_bytes for r in index.records.values()) <= max(index.budget, 0)
        for record in index.records.values():
            assert record.children == sum(r.parent is record for r in index.records.values())
            assert sum(len(n.tokens) for n in record.nodes) == record.end - record.start
    assert states * cache.storage.state_bytes == cache.ram.state_order.size <= cache.ram.state_budget


def failing(monkeypatch: pytest.MonkeyPatch, code: int, call: str) -> None:
    """Every `call` under the system's own names fails with `code`, as on a full or read-only file system."""
    real = getattr(os, call)

    def fail(first, *args, **kw):
        if call == "open" and not args[0] & (os.O_WRONLY | os.O_RDWR):
            return real(first, *args, **kw)
        raise OSError(code, os.strerror(code), str(first))

    monkeypatch.setattr(os, call, fail)
