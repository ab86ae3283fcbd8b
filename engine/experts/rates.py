"""Rates that follow the running engine: what was calibrated, corrected slowly by what branches really took."""

from __future__ import annotations

from dataclasses import asdict, replace

from engine.experts.split import Rates

SLOWLY = 0.02  # of each observation: one busy second moves a rate by a few percent, a minute wins


class Watched:
    def __init__(self, calibrated: Rates) -> None:
        self.calibrated = self.now = calibrated
        self.observations = 0

    def observe(self, host_bytes: int, host_s: float, link_bytes: int, link_s: float, overlapped: bool) -> None:
        """One layer's branches: bytes and seconds of each; `overlapped` when the link ran while the processor computed."""
        now = self.now
        if host_bytes and host_s > 0:
            rate = host_bytes / host_s
            if not overlapped:
                now = replace(now, host=now.host + SLOWLY * (rate - now.host))
            elif link_s >= host_s / 2:  # else most of it ran alone and says little about either
                now = replace(now, shared=now.shared + SLOWLY * (rate - now.shared))
        if link_bytes and link_s > 0:
            now = replace(now, link=now.link + SLOWLY * (link_bytes / link_s - now.link))
        self.now = now
        self.observations += 1

    def status(self) -> dict[str, object]:
        return {"calibrated": asdict(self.calibrated), "now": asdict(self.now), "observations": self.observations}
