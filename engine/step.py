"""What passes between the scheduler, which decides a step, and the runner, which computes it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from engine.ipc import RequestError, TokenLogprob
from engine.sequence import Sequence


@dataclass(frozen=True)
class Kept:
    """Where the recurrent state of a sequence at `tokens[:offset]` is left when a chunk goes on behind it."""

    offset: int
    slot: int


class Chunk(NamedTuple):
    """Rows `tokens[start:end]` of one sequence in one step; `sample` when the last of them predicts a new token."""

    seq: Sequence
    start: int
    end: int
    sample: bool
    kept: Kept | None = None

    @property
    def echo(self) -> range:
        return self.seq.echo_rows(self.start, self.end)


Step = tuple[Chunk, ...]


class Outcome(NamedTuple):
    """What the runner computed for one chunk. `error` means this sequence alone failed."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    echo: Seq[TokenLogprob] = ()
    error: RequestError | None = None
