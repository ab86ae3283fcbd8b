"""What may look into an answer on its way to the client: the joint for tool checks, thinking verification, usage stripping.

A filter factory is `(turn, answer) -> AnswerFilter | None`; None means this turn has nothing to look for. The factories stand
in `pipeline.FILTERS` in the order the answer passes them. When no filter `wants` a block and the dialect is a pass-through,
the block goes out as the bytes it came in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gateway.answer import Answer
from gateway.errors import Refusal
from gateway.sse import Chunk
from gateway.turn import Decision, Turn


class Again(Exception):
    """Raised by a filter to have the upstream asked once more: its request is cancelled, `decisions` change the body.

    Only sensible while the client has not yet seen what would come twice; the filter that raises it knows that, and counts its
    own retries. `otherwise` is what the client is told when the pipeline's bound on retries is reached.
    """

    def __init__(self, otherwise: Refusal, *decisions: Decision) -> None:
        super().__init__(otherwise.message)
        self.otherwise = otherwise
        self.decisions = decisions


class AnswerFilter(Protocol):
    """One look at one answer. Every method may raise Refusal (the answer ends in an error) or Again.

    What a filter does or finds it notes with `answer.decide(Decision(...))`. Chunks are never changed in place.
    """

    def wants(self, block: bytes) -> bool:
        """May this block of raw events concern the filter? Called for every block: a byte search, nothing more.

        A filter that holds chunks back says True until it has let them go, so that order is kept.
        """
        ...

    def feed(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """The chunks that go on now. `[DONE]` is never among them. Also called when a filter before this one wanted the block."""
        ...

    def finish(self) -> Sequence[Chunk]:
        """The stream ended properly: what was held back. `answer` has seen the whole stream by now."""
        ...

    def whole(self, data: dict[str, Any]) -> dict[str, Any]:
        """A non-streamed answer: the same object when nothing changes, else a new one."""
        ...

    def restart(self) -> None:
        """Some filter raised Again: a fresh answer begins; the client has seen what went on before."""
        ...


FilterFactory = Callable[[Turn, Answer], AnswerFilter | None]


class UsageFilter:
    """Keeps the usage chunk from streaming clients that did not ask for it; the record has it anyway."""

    def wants(self, block: bytes) -> bool:
        return b'"usage"' in block

    def feed(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        out = []
        for chunk in chunks:
            if chunk.raw and b'"usage"' not in chunk.raw:
                out.append(chunk)
                continue
            data = chunk.data
            if data is None or "usage" not in data:
                out.append(chunk)
            elif data.get("choices"):
                out.append(Chunk.of({k: v for k, v in data.items() if k != "usage"}))
        return out

    def finish(self) -> Sequence[Chunk]:
        return ()

    def whole(self, data: dict[str, Any]) -> dict[str, Any]:
        return data

    def restart(self) -> None:
        pass


def usage(turn: Turn, answer: Answer) -> UsageFilter | None:
    return None if turn.wants_usage else UsageFilter()
