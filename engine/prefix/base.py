"""The prefix cache as the scheduler sees it: a lease per sequence.

The scheduler owns when things happen; the prefix cache owns which pages and states exist, who shares them and what is
evicted. A position is reusable when KV pages *and* recurrent state for it exist (models without recurrent layers need pages
only); that pair is one unit here, so nothing above asks what kind of model it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.ipc import Anchor
from engine.protocol import Source


class OutOfPages(Exception):
    """No page could be freed: every page is held by a running sequence. The scheduler preempts or queues."""


@dataclass(frozen=True)
class Match:
    """What `open` found. `common` tokens need no prefill; `reason`/`at` say why it is not more ("" when all was found)."""

    common: int
    source: Source = "none"
    reason: str = ""
    at: str = ""
    anchor: str = ""
    lost: int = 0
    restore_ms: float = 0.0


class Lease(Protocol):
    """One live sequence's hold on pages and a state slot. Everything it holds is pinned until `close`."""

    match: Match
    tokens: array  # int32; the prompt to compute: the request's, except where a stored tokenization spells the same text
    pages: list[int]  # page ids in order; page i holds tokens [i * PAGE, (i + 1) * PAGE)
    slot: int  # state slot of this sequence (0-based; valid for models without states too)

    def grow(self, tokens: int) -> None:
        """Make room for `tokens` tokens in total. Raises OutOfPages (nothing changed then)."""

    def next_stop(self, start: int, end: int) -> int:
        """The first position in (start, end] whose state is wanted for a checkpoint, or `end`."""

    def spare_slot(self) -> int | None:
        """A second state slot until the next `checkpoint` that names it or `close`; None when there is none or no use for it."""

    def checkpoint(self, tokens: Sequence[int], kind: str = "", slot: int | None = None) -> None:
        """The sequence stands at exactly `len(tokens)` tokens: keep pages and state up to there for others.

        Call it after every prefill chunk with `kind` "": a position that was not planned costs nothing. During decode, name
        the `kind` ("tool_call", "thinking") to ask for a checkpoint that was not planned. `slot`: the spare one, if the state at
        that point is there and the sequence went on.
        """

    def close(self, tokens: Sequence[int], reason: str) -> None:
        """The sequence ended with exactly `tokens` computed (a sampled token that was never fed is not among them).

        Keeps what is worth keeping unless `reason` is "error", releases the rest. Idempotent.
        """


class PrefixCache(Protocol):
    def open(
        self,
        tokens: Sequence[int],
        *,
        session: str,
        anchors: Sequence[Anchor],
        reuse: bool = True,
        background: bool = False,
        most: int | None = None,
    ) -> Lease:
        """Match `tokens` and pin the deepest usable prefix, at most `len(tokens) - 1` (one token must be computed for logits).

        The slot holds the state at `match.common` (zeros at 0) on return. `reuse=False` neither matches nor keeps anything.
        `background`: work of our own, which does not count as use of what it matches.
        `most`: tokens the lease's spelling may have (None: any number); a longer one leaves less room for the answer.
        Raises OutOfPages when no state slot, or no page for the copied tail, is free.
        """

    def status(self) -> dict[str, object]:
        """Capacity, use and counters by tier, for `GET /v1/cache/status`."""

    def tick(self) -> bool:
        """Housekeeping between steps; cheap. True while something is still being written: call again within a second."""

    def flush(self, tier: str = "all") -> dict[str, int]:
        """Forget what no running sequence holds: `tier` ram, disk or all. Returns what went. Raises ValueError."""

    def delete_session(self, session: str) -> dict[str, int]:
        """Forget what only `session` used, in every tier; text it shares with others stays. Returns what went."""

    def resize(
        self,
        *,
        state_bytes: int | None = None,
        disk_bytes: int | None = None,
        pages: int | None = None,
        slots: int | None = None,
    ) -> None:
        """Change budgets; what no longer fits goes at once. `pages` and `slots` up to those the tensors have room for.

        Raises OutOfPages, with `pages` and `slots` as they were, when running sequences hold too many of them.
        """

    def shutdown(self) -> None:
        """Flush what is worth flushing; called once."""


class Storage(Protocol):
    """What the cache needs from whoever holds the tensors. `page` tokens a page; sizes in bytes over all layers."""

    page: int
    page_bytes: int
    row_bytes: int  # of one token's rows, as written to disk
    state_bytes: int  # of one blob; 0 for models without recurrent layers

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every attention layer."""

    def save(self, slot: int) -> object:
        """A copy of the slot's state."""

    def load(self, blob: object, slot: int) -> None:
        """Overwrite the slot's state with a copy of `blob`."""

    def clear(self, slot: int) -> None:
        """Zero the slot's state: the state before the first token."""

    def give_back(self, pages: Sequence[int]) -> None:
        """Return the memory of `pages` to the system; their rows are gone. They may be written again at any time."""

    def give_back_slots(self, slots: Sequence[int]) -> None:
        """The same for state slots."""

    def read_rows(self, pages: Sequence[int], start: int, count: int) -> list[memoryview]:
        """Bytes of rows [start, start + count) of the run of `pages`, one buffer per layer tensor. Thread-safe for held pages."""

    def write_rows(self, pages: Sequence[int], start: int, count: int, data: memoryview, skip: int) -> None:
        """Inverse of `read_rows`, from its buffers in one piece; they hold `skip` rows before the wanted, maybe more behind."""

    def pack(self, blob: object) -> list[memoryview]:
        """Bytes of a saved state, `state_bytes` in total."""

    def unpack(self, data: memoryview) -> object:
        """Inverse of `pack`."""
