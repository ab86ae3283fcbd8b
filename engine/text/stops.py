"""Stop strings in streamed text, across any cut. The stop string itself is not part of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.stream import Markers


class StopMatcher:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._markers = Markers(stops)
        self._held = ""
        self.matched = ""

    def feed(self, text: str) -> str:
        """Text that is safe to show. After a match `matched` is set and nothing comes out any more."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # The stop that is complete first ends the answer, also when a longer one began earlier: so did the token stream.
        ends = [(text.find(s) + len(s), s) for s in self._stops if s in text]
        if ends:
            _, self.matched = min(ends, key=lambda e: (e[0], -len(e[1])))
            self._held = ""
            return text[: text.find(self.matched)]
        hold = self._markers.held(text, 0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """The answer ended: what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held
