"""How many prompt tokens one step may compute: all that fill the kernels, fewer while answers are streaming beside them."""

from __future__ import annotations

STALL_S = 0.5  # the longest pause between two tokens of a running answer that another's long prompt may cause
LEAST = 32  # prompt tokens a step computes even then: below, a step costs about as much as for one token
MEASURABLE = 16  # a step with fewer prompt tokens says nothing about the rate
SMOOTHING = 0.3  # weight of the newest step


class Pace:
    """The chunk budget, from the measured time of earlier steps."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._rate = 0.0  # prompt tokens per second of whole steps

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """A step that computed `prompt_tokens` prompt tokens took `seconds`."""
        if prompt_tokens >= MEASURABLE and seconds > 0.0:
            rate = prompt_tokens / seconds
            self._rate = rate if not self._rate else (1 - SMOOTHING) * self._rate + SMOOTHING * rate

    def budget(self, streams: bool) -> int:
        """Prompt tokens for the next step; `streams` when answers are being decoded in it."""
        if not streams or not self._rate:
            return self._largest
        return min(self._largest, max(LEAST, int(self._rate * STALL_S)))
