"""Rotary position tables (Su et al. 2021, arXiv 2104.09864) and their context-extension scalings."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.lean import torch
from engine.models.spec import RopeSpec
from engine.tensors import CPU, Library

Floats = NDArray[np.float32]
FIRST_ROWS = 4096  # positions computed before any is asked for; longer contexts double it, so it is rebuilt a few times at most


class RopeTable:
    """cos and sin of every position so far, grown on demand.

    The angle is the float32 product position * frequency, as every trainer and engine computes it; cos and sin are then
    taken in float64, so a row does not depend on how long the table is. All of it by numpy, whichever library the tensors are of.
    """

    def __init__(self, spec: RopeSpec, device: object = CPU, library: Library = torch) -> None:
        self._spec, self._device, self._library = spec, device, library
        self._frequencies = inverse_frequencies(spec)
        self._grow(FIRST_ROWS)

    def at(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int32 [T], all below `end` -> cos, sin [T, dim/2]."""
        self.upto(end)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    @property
    def rows(self) -> int:
        """Positions it holds by now."""
        return len(self._cos)

    def upto(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of all positions below `end`, and of some behind."""
        if end > len(self._cos):
            self._grow(max(end, 2 * len(self._cos)))
        return self._cos, self._sin

    def _grow(self, rows: int) -> None:
        angles = (np.arange(rows, dtype=np.float32)[:, None] * self._frequencies).astype(np.float64)
        self._cos, self._sin = (self._placed(turn(angles) * self._spec.attention_factor) for turn in (np.cos, np.sin))

    def _placed(self, values: NDArray[np.float64]) -> torch.Tensor:
        table = self._library.from_numpy(values.astype(np.float32))
        return table if self._device.type == "cpu" else table.to(self._device)


def inverse_frequencies(spec: RopeSpec) -> Floats:
    """theta^(-2i/dim), float32 [dim/2], rescaled as `spec.scaling` says. The power is taken in float64, so that it is the nearest
    float32 on every machine; float32 powers differ from library to library in the last bit.
    """
    exponent = np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)
    power = np.power(np.float64(spec.theta), exponent.astype(np.float64))
    plain = np.float32(1.0) / power.astype(np.float32)
    if spec.divisors:
        return plain / np.array(spec.divisors, np.float32)
    if spec.scaling == "linear":  # position interpolation, arXiv 2306.15595
        return plain / spec.factor
    if spec.scaling == "llama3":
        return _llama3(plain, spec)
    if spec.scaling == "yarn":
        return _yarn(plain, spec)
    return plain


def _llama3(plain: Floats, spec: RopeSpec) -> Floats:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between are blended."""
    turns = spec.original_max * plain / (2 * math.pi)  # rotations within the original context
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clip(0.0, 1.0)
    return (1 - keep) * plain / spec.factor + keep * plain


def _yarn(plain: Floats, spec: RopeSpec) -> Floats:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), section 3.2: a ramp between interpolated and kept dimensions."""

    def dimension(turns: float) -> float:
        """The (fractional) dimension that makes this many rotations within the original context."""
        return spec.dim * math.log(spec.original_max / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    span = high - low if high != low else 0.001  # the paper's ramp is undefined there; the reference code widens it so
    interpolate = ((np.arange(spec.dim // 2, dtype=np.float32) - low) / span).clip(0.0, 1.0)
    return plain / spec.factor * interpolate + plain * (1 - interpolate)
