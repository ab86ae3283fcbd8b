"""Routing traces: which experts each layer of each step asked for. Recording, the file, and synthetic traces.

The file is a NumPy `.npz` (no pickles): `step`, `layer`, `rows` int32 [N] of N layer calls in order, `ids` uint16
[sum(rows), k], and `shape` int64 [layers, experts, k].
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.lean import torch

MAX_BYTES = 64 << 20  # of ids a recorder holds: 80K tokens of a model with 48 layers and 8 experts a token
MOST = 1 << 16  # layers, and experts of one: their numbers have 16 bits
FIELDS = ("step", "layer", "rows", "ids", "shape")


class TraceError(ValueError):
    """A file that is no trace, or a trace of another model. One line for the user."""


@dataclass(frozen=True)
class Trace:
    """Layer calls in the order they ran. `layers` counts the layers that have experts, numbered from 0."""

    layers: int
    experts: int
    step: NDArray[np.int32]
    layer: NDArray[np.int32]
    rows: NDArray[np.int32]
    ids: NDArray[np.uint16]  # [sum(rows), k]

    @property
    def keys(self) -> int:
        return self.layers * self.experts

    @property
    def tokens(self) -> int:
        """Rows of the first layer: the last one computes only rows whose logits are wanted."""
        return int(self.rows[self.layer == 0].sum())

    def calls(self) -> Iterator[list[int]]:
        """The distinct keys `layer * experts + expert` of each layer call."""
        ends = np.cumsum(self.rows)
        for layer, end, rows in zip(self.layer.tolist(), ends.tolist(), self.rows.tolist(), strict=True):
            yield (np.unique(self.ids[end - rows : end]).astype(np.int64) + layer * self.experts).tolist()

    def decode_only(self, most: int = 8) -> Trace:
        """The steps of at most `most` rows: single tokens, or a small batch of them."""
        largest = np.zeros(int(self.step.max(initial=-1)) + 1, np.int32)
        np.maximum.at(largest, self.step, self.rows)
        keep = largest[self.step] <= most
        return Trace(
            self.layers, self.experts, self.step[keep], self.layer[keep], self.rows[keep], self.ids[np.repeat(keep, self.rows)]
        )

    def to_bytes(self) -> bytes:
        out = io.BytesIO()
        shape = np.array([self.layers, self.experts, self.ids.shape[1]], np.int64)
        np.savez_compressed(out, step=self.step, layer=self.layer, rows=self.rows, ids=self.ids, shape=shape)
        return out.getvalue()


def load_trace(path: str | Path) -> Trace:
    """Raises TraceError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            step, layer, rows, ids, shape = (file[name] for name in FIELDS)
        layers, experts, k = (int(n) for n in shape)
    except OSError as problem:
        why = problem.strerror or problem
        raise TraceError(f"{path} cannot be read ({why}); record one with `moorage engine experts trace`") from problem
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise TraceError(f"{path} is no routing trace; record one with `moorage engine experts trace`") from problem
    if not _is_sound(layers, experts, k, step, layer, rows, ids):
        raise TraceError(f"{path} is a damaged routing trace: its parts do not belong together; record it again")
    return Trace(layers, experts, step, layer, rows, ids)


def _is_sound(layers: int, experts: int, k: int, step: NDArray, layer: NDArray, rows: NDArray, ids: NDArray) -> bool:
    """Whether these are whole numbers that go together."""
    calls = (step, layer, rows)
    if any(part.ndim != 1 or part.dtype.kind not in "iu" or len(part) != len(step) for part in calls):
        return False
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not (0 < layers <= MOST and 0 < experts <= MOST):
        return False
    within = all(not part.size or (part.min() >= 0 and part.max() < most) for part, most in ((layer, layers), (ids, experts)))
    counted = bool((rows >= 0).all()) and ids.shape == (int(rows.sum(dtype=np.int64)), k)
    return within and counted and bool((np.diff(step, prepend=0) >= 0).all()) and not (step >= max(1, len(step))).any()


