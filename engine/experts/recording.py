"""Recording the routing of a running engine: a layer around any executor, and its commands."""

from __future__ import annotations

import base64

from engine.experts.trace import MAX_BYTES, Recorder
from engine.lean import torch
from engine.nn.experts import Bank, Experts


class Recording:
    """Passes everything to `inner`; while a recording runs, keeps the ids of every layer call."""

    def __init__(self, inner: Experts, layers: int, experts: int) -> None:
        self.inner = inner
        self._layers, self._experts = layers, experts
        self._recorder: Recorder | None = None
        self._in_place = getattr(inner, "in_place", None)

    def in_place(self, layer: int) -> Bank | None:
        """As `inner`'s; nobody may compute unasked while a recording runs."""
        return self._in_place(layer) if self._in_place and self._recorder is None else None

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._recorder is not None:
            self._recorder.add(layer, ids.cpu())
        return self.inner.run(layer, x, ids, weights)

    def start(self) -> dict[str, object]:
        """Begin anew; what an earlier recording held is dropped."""
        self._recorder = Recorder(self._layers, self._experts)
        return self.progress()

    def progress(self) -> dict[str, object]:
        recorder = self._recorder
        if recorder is None:
            return {"recording": False}
        return {"recording": True, "tokens": recorder.tokens, "full": recorder.full, "limit_bytes": MAX_BYTES}

    def stop(self) -> dict[str, object]:
        """End the recording and hand it over: `trace` is the file of `engine.experts.trace`, base64."""
        if self._recorder is None:
            return {"recording": False}
        recorder, self._recorder = self._recorder, None
        data = base64.b64encode(recorder.trace().to_bytes()).decode()
        return {"recording": False, "tokens": recorder.tokens, "full": recorder.full, "trace": data}
