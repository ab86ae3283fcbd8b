"""The disk tier: which nodes are on disk, when runs are written, read back and given up. Policy is `records`, I/O is `store`.

Nothing here can fail a request. A record that cannot be read whole is dropped with everything that continues it, said so once,
and the tokens are prefilled instead; a disk that cannot be written is left alone for a while.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.prefix.anchors import FIXED
from engine.prefix.base import Storage
from engine.prefix.files import KV, STATE, Damaged
from engine.prefix.journal import Drop, DropState, Spent, Use
from engine.prefix.ledger import Ledger
from engine.prefix.policy import Segment
from engine.prefix.radix import Node, RadixTree
from engine.prefix.records import DiskIndex, Record
from engine.prefix.recover import bind, frames, no_garbage_collection, put, recover
from engine.prefix.store import MAX_JOBS, DiskStore, Outcome, WriteJob
from engine.prefix.unwritten import Unwritten
from engine.prefix.writes import WriteBudget
from engine.protocol import log_line

logger = logging.getLogger(__name__)

# A run is cut here: others share no more than tools and system text; after a restart an edit or a second try goes back this far.
BORDERS = FIXED | {"grid", "user"}
DAY = 86400.0
BACKOFF_S = 60.0  # after a failed write: a full disk does not get fuller by asking every turn
ACTIVE_S = 600.0  # since its last read a conversation counts as going on: agents ask every few seconds, people pause for minutes
EXPIRE_EVERY_S = 600.0  # between two looks for records past their lifetime
RECORD_BYTES = 64 << 20  # KV rows a record holds at most: long enough for full disk speed, short enough to hold two of them
PENDING_SHARE = 0.5  # of the pages may wait to be written; what is beyond it is queued when they are
STOP_S = 30.0  # the most a shutdown waits for the queue


@dataclass(frozen=True)
class DiskConfig:
    """Budget and pace. Sizes in bytes, times in seconds."""

    budget: int
    ttl_s: float = 30 * DAY
    daily_bytes: int = 256 << 30  # a tenth of what a 1 TB consumer SSD endures over five years


class DiskTier:
    """Runs of tokens on disk under one identity. All methods are called by the engine loop."""

    def __init__(
        self, config: DiskConfig, store: DiskStore, storage: Storage, tree: RadixTree, clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.index = DiskIndex(config.budget, resumes_anywhere=not storage.state_bytes)
        self.counters: Counter[str] = Counter()
        self._storage = storage
        self._tree = tree
        self._clock = clock
        self._record_tokens = max(1, RECORD_BYTES // max(1, storage.row_bytes) // storage.page) * storage.page
        self._writes = WriteBudget(config.daily_bytes, config.budget)
        self._paused_until = 0.0
        self._next_expiry = 0.0
        self._used: dict[int, Record] = {}  # read since the last Use frames
        self._unwritten = Unwritten(tree, self._resumable)
        self._store = store
        with no_garbage_collection(lambda: len(self.index.records)):
            self._load(store.load())
        opened = {"records": len(self.index.records), "bytes": self.index.bytes, "others": store.others}
        hint = "the caches of other weights, templates or kernels are not used" if store.others else None
        self._log("disk opened", **opened, hint=hint)
        store.sweep(set(self.index.records), clock() - config.ttl_s)
        self._expire()

    # --- opening

    def _load(self, ledger: Ledger) -> None:
        if ledger.damaged:
            self._log("journal damaged", bytes=ledger.damaged, hint="what is behind the damage is prefilled again")
        found = recover(ledger, self._tree)
        self.counters["orphans"] += found.orphans
        self._writes.spent.update(ledger.spent)
        self.index.load(found.records)
        self.index.next_id = ledger.next_id
        if ledger.damaged or found.stale:
            error = self._store.compact(frames(ledger, found.records))
            if error:
                self._failed(error)
        self._store.condense()

    # --- writing

    def save(self, path: Sequence[Node], pages: Sequence[int], owner: str, segment: int) -> None:
        """Queue what of `path` is not on disk, one record up to each fixed anchor and one up to its end.

        `pages[i]` holds tokens [i * page, ...). The last node must be resumable: its state (if the model has any) is written
        too. A long run becomes several records.
        """
        parent = next((n.record for n in reversed(path) if n.record is not None), None)
        run: list[Node] = []
        for node in self._cut([n for n in path if n.record is None]):
            run.append(node)
            full = node.end - run[0].start >= self._record_tokens
            if node is path[-1] or full or (node.kind in BORDERS and self._resumable(node)):
                if self._queue_full(node.end - run[0].start):
                    if not self._unwritten.add(path[-1], owner, segment):
                        self._refuse("write-queue-full")
                    return
                parent = self._save_run(run, parent, pages, owner, segment)
                run = []
                if parent is None:
                    return

    def _cut(self, nodes: Sequence[Node]) -> Iterator[Node]:
        """`nodes`, split so that runs end at multiples of a record's most tokens."""
        for node in nodes:
            while (node.end - 1) // self._record_tokens > node.start // self._record_tokens:
                yield self._tree.split(node, (node.start // self._record_tokens + 1) * self._record_tokens)
            yield node

    def _resumable(self, node: Node) -> bool:
        return not self._storage.state_bytes or node.state is not None

    def _save_run(self, run: list[Node], parent: Record | None, pages: Sequence[int], owner: str, segment: int) -> Record | None:
        last, start = run[-1], run[0].start
        count = last.end - start
        kv_bytes = count * self._storage.row_bytes
        state_bytes = self._storage.state_bytes if last.state is not None else 0
        again = sum(n.size for n in run if n.written) * self._storage.row_bytes
        with self.index.pinned(parent):
            if not self._admit(kv_bytes + state_bytes, owner, segment, again):
                return None
        now, kind = self._clock(), last.kind or "turn-end"
        record = Record(
            self.index.next_id, parent.id if parent else 0, start, last.end, born=now, used=now, kind=kind, owner=owner
        )
        record.kv_bytes, record.state_bytes, record.key, record.parent = kv_bytes, state_bytes, self._tree.key(last), parent
        tokens = np.concatenate([n.tokens for n in run]).tobytes()
        first = start // self._storage.page
        held = list(pages[first : (last.end - 1) // self._storage.page + 1])
        self._tree.pool.hold(held)
        offset, storage, blob = start % self._storage.page, self._storage, last.state
        self.index.add(record, segment)
        bind(self._tree, record, run[::-1])
        self._writes.spend(now, record.total_bytes, again)
        job = WriteJob(put(record, tokens), lambda: storage.read_rows(held, offset, count), lambda: storage.pack(blob), held)
        self._store.submit(job)
        return record

    def _queue_full(self, tokens: int) -> bool:
        """Whether the pages of `tokens` more would keep too much memory from being evicted until they are written."""
        waiting, pages = self._store.pending, -(-tokens // self._storage.page) + 1
        return waiting >= MAX_JOBS or (waiting > 0 and self._store.pending_pages + pages > self._tree.pool.total * PENDING_SHARE)

    def _write_more(self) -> None:
        """Queue what had no room, now that there is some."""
        while self._unwritten and not self._store.pending:  # each turn that is not written whole leaves some pending
            turn = self._unwritten.take()
            if turn is None:
                self._refuse("write-queue-full")
            else:
                self.save(turn.path, turn.pages, turn.owner, turn.segment)

    def _admit(self, size: int, owner: str | None = None, segment: int = Segment.PROTECTED, again: int = 0) -> bool:
        """Room in day and budget for `size` bytes, `again` of them on disk before; makes room in the budget.

        What another session used a moment ago is not given up for `owner`, unless nobody has read it yet and `owner` goes on
        with a conversation: two that do not fit together would only push each other out and be written again at every turn.
        """
        now = self._clock()
        if now < self._paused_until <= now + BACKOFF_S:  # a pause further away than that: the clock was set back
            return self._refuse("disk-error")
        refusal = self._writes.refusal(now, size, again)
        if refusal:
            return self._refuse(refusal)
        if size > self.index.budget:
            return self._refuse("larger-than-budget")
        unproven = segment == Segment.PROBATION
        for record, state_only in self.index.victims(size):
            if state_only:
                self._drop_state(record)
            elif owner not in (None, record.owner) and now - ACTIVE_S < record.used <= now and (unproven or record.goes_on):
                return self._refuse("others-are-active")
            else:
                self.drop(record, "disk-cache-full")
        return self.index.bytes + size <= self.index.budget or self._refuse("larger-than-budget")

    def _refuse(self, why: str) -> bool:
        self.counters[f"refused_{why}"] += 1
        count = self.counters[f"refused_{why}"]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ...: said, not shouted
            self._log("store refused", reason=why, times=count)
        return False

    def collect(self, wait_s: float = 0.0) -> int:
        """Apply what the writer finished; returns how many pages were let go."""
        freed = 0
        for outcome in self._store.collect(wait_s):
            freed += len(outcome.job.pages)
            self._tree.pool.drop(outcome.job.pages)
            self._apply(outcome)
        while self._store.errors:
            self._failed(self._store.errors.pop())
        return freed

    @property
    def budget_bytes(self) -> int:
        return self.index.budget

    @property
    def pending(self) -> int:
        """Turns that wait to be written."""
        return self._store.pending + len(self._unwritten)

    def _apply(self, outcome: Outcome) -> None:
        frame = outcome.job.put
        record = self.index.records.get(frame.id)
        if outcome.error:
            self._failed(outcome.error)
            if record is not None:
                self.drop_with_children(record, "store-failed")
            return
        self.counters["stored"] += 1
        self.counters["stored_bytes"] += frame.kv_bytes + frame.state_bytes
        if record is not None:  # else it was given up while it was written; its Drop is queued behind it
            record.stored = True
            self._log(
                "stored", tier="disk", tokens=record.end, bytes=record.total_bytes, reason=frame.kind, key=frame.key.hex()[:16]
            )

    def _failed(self, error: str) -> None:
        self.counters["errors"] += 1
        self._paused_until = self._clock() + BACKOFF_S
        hint = f"check free space and permissions of {self._store.directory}"
        self._log("disk error", error=error, retry_s=int(BACKOFF_S), hint=hint)

    # --- reading

    def state_of(self, node: Node) -> bool:
        """Whether the state after `node` can be read."""
        record = node.record
        return record is not None and record.stored and record.state_bytes > 0 and record.end == node.end

    def restore(self, node: Node, start: int, end: int, pages: Sequence[int]) -> int:
        """Read rows [start, end) of the path to `node` into `pages`; returns where it had to stop (end when all is there)."""
        spans: list[tuple[Record, int]] = []  # a record and where this path leaves it: it may go on along another branch
        for each in self._tree.path_to(node):
            if each.end > start and each.start < end and each.record is not None:
                if spans and spans[-1][0] is each.record:
                    spans.pop()
                spans.append((each.record, min(end, each.end)))
        page, at = self._storage.page, start
        payloads = self._store.read_in_turn([(r.id, r.key, r.kv_bytes) for r, _ in spans])
        for record, stop in spans:
            try:
                data = next(payloads)
            except Damaged as problem:
                self._damaged(record, KV, problem)
                break
            self.counters["read_bytes"] += record.kv_bytes
            self._storage.write_rows(pages[at // page :], at % page, stop - at, data, at - record.start)
            at = stop
        payloads.close()
        return at

    def restore_state(self, node: Node) -> object | None:
        """The state after `node`; None when the file is not as it was written (the record is dropped then)."""
        record = node.record
        try:
            data = self._store.read(record.id, STATE, record.key, record.state_bytes)
        except Damaged as problem:
            self._damaged(record, STATE, problem)
            return None
        self.counters["read_bytes"] += record.state_bytes
        return self._storage.unpack(data)

    def _damaged(self, record: Record, part: str, problem: Damaged) -> None:
        self.counters["damaged"] += 1
        self._log(
            "disk damaged", reason=str(problem), tokens=record.end, key=record.key.hex()[:16], record=f"{record.id:x}.{part}"
        )
        self.drop_with_children(record, "damaged")

    def used(self, node: Node, session: str) -> None:
        """A request resumed at `node`, from whatever tier: its records are fresh."""
        record = node.record
        if record is not None:
            self.index.use(record, self._clock(), session)
            self._used[record.id] = record

    # --- giving up

    def drop(self, record: Record, why: str) -> None:
        """Forget a record without children, and what becomes useless above it."""
        while record is not None:
            age = int(max(0.0, self._clock() - record.born))
            self.counters["evicted"] += 1
            self.counters["evicted_unread"] += record.reads == 0
            fields = {"reason": why, "tokens": record.end, "hits": record.reads, "age_s": age, "stored_by": record.kind}
            self._log("evicted", tier="disk", **fields, key=record.key.hex()[:16])
            self.index.drop(record)
            self._used.pop(record.id, None)
            for node in record.nodes:
                self._tree.set_record(node, None)
                node.gone = why if node.pages is None else node.gone
            self._store.note(Drop((record.id,)))
            record = record.parent if self.index.useless(record.parent) else None

    def drop_with_children(self, record: Record, why: str) -> None:
        """Forget a record and everything that continues it."""
        for each in self.index.with_children(record):
            if each.alive:
                self.drop(each, why)

    def _drop_state(self, record: Record) -> None:
        self.counters["states_dropped"] += 1
        self.index.drop_state(record)
        self._store.note(DropState((record.id,)))

    def purge(self, session: str) -> int:
        """Forget the records only `session` used; returns how many."""
        self._unwritten.forget(session)
        mine = sorted((r for r in self.index.records.values() if r.owner == session), key=lambda r: -r.start)
        gone = 0
        for record in mine:
            if record.alive and not record.children:
                self.drop(record, "purged")
                gone += 1
        return gone

    def clear(self) -> int:
        """Forget everything; returns how many records."""
        self._unwritten.forget()
        count = len(self.index.records)
        for record in sorted(self.index.records.values(), key=lambda r: -r.start):
            if record.alive:
                self.drop(record, "flushed")
        return count

    def resize(self, budget: int) -> None:
        self.index.resize(budget)
        self._writes.least = budget
        self._admit(0)

    def tick(self) -> None:
        """Housekeeping between requests: outcomes, what waits to be written, lifetimes, marks of use."""
        self.collect()
        self._write_more()
        if self._clock() >= self._next_expiry or self._next_expiry > self._clock() + EXPIRE_EVERY_S:
            self._expire()

    def _expire(self) -> None:
        now = self._clock()
        self._next_expiry = now + EXPIRE_EVERY_S
        for record in self.index.expired(now - self.config.ttl_s):
            if record.alive and not record.children:
                self.drop(record, "ttl")
        self._note_uses()

    def _note_uses(self) -> None:
        for record in self._used.values():
            self._store.note(Use(record.id, record.used, record.reads, record.owner))
        self._used.clear()
        for hour, size in self._writes.spent.items():
            self._store.note(Spent(hour, size))

    def close(self) -> None:
        """Write what is queued, note what was used, let the directory go."""
        until = time.monotonic() + STOP_S
        while self._unwritten and time.monotonic() < until:
            self.collect(wait_s=0.1)
            self._write_more()
        self._note_uses()
        if not self._store.stop(max(1.0, until - time.monotonic())):
            late = f"queue not written after {STOP_S:.0f} s"
            self._log("disk error", error=late, hint="the last turns will be prefilled again")
        self.collect()

    def status(self) -> dict[str, object]:
        return {
            "directory": self._store.directory,
            "budget_bytes": self.index.budget,
            "bytes": self.index.bytes,
            "records": len(self.index.records),
            "pending": self.pending,
            "pending_pages": self._store.pending_pages,
            "written_24h_bytes": self._writes.spent.total(),
            "daily_cap_bytes": self.config.daily_bytes,
            "ttl_s": self.config.ttl_s,
            "counters": dict(self.counters),
        }

    @staticmethod
    def _log(event: str, **fields: object) -> None:
        logger.info(log_line(f"kv cache {event}", **fields))
