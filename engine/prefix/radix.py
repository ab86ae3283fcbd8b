"""The radix tree over token sequences: what is known, what of it is held in pages, where states hang. Owns no policy.

An edge holds tokens and compares them: a hash is never trusted alone, here it is not even used. Nodes are token-granular; pages
are not. A node lists the pages that overlap its tokens, so a page that straddles a border is listed by both sides, each side with
a reference of its own. On the way down the deepest node that lists a page index wins: it stores the rows of its ancestors too.

Invariant: a node with pages has a parent with pages (or the root). A node without pages is a ghost: it remembers what was sent,
so that a lost prefix can be counted, and costs four bytes a token; with a record it can be read back from disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from engine.prefix.pages import PagePool
from engine.prefix.records import Record

_NO_MARKS: frozenset[str] = frozenset()  # most nodes of a large index have none: 200 bytes each saved


class Tokens(Protocol):
    """Tokens that are somewhere else until they are asked for."""

    def read(self) -> np.ndarray: ...


class Node(msgspec.Struct, eq=False):
    """Tokens `[start, end)` of every sequence that passes here. A struct: a large index makes one a record at start."""

    parent: Any  # a Node; None for the root
    held: Any  # int32 [end - start], or Tokens
    start: int
    end: int
    children: dict[int, Any] = {}  # by first token
    pages: list[int] | None = None  # page ids of indices start // page .. (end - 1) // page
    state: Any = None  # recurrent state after `end` tokens
    kind: str = ""  # why the border at `end` was made: an anchor kind, "turn-end", "grid", ...
    weight: float = 0.0
    segment: int = 0  # a policy.Segment
    locks: int = 0  # leases at or below this node
    hits: int = 0
    born: float = 0.0
    owner: str = ""  # the session that computed it; records.SHARED once another read it
    marks: set[str] | frozenset[str] = _NO_MARKS  # sessions that sent a sequence ending here
    gone: str = ""  # why a ghost lost its pages; "" when they were never computed
    key: bytes = b""  # chain hash of tokens [0, end), filled by `RadixTree.key`
    record: Any = None  # disk record of this node, owned by the disk tier
    written: bool = False  # it had a record once

    @property
    def tokens(self) -> np.ndarray:
        held = self.held
        if type(held) is not np.ndarray:
            held = self.held = held.read()
        return held

    @property
    def size(self) -> int:
        return self.end - self.start

    def __repr__(self) -> str:
        return f"Node[{self.start}:{self.end}{' pages' if self.pages else ''}{' state' if self.state is not None else ''}]"


@dataclass(frozen=True)
class Walk:
    """`path` leaves the root out; its last node is matched up to `depth`, the others wholly."""

    path: tuple[Node, ...]
    depth: int


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two int32 vectors."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


class RadixTree:
    """Token sequences sharing prefixes. `pool` counts page references; `page` is tokens a page."""

    def __init__(self, pool: PagePool, page: int) -> None:
        self.pool = pool
        self.page = page
        self.root = Node(None, np.empty(0, np.int32), 0, 0)
        self.nodes = 0
        self.ghost_tokens = 0
        self.on_split: Callable[[Node], None] = lambda lower: None
        self.on_ghost: Callable[[Node], None] = lambda node: None

    def walk(self, tokens: np.ndarray) -> Walk:
        """Longest known prefix of `tokens` int32 [n]."""
        path: list[Node] = []
        node, depth = self.root, 0
        while depth < len(tokens):
            child = node.children.get(tokens.item(depth))
            if child is None:
                break
            size = common_length(child.tokens, tokens[depth : depth + child.size])
            path.append(child)
            depth += size
            if size < child.size:
                break
            node = child
        return Walk(tuple(path), depth)

    def insert(self, tokens: np.ndarray) -> tuple[Node, ...]:
        """The path (root left out) to the node that ends at exactly `len(tokens)`, made where missing (as ghosts)."""
        walk = self.walk(tokens)
        path = list(walk.path)
        if path and walk.depth < path[-1].end:
            path[-1] = self.split(path[-1], walk.depth)
        if walk.depth < len(tokens):
            parent = path[-1] if path else self.root
            path.append(self.graft(parent, tokens[walk.depth :].copy()))
        return tuple(path)

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` at token `at`; returns the new upper node. `node` stays the lower one and keeps what hangs at its end."""
        assert node.start < at < node.end and node.parent is not None
        upper = Node(node.parent, node.tokens[: at - node.start], node.start, at)
        upper.segment, upper.locks, upper.hits, upper.born = node.segment, node.locks, node.hits, node.born
        upper.owner = node.owner
        upper.gone, upper.record, upper.written = node.gone, node.record, node.written
        if node.record is not None:
            node.record.nodes.append(upper)
        if node.pages is not None:
            first = node.start // self.page
            upper.pages = node.pages[: (at - 1) // self.page - first + 1]
            node.pages = node.pages[at // self.page - first :]
            if at % self.page:
                self.pool.hold(upper.pages[-1:])
        node.parent.children[upper.tokens.item(0)] = upper
        node.held = node.tokens[at - node.start :]
        node.start, node.parent = at, upper
        upper.children[node.tokens.item(0)] = node
        self.nodes += 1
        self.on_split(node)
        return upper

    def graft(self, parent: Node, tokens: np.ndarray) -> Node:
        """A new child of `parent`, none of whose children starts with the same token."""
        child = Node(parent, tokens, parent.end, parent.end + len(tokens))
        parent.children[tokens.item(0)] = child
        self.nodes += 1
        self.ghost_tokens += len(tokens)
        return child

    def restore(self, parent: Node, record: Record, tokens: Tokens) -> Node:
        """The same for what is on disk as `record`, whose tokens nobody needs yet."""
        child = Node(parent, tokens, record.start, record.end, kind=record.kind, key=record.key, record=record, written=True)
        parent.children[record.first] = child
        self.nodes += 1
        return child

    def set_record(self, node: Node, record: object | None) -> None:
        """`node` is on disk as part of `record`, or (None) no longer."""
        if node.pages is None and (node.record is None) != (record is None):
            self.ghost_tokens += node.size * (1 if record is None else -1)
        node.record = record
        node.written = node.written or record is not None
        if record is None and node.pages is None and not node.locks:
            self.on_ghost(node)

    def fill(self, path: Sequence[Node], pages: Sequence[int]) -> list[Node]:
        """Give every ghost on `path` its part of `pages` (page i holds tokens [i * page, ...)); returns the nodes filled."""
        filled = []
        for node in path:
            if node.pages is not None:
                continue
            node.pages = list(pages[node.start // self.page : (node.end - 1) // self.page + 1])
            self.pool.hold(node.pages)
            self._replace_tail(node)
            self.ghost_tokens -= node.size if node.record is None else 0
            filled.append(node)
        return filled

    def _replace_tail(self, node: Node) -> None:
        """Let ancestors of `node` list its first page too where it straddles the border: it holds their rows as well."""
        at, page, index = node.start, node.pages[0], node.start // self.page
        above = node.parent
        while at % self.page and above is not self.root and (above.end - 1) // self.page == index:
            old = above.pages[-1]
            if old != page:
                self.pool.hold((page,))
                self.pool.drop((old,))
                above.pages[-1] = page
            at, above = above.start, above.parent

    def pages_of(self, path: Sequence[Node], depth: int) -> list[int]:
        """Page ids that hold tokens [0, depth) along `path`, whose nodes all have pages up to `depth`."""
        out: list[int] = []
        for node in path:
            if node.start >= depth:
                break
            first = node.start // self.page
            del out[first:]
            out += node.pages[: (min(depth, node.end) - 1) // self.page - first + 1]
        return out

    def release(self, node: Node, why: str) -> None:
        """Turn `node` into a ghost: drop its pages and its state."""
        assert not any(child.pages is not None for child in node.children.values()), "a page-holding child would be cut off"
        self.pool.drop(node.pages)
        node.pages = node.state = None
        node.gone = why
        self.ghost_tokens += node.size if node.record is None else 0

    def remove(self, leaf: Node) -> None:
        """Forget a ghost without children."""
        assert not leaf.children and leaf.pages is None and leaf.record is None and not leaf.locks
        del leaf.parent.children[leaf.tokens.item(0)]
        self.nodes -= 1
        self.ghost_tokens -= leaf.size

    def key(self, node: Node) -> bytes:
        """Chain hash of the tokens [0, node.end): the same whatever borders the tree has on the way."""
        if not node.key:
            digest = hashlib.blake2b(digest_size=16)
            for part in self.path_to(node):
                digest.update(part.tokens.tobytes())
            node.key = digest.digest()
        return node.key

    @staticmethod
    def path_to(node: Node) -> list[Node]:
        """Nodes from below the root down to `node`."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]
