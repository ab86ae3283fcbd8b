"""`RadixCache`: the prefix cache. Owns leases and what a request is told; tiers own what is kept where.

Pages and the recurrent state at one position are one unit. Models without recurrent layers can resume anywhere, so for them every
position with pages is such a unit; the others resume where a state was kept. Nothing else in here asks what kind of model it is.

Runs without torch: tensors are behind `Storage`, files behind `DiskStore`; the policy simulator replaces both by nothing.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from engine.ipc import Anchor
from engine.prefix.anchors import FIXED, MIN_GAP, parting, plan
from engine.prefix.base import Match, OutOfPages, Storage
from engine.prefix.disk import DiskConfig, DiskTier
from engine.prefix.history import History, explain
from engine.prefix.lease import RadixLease
from engine.prefix.pages import PagePool
from engine.prefix.policy import Segment
from engine.prefix.radix import Node, RadixTree, Walk
from engine.prefix.ram import RamTier
from engine.prefix.records import SHARED
from engine.prefix.store import DiskStore
from engine.prefix.textkeys import TextKeys
from engine.prefix.thrash import ThrashAlarm
from engine.protocol import log_line

logger = logging.getLogger(__name__)

PUBLISH_EVERY = 1024  # tokens of a running prefill after which others may share it (models that resume anywhere)
LONG_PREFILL = 4096  # tokens: minutes of work on a small machine, too much to lose if the server is killed while it answers
MIN_RESTORE = 16  # tokens: below this a prefill is quicker than a file
WRITER_WAIT_S = 5.0  # for pages the disk writer holds, before a request is told that none are free


class RadixCache:
    """`PrefixCache` over `pages` KV pages and `slots` state slots; `state_budget` bytes for saved states.

    `most_pages` and `most_slots` are what the tensors have room for, where that is more. With `disk` and `store` what is kept is
    also written there and read back after an eviction or a restart.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        pages: int,
        slots: int,
        most_pages: int | None = None,
        most_slots: int | None = None,
        state_budget: int = 0,
        disk: DiskConfig | None = None,
        store: DiskStore | None = None,
        text_keys: TextKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.storage = storage
        self.page: int = storage.page
        self.pool = PagePool(pages, most_pages)
        self.tree = RadixTree(self.pool, self.page)
        self.history = History()
        self.ram = RamTier(storage, self.tree, self.history, state_budget, clock)
        self.counters: Counter[str] = Counter()
        self.slots = PagePool(slots, most_slots, "sequence slots")
        self._alarm = ThrashAlarm()
        state, row = storage.state_bytes, max(1, storage.row_bytes)
        self._long = min(LONG_PREFILL, max(MIN_GAP, state // row)) if state else LONG_PREFILL
        self._text_keys = text_keys
        self._clock = clock
        self.disk: DiskTier | None = None
        if disk is not None and store is not None:
            self.disk = DiskTier(disk, store, storage, self.tree, wall)
            for record in self.disk.index.records.values():
                if not record.children and record.owner != SHARED:
                    self.history.note(record.owner, record.nodes[0])

    # --- the life of a lease

    def open(
        self,
        tokens: Sequence[int],
        *,
        session: str,
        anchors: Sequence[Anchor],
        reuse: bool = True,
        background: bool = False,
        most: int | None = None,
    ) -> RadixLease:
        if not self.slots.free:
            raise OutOfPages(f"all {self.slots.total} sequence slots are in use")
        prompt = np.array(tokens, np.int32)
        if not reuse:
            lease = RadixLease(self, session, Match(0, reason="off"), array("i", prompt.tobytes()), *self.slots.take(1))
            lease.keep = False
            self.storage.clear(lease.slot)
            return lease
        if self.disk is not None:
            self.disk.tick()
        prompt, anchors = self._spelled(prompt, anchors, most)
        walk = self.tree.walk(prompt)
        known = self.history.known(session, walk, len(prompt))
        node, common = self._usable(walk, len(prompt) - 1, disk=False)
        source = "none" if node is None else "live" if node.locks else "ram"
        lease = RadixLease(self, session, Match(common, source), array("i", prompt.tobytes()), *self.slots.take(1))
        self._lock(lease, node)
        try:
            lease.pages = self._adopt(walk, common)
        except OutOfPages:
            self._leave(lease)
            raise
        node = self._restore(lease, prompt, walk, node) if self.disk is not None else node
        if node is None:
            self.storage.clear(lease.slot)
        elif node.state is not None:
            self.storage.load(node.state, lease.slot)
            self.ram.state_order.touch(node, None if background else Segment.PROTECTED)
        lease.match = explain(lease.match, walk, known, node, len(prompt))
        self.ram.missed(lease.match, walk.path, self.disk)
        if background:  # our own preparation proves nothing: what it adds is worth what it continues
            lease.segment = min(node.segment, Segment.PROTECTED) if node is not None else Segment.PROBATION
        else:
            if known is not None and known.grows and lease.match.common:
                lease.segment = Segment.PROTECTED
            self._read(node, lease.session)
        self._enter(lease, prompt, node, [*parting(walk.depth, lease.match.common, len(prompt)), *anchors])
        return lease

    def spare_slot(self, lease: RadixLease) -> int | None:
        if lease.spare is None and lease.keep and self.slots.free:
            (lease.spare,) = self.slots.take(1)
        return lease.spare

    def checkpoint(self, lease: RadixLease, tokens: Sequence[int], kind: str, slot: int | None = None) -> None:
        length = len(tokens)
        stop = next((s for s in lease.stops if s.offset == length), None)
        wanted = stop is not None or kind
        if not self.storage.state_bytes:
            wanted = wanted or length >= len(lease.tokens) or length - lease.published >= PUBLISH_EVERY
        if lease.keep and wanted and length > lease.published:
            where = lease.slot if slot is None else slot
            self._keep(lease, np.asarray(tokens, np.int32), kind or (stop.kind if stop else "turn"), where)
        if slot is not None:
            self._drop_spare(lease)

    def answering(self, lease: RadixLease) -> None:
        """The first token is out: a long prefill goes to disk now, a short one with the end of its turn.

        Now means up to the prompt's end: sent again it resumes there; with a state that weighs no more than the rows before it.
        """
        if not lease.answered and len(lease.tokens) - lease.match.common >= self._long:
            self._save(lease)
        lease.answered = True

    def close(self, lease: RadixLease, tokens: Sequence[int], reason: str) -> None:
        if lease.closed:
            return
        lease.closed = True
        if lease.keep and reason != "error":
            if len(tokens) > lease.published:
                self._keep(lease, np.asarray(tokens, np.int32), "turn-end", lease.slot)
            if len(tokens) > len(lease.tokens):
                self.history.note(lease.session, lease.kept)
            self._save(lease)
        self._leave(lease)
        self.ram.bound_ghosts()

    def take(self, count: int, newcomers: int = 0) -> list[int]:
        """`count` pages, evicting as needed. Raises OutOfPages when running sequences hold too many."""
        self._free_pages(count, newcomers)
        return self.pool.take(count)

    def _free_pages(self, count: int, newcomers: int = 0) -> None:
        """Evict until `count` pages are free, or nothing more can go; `newcomers`: see RamTier.free_pages."""
        if count > self.pool.free:
            self.ram.free_pages(count, newcomers)
            while self.disk is not None and self.disk.pending and count > self.pool.free:
                if not self.disk.collect(wait_s=WRITER_WAIT_S):
                    break

    # --- matching

    def _spelled(self, prompt: np.ndarray, anchors: Sequence[Anchor], most: int | None) -> tuple[np.ndarray, Sequence[Anchor]]:
        """The prompt as what is stored spells it, where that saves computing and fits `most`; the anchors moved along."""
        found = self._text_keys.respell(self.tree, prompt) if self._text_keys is not None else None
        if found is None:
            return prompt, anchors
        if most is not None and len(found.tokens) > most:
            self.counters["respelled_too_long"] += 1
            return prompt, anchors
        disk = self.disk is not None
        _, plain = self._usable(self.tree.walk(prompt), len(prompt) - 1, disk=disk)
        _, spelled = self._usable(self.tree.walk(found.tokens), len(found.tokens) - 1, disk=disk)
        if spelled - max(found.shift, 0) <= plain:
            return prompt, anchors
        self.counters["respelled"] += 1
        moved = [(a, found.offset(a.offset)) for a in anchors]
        return found.tokens, [Anchor(offset=at, kind=a.kind, weight=a.weight) for a, at in moved if at is not None]

    def _usable(self, walk: Walk, limit: int, *, disk: bool) -> tuple[Node | None, int]:
        """The deepest node and token count, at most `limit`, from which a sequence can go on: from memory, or with the disk."""
        best, common = None, 0
        for node in walk.path:
            if node.pages is None and not (disk and node.record is not None and node.record.stored):
                break
            if not self.storage.state_bytes:
                best, common = node, min(node.end, walk.depth, limit)
            elif node.end <= min(walk.depth, limit) and (node.state is not None or (disk and self.disk.state_of(node))):
                best, common = node, node.end
        return (best, common) if common else (None, 0)

    def _adopt(self, walk: Walk, common: int) -> list[int]:
        """Hold the pages of [0, common); the partly used last one as a copy of our own. Raises OutOfPages, holding nothing."""
        pages = self.tree.pages_of(walk.path, common)
        self.pool.hold(pages)
        if common % self.page:
            try:
                (own,) = self.take(1)
            except OutOfPages:
                self.pool.drop(pages)
                raise
            self.storage.copy_page(pages[-1], own)
            self.pool.drop(pages[-1:])
            pages[-1] = own
        return pages

    def _restore(self, lease: RadixLease, prompt: np.ndarray, walk: Walk, node: Node | None) -> Node | None:
        """Read what the disk has beyond the lease's match; returns the node to resume from, leaving the state in the slot."""
        began, have = time.perf_counter(), lease.match.common
        while True:
            deep, depth = self._usable(walk, len(prompt) - 1, disk=True)
            if deep is None or depth < have + MIN_RESTORE:
                return node
            try:
                lease.grow(depth)
            except OutOfPages:
                self.counters["restores_refused"] += 1
                return node
            blob = deep.state
            if self.storage.state_bytes and blob is None:
                blob = self.disk.restore_state(deep)
                if blob is None:
                    continue  # the damaged record is gone from the tree: look again
            depth = self.disk.restore(deep, have, depth, lease.pages)
            if depth == have or (self.storage.state_bytes and depth < deep.end):
                continue
            path = self.tree.insert(prompt[:depth])
            self.ram.publish(path, lease.pages, lease.session, lease.segment)
            if blob is not None:
                self.storage.load(blob, lease.slot)
                self.ram.hold_state(path[-1], lambda blob=blob: blob, lease.segment, path[-1].kind)
            self._lock(lease, path[-1])
            ms = (time.perf_counter() - began) * 1e3
            lease.match, lease.published = Match(depth, "disk", restore_ms=ms), depth
            self.counters["restored_tokens"] += depth - have
            return path[-1]

    def _read(self, node: Node | None, session: str) -> None:
        """A request of `session` goes on from `node`."""
        if node is not None and self.disk is not None:
            self.disk.used(node, session)
        while node is not None and node.parent is not None:
            node.hits += 1
            node.segment = max(node.segment, Segment.PROTECTED)
            node.owner = node.owner if node.owner == session else SHARED
            node = node.parent

    def _enter(self, lease: RadixLease, prompt: np.ndarray, node: Node | None, anchors: Sequence[Anchor]) -> None:
        """Put the prompt into the tree as something sent, lock it for the lease, and plan its stops."""
        common = lease.match.common
        self.counters["hit_tokens"] += common
        self.counters["prompt_tokens"] += len(prompt)
        self.counters["lost_tokens"] += lease.match.lost
        self._watch(lease.match, lease.session, len(prompt))
        path = self.tree.insert(prompt)
        for anchor in anchors:
            if anchor.kind in FIXED and 0 < anchor.offset <= len(prompt):
                path_to = self.tree.insert(prompt[: anchor.offset])
                path_to[-1].kind, path_to[-1].weight = anchor.kind, anchor.weight
                for above in path_to:
                    if above.owner == SHARED:  # of one conversation only, they are a part of it and go with it
                        above.segment = Segment.ANCHORED
        # What the prompt matches but cannot go on from stays free to go: it may be the very room the prompt needs.
        self._lock(lease, next((n for n in path if n.end >= common), None) if common else None)
        if path:
            self.ram.ghost(path[-1])
            self.history.note(lease.session, path[-1])
        if self.storage.state_bytes:
            lease.stops = plan(anchors, common, len(prompt), self.ram.state_budget // self.storage.state_bytes // 4)

    def _watch(self, match: Match, session: str, length: int) -> None:
        """Say so when the same tokens are prefilled again and again for want of room."""
        tier = self.disk or self.ram
        row = max(1, self.storage.row_bytes)
        capacity = max(self.pool.total * self.page, self.disk.budget_bytes // row if self.disk is not None else 0)
        unread = tier.counters["evicted_unread"]
        new = length - match.common
        thrash = self._alarm.request(self._clock(), session, new, match.lost, match.reason, unread=unread, capacity=capacity)
        if thrash is not None:
            self.counters["thrash"] += 1
            need = max(tier.budget_bytes, self.ram.budget_bytes) + thrash.missing_bytes(row, self.storage.state_bytes)
            option = "--kv-disk-space" if self.disk is not None else "--kv-memory"
            logger.warning(thrash.line(tier.budget_bytes, need, option))

    def _lock(self, lease: RadixLease, node: Node | None) -> None:
        held, lease.locked = lease.locked, node
        if node is not None:
            self.ram.lock(node)
        if held is not None:
            self.ram.unlock(held)

    def _leave(self, lease: RadixLease) -> None:
        if lease.locked is not None:
            self.ram.unlock(lease.locked)
        self.pool.drop(lease.pages)
        lease.pages = []
        self.slots.drop((lease.slot,))
        self._drop_spare(lease)

    def _drop_spare(self, lease: RadixLease) -> None:
        if lease.spare is not None:
            self.slots.drop((lease.spare,))
            lease.spare = None

    # --- keeping

    def _keep(self, lease: RadixLease, tokens: np.ndarray, kind: str, slot: int) -> None:
        """Publish the lease's pages, and the state in `slot`, at `len(tokens)`."""
        path = self.tree.insert(tokens)
        node = path[-1]
        node.kind = node.kind or kind
        if not self.storage.state_bytes or self.ram.hold_state(node, lambda: self.storage.save(slot), lease.segment, kind):
            added = self.ram.publish(path, lease.pages, lease.session, lease.segment)
            if added:
                self.counters["stored"] += 1
                key, size = self.tree.key(node).hex()[:16], added + self.storage.state_bytes
                line = log_line("kv cache stored", tier="ram", tokens=node.end, bytes=size, reason=kind, key=key)
                logger.info(line)
        lease.published, lease.kept = len(tokens), node
        self._lock(lease, node)

    def _save(self, lease: RadixLease) -> None:
        """Queue what the lease kept, up to the deepest resumable node, for the disk."""
        if self.disk is None or lease.kept is None:
            return
        path = self.tree.path_to(lease.kept)
        while path and not self.ram.resumable(path[-1]):
            path.pop()
        if path:
            self.disk.save(path, lease.pages, lease.session, lease.segment)

    # --- control

    def tick(self) -> bool:
        if self.disk is None:
            return False
        self.disk.tick()
        return self.disk.pending > 0

    def flush(self, tier: str = "all") -> dict[str, int]:
        if tier not in ("ram", "disk", "all"):
            raise ValueError(f"unknown tier {tier!r}: use ram, disk or all")
        records = self.disk.clear() if self.disk is not None and tier != "ram" else 0
        return {"disk_records": records, "ram_tokens": self.ram.flush("flushed") if tier != "disk" else 0}

    def delete_session(self, session: str) -> dict[str, int]:
        self.history.forget(session)
        records = self.disk.purge(session) if self.disk is not None else 0
        return {"disk_records": records, "ram_tokens": self.ram.flush("purged", session)}

    def resize(
        self,
        *,
        state_bytes: int | None = None,
        disk_bytes: int | None = None,
        pages: int | None = None,
        slots: int | None = None,
    ) -> None:
        if pages is not None:
            self._free_pages(self.pool.total - pages)
            self.pool.resize(pages, self.storage.give_back)
            self.ram.page_order.resize(pages)
        if slots is not None:
            self.slots.resize(slots, self.storage.give_back_slots)
        if state_bytes is not None:
            self.ram.resize_states(state_bytes)
        if disk_bytes is not None and self.disk is not None:
            self.disk.resize(disk_bytes)

    def trim(self) -> int:
        """Forget what no lease holds and return the memory of all free pages, which may be written again; returns how many."""
        self.ram.flush("memory-short")
        return self.pool.give_back(self.storage.give_back)

    def status(self) -> dict[str, object]:
        return {
            "slots": {"total": self.slots.total, "free": self.slots.free},
            "sessions": len(self.history),
            "counters": dict(self.counters),
            "ram": self.ram.status(),
            "disk": self.disk.status() if self.disk is not None else None,
        }

    def shutdown(self) -> None:
        if self.disk is not None:
            self.disk.close()