class Recorder:
    """Collects layer calls until `limit` bytes of ids are held; then it stops and says so with `full`."""

    def __init__(self, layers: int, experts: int, limit: int = MAX_BYTES) -> None:
        self._layers, self._experts, self._limit = layers, experts, limit
        self._calls: list[tuple[int, int, NDArray[np.uint16]]] = []  # step, layer, ids
        self._step, self._bytes, self.tokens, self.full = -1, 0, 0, False

    def add(self, layer: int, ids: torch.Tensor) -> None:
        """ids int32 [T, k] of one layer call. A step begins with its lowest layer."""
        if layer == 0 and self._bytes + self._layers * ids.numel() * 2 > self._limit:
            self.full = True
        if self.full or (layer and self._step < 0):  # began in the middle of a step
            return
        if layer == 0:
            self._step += 1
            self.tokens += len(ids)
        self._calls.append((self._step, layer, ids.numpy().astype(np.uint16)))
        self._bytes += ids.numel() * 2

    def trace(self) -> Trace:
        k = self._calls[0][2].shape[1] if self._calls else 0
        steps, layers, ids = zip(*self._calls, strict=True) if self._calls else ((), (), ())
        rows = np.array([len(i) for i in ids], np.int32)
        flat = np.concatenate(ids) if ids else np.zeros((0, k), np.uint16)
        return Trace(self._layers, self._experts, np.array(steps, np.int32), np.array(layers, np.int32), rows, flat)


# --- locality: measured on a trace, and made to order


@dataclass(frozen=True)
class Locality:
    """How predictable single-token steps are.

    `repeat`: share of a token's experts that the token before also used; `skew`: share of all uses that go to the most used
    tenth of a layer's experts (0.1 = even); `drift`: total variation distance between the use counts of a layer in the first and
    the second half of the trace, beyond what two draws of such a length from one distribution differ by.
    """

    repeat: float
    skew: float
    drift: float


def measure_locality(trace: Trace, seed: int = 0) -> Locality:
    single = trace.decode_only(1)
    repeats, skews, drifts = [], [], []
    rng = np.random.default_rng(seed)
    for layer in range(trace.layers):
        ids = single.ids[np.repeat(single.layer == layer, single.rows)]  # [tokens, k]
        if len(ids) < 2:
            continue
        repeats.append((ids[1:, :, None] == ids[:-1, None, :]).any(-1).mean())
        uses = np.bincount(ids.ravel(), minlength=trace.experts)
        top = max(1, round(trace.experts / 10))
        skews.append(np.sort(uses)[-top:].sum() / uses.sum())
        halves = np.array_split(ids, 2)
        mixed = np.array_split(rng.permutation(ids), 2)
        drifts.append(max(0.0, _distance(*halves, trace.experts) - _distance(*mixed, trace.experts)))
    if not repeats:
        raise TraceError("the trace has no two steps of a single token: record while one request is answered")
    return Locality(*(float(np.mean(v)) for v in (repeats, skews, drifts)))


def _distance(a: NDArray, b: NDArray, experts: int) -> float:
    p, q = (np.bincount(x.ravel(), minlength=experts) / x.size for x in (a, b))
    return float(np.abs(p - q).sum() / 2)


def synthesize(
    layers: int, experts: int, k: int, tokens: int, *, zipf: float, stick: float, topic: int = 0, seed: int = 0
) -> Trace:
    """Single-token steps. Each of a token's k experts is the one of the token before with chance `stick`, else drawn from the
    layer's popularity, proportional to 1 / rank ** `zipf` in an order that is drawn anew every `topic` tokens (0: never).
    """
    rng = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, experts + 1) ** zipf
    orders = np.stack([rng.permutation(experts) for _ in range(layers)])
    ids = np.zeros((tokens, layers, k), np.uint16)
    for t in range(tokens):
        if topic and t and t % topic == 0:
            orders = np.stack([rng.permutation(experts) for _ in range(layers)])
        for layer in range(layers):
            kept = ids[t - 1, layer][rng.random(k) < stick] if t else []
            # k draws without repetition: the k largest of weight-scaled exponential races
            race = rng.exponential(size=experts) / weight
            race[np.argsort(orders[layer])[kept]] = -1.0
            ids[t, layer] = orders[layer][np.argpartition(race, k - 1)[:k]]
    step = np.repeat(np.arange(tokens, dtype=np.int32), layers)
    layer = np.tile(np.arange(layers, dtype=np.int32), tokens)
    return Trace(layers, experts, step, layer, np.ones(tokens * layers, np.int32), ids.reshape(-1, k))
