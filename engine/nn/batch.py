"""What one forward step consumes: `Batch` (rows of several sequences) and `Cache` (the tensors their past lives in)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.hostmem import lazy
from engine.kernels.ops import KVLayer, Segments, StateLayer
from engine.models.spec import AttentionSpec, DeltaNetSpec, LatentSpec, ModelSpec
from engine.numa import interleave

HOST = torch.device("cpu")
PAGE = 64  # tokens a KV page holds: small enough that a copied tail is cheap, large enough that tables stay short


@dataclass(frozen=True)
class Batch:
    """T rows. tokens, positions int32 [T]; `logit_rows` int32 [R] names the rows whose logits are wanted."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: Segments
    logit_rows: torch.Tensor

    def on(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        seg = self.segments
        moved = Segments(*(part.to(device) for part in (seg.cu, seg.start, seg.pages, seg.slot)), seg.kept)
        return Batch(self.tokens.to(device), self.positions.to(device), moved, self.logit_rows.to(device))


@dataclass(frozen=True)
class Cache:
    """One entry per layer; None where the layer has no such cache."""

    kv: tuple[KVLayer | None, ...]
    states: tuple[StateLayer | None, ...]


def allocate_cache(spec: ModelSpec, pages: int, slots: int, kv_dtype: torch.dtype, device: torch.device = HOST) -> Cache:
    """Zeroed cache tensors with room for `pages` KV pages and `slots` recurrent states. Raises MemoryError.

    What was never written takes no memory of the host: there may be room for more pages than the machine holds.
    """
    kv: list[KVLayer | None] = []
    states: list[StateLayer | None] = []
    for layer in spec.layers:
        mixer = layer.mixer
        kv.append(None)
        states.append(None)
        if isinstance(mixer, AttentionSpec):
            shape = (pages, mixer.kv_heads, PAGE, mixer.head_dim)
            kv[-1] = KVLayer(_zeros(shape, kv_dtype, device), _zeros(shape, kv_dtype, device))
        elif isinstance(mixer, LatentSpec):
            kv[-1] = KVLayer(_zeros((pages, 1, PAGE, mixer.row), kv_dtype, device), None)
        elif isinstance(mixer, DeltaNetSpec):
            conv = _zeros((slots, mixer.conv_channels, mixer.conv_kernel - 1), torch.float32, device)
            states[-1] = StateLayer(
                conv, _zeros((slots, mixer.value_heads, mixer.key_dim, mixer.value_dim), torch.float32, device)
            )
    return Cache(tuple(kv), tuple(states))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As torch.zeros, which writes them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    data = torch.frombuffer(lazy(size), dtype=torch.uint8)[:size]
    interleave(data.data_ptr(), size)
    return data.view(dtype).view(shape)
