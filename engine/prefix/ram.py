"""The memory tier: which nodes hold pages and states, who holds on to them, and who goes when room is needed."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.prefix.anchors import FIXED
from engine.prefix.base import Match, Storage
from engine.prefix.history import History
from engine.prefix.pages import PagePool
from engine.prefix.policy import Segment, SegmentedLru
from engine.prefix.radix import Node, RadixTree
from engine.protocol import log_line

if TYPE_CHECKING:
    from engine.prefix.disk import DiskTier

logger = logging.getLogger(__name__)

GHOST_TOKENS = 8 << 20  # 32 MiB of remembered token ids, enough for 60 conversations of 128K
NODE_TOKENS = 128  # what a node of the tree takes beside its tokens, in their bytes: tiny sessions are nothing else
TRIM_PAGES = 16  # the least an eviction takes from a conversation's end, so that trimming page by page does not litter the tree


class RamTier:
    """Pages and states of `tree`; `state_budget` in bytes."""

    def __init__(
        self, storage: Storage, tree: RadixTree, history: History, state_budget: int, clock: Callable[[], float]
    ) -> None:
        self.storage = storage
        self.tree = tree
        self.pool: PagePool = tree.pool
        self.page_order: SegmentedLru[Node] = SegmentedLru(tree.pool.total)
        self.state_order: SegmentedLru[Node] = SegmentedLru(state_budget)
        self.state_budget = state_budget
        self.counters: Counter[str] = Counter()
        self._history = history
        self._ghosts: OrderedDict[Node, None] = OrderedDict()
        self._clock = clock
        tree.on_split = self._was_split
        tree.on_ghost = self.ghost

    @property
    def budget_bytes(self) -> int:
        return self.pool.total * self.storage.page_bytes + self.state_budget

    def _was_split(self, lower: Node) -> None:
        if lower in self.page_order:
            self.page_order.resize_key(lower, len(lower.pages))
            self.page_order.add(lower.parent, len(lower.parent.pages), lower.parent.segment)

    # --- holding on

    def lock(self, node: Node) -> None:
        """Nothing on the path to `node` may go."""
        for each in self.tree.path_to(node):
            if not each.locks:
                self.page_order.drop(each)
                self._ghosts.pop(each, None)
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Leaf first, so that in every order a node goes before its ancestors."""
        while node.parent is not None:
            node.locks -= 1
            if not node.locks:
                if node.pages is None:
                    self.ghost(node)
                elif self._useless(node):
                    self._evict(node, "state-budget")
                else:
                    self.page_order.add(node, len(node.pages), node.segment)
            node = node.parent

    def publish(self, path: Sequence[Node], pages: Sequence[int], owner: str, segment: int) -> int:
        """Ghosts on `path` get their part of `pages`; returns the bytes of pages added."""
        filled = self.tree.fill(path, pages)
        for node in filled:
            node.born, node.gone, node.owner = self._clock(), "", owner
            node.segment = max(node.segment, segment)
        return len({page for node in filled for page in node.pages}) * self.storage.page_bytes

    def hold_state(self, node: Node, make: Callable[[], object], segment: int, kind: str = "") -> bool:
        """Keep the state `make()` at `node` if the budget allows; the state before it in the same conversation is superseded.

        It counts as what it belongs to: the newest state of a conversation that goes on is no newcomer.
        """
        if node.state is None:
            if not self._room_for_state():
                return False
            node.state = make()
            fixed = kind in FIXED
            self.state_order.add(node, self.storage.state_bytes, Segment.ANCHORED if fixed else segment)
            above = node.parent
            while above is not None and above.state is None:
                above = above.parent
            if above is not None and above.kind not in FIXED:
                self.state_order.demote(above)
        return True

    def resumable(self, node: Node) -> bool:
        """Whether a sequence can go on from the end of `node`."""
        return node.pages is not None and (node.state is not None or not self.storage.state_bytes)

    # --- giving up

    def free_pages(self, want: int, newcomers: int = 0) -> None:
        """Evict until `want` pages are free or nothing more can go; `newcomers`: how many a new conversation holds already."""
        while self.pool.free < want:
            node = self.page_order.victim(newcomers)
            if node is None:
                return
            while (below := next((c for c in node.children.values() if c.pages is not None), None)) is not None:
                node = below
            spare = max(want - self.pool.free, TRIM_PAGES)
            if not self.storage.state_bytes and len(node.pages) > spare + 1:
                page = self.tree.page
                upper = self.tree.split(node, (node.end - 1) // page * page - (spare - 1) * page)
                self.page_order.add(upper, len(upper.pages), upper.segment, oldest=True)
            self._evict(node, "ram-full")

    def _evict(self, node: Node, why: str) -> int:
        """Drop a leaf's pages and state, and what above it can no longer be resumed from; returns how many tokens went."""
        gone = 0
        while True:
            gone += node.size
            self._log_evicted(node, why, node.size)
            self.page_order.drop(node)
            self.state_order.drop(node)
            self.tree.release(node, why)
            self.ghost(node)
            node = node.parent
            if not self._useless(node):
                return gone

    def _useless(self, node: Node) -> bool:
        """Pages that no state and no descendant can use (models that resume only where a state was kept)."""
        if not self.storage.state_bytes or node.parent is None or node.locks or node.pages is None or node.state is not None:
            return False
        return not any(child.pages is not None for child in node.children.values())

    def _room_for_state(self) -> bool:
        size = self.storage.state_bytes
        if size > self.state_budget:
            self.counters["states_refused"] += 1
            return False
        while self.state_order.size + size > self.state_budget:
            self._drop_state(self.state_order.victim())
        return True

    def _drop_state(self, node: Node) -> None:
        self.state_order.drop(node)
        self._log_evicted(node, "state-budget", 0)
        node.state = None
        if self._useless(node):
            self._evict(node, "state-budget")

    def missed(self, match: Match, path: Sequence[Node], disk: DiskTier | None) -> None:
        """What a request on `path` lost for want of room moves the share of newcomers, here and on disk."""
        if not match.lost or match.reason not in ("ram-full", "disk-cache-full"):
            return
        gone = next((n for n in path if n.pages is None and n.record is None), None)
        if gone is None:  # it is on disk, and there was no room to read it
            return
        newcomer = gone.segment == Segment.PROBATION
        self.page_order.missed(match.lost // self.tree.page, newcomer)
        if disk is not None:
            disk.index.order.missed(match.lost * self.storage.row_bytes, newcomer)

    def flush(self, why: str, owner: str | None = None) -> int:
        """Evict everything no lease holds (`owner`: of that session only); returns how many tokens went."""
        gone, again = 0, True
        while again:
            again = False
            for node in list(self.page_order.order()):
                mine = owner is None or node.owner == owner
                if mine and node in self.page_order and not any(c.pages is not None for c in node.children.values()):
                    gone += self._evict(node, why)
                    again = True
        return gone

    def resize_states(self, budget: int) -> None:
        self.state_budget = budget
        self.state_order.resize(budget)
        while self.state_order.size > budget:
            self._drop_state(self.state_order.victim())

    def _log_evicted(self, node: Node, why: str, tokens: int) -> None:
        self.counters["evicted"] += 1
        self.counters["evicted_tokens"] += tokens
        self.counters["evicted_unread"] += node.hits == 0
        age, key = int(self._clock() - node.born), self.tree.key(node).hex()[:16]
        stored_by = node.kind or "turn"
        fields = {"reason": why, "tokens": node.end, "hits": node.hits, "age_s": age, "stored_by": stored_by, "key": key}
        logger.info(log_line("kv cache evicted", tier="ram", **fields))

    # --- ghosts

    def ghost(self, node: Node) -> None:
        """`node` may be forgotten one day, if it has neither pages nor a record and nobody holds it."""
        if node.pages is None and node.record is None and not node.locks:
            self._ghosts[node] = None

    def bound_ghosts(self, most: int = GHOST_TOKENS) -> None:
        """Forget the oldest ghosts beyond `most` tokens."""
        while self._ghosts and self.tree.ghost_tokens + NODE_TOKENS * len(self._ghosts) > most:
            node, _ = self._ghosts.popitem(last=False)
            if node.pages is not None or node.record is not None or node.children or node.locks:
                continue  # in use again; it comes back when it is a ghost leaf again
            self._history.moved_up(node)
            self.tree.remove(node)
            above = node.parent
            if above.parent is not None and above.pages is None and above.record is None and not above.locks:
                self._ghosts[above] = None
                self._ghosts.move_to_end(above, last=False)

    def status(self) -> dict[str, object]:
        return {
            "page_tokens": self.tree.page,
            "pages": self.pool.total,
            "pages_free": self.pool.free,
            "page_bytes": self.storage.page_bytes,
            "state_bytes_each": self.storage.state_bytes,
            "states": len(self.state_order),
            "state_bytes": self.state_order.size,
            "state_budget_bytes": self.state_budget,
            "nodes": self.tree.nodes,
            "ghost_tokens": self.tree.ghost_tokens,
            "counters": dict(self.counters),
        }
