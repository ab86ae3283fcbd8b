"""Driving a `Decoder` by hand: sequences with scattered pages, fed in any chunks, alone or together."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from engine.experts.recording import Recording
from engine.kernels.ops import Segments
from engine.nn.batch import PAGE, Batch, allocate_cache
from engine.nn.decoder import Decoder
from engine.tensors import CPU


class Driver:
    """Owns a cache and hands every sequence pages in shuffled order, as a real scheduler would after some churn."""

    def __init__(
        self,
        decoder: Decoder,
        kv_dtype: torch.dtype,
        sequences: int = 4,
        tokens: int = 256,
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.decoder = decoder
        per_sequence = -(-tokens // PAGE)
        free = list(range(1, 1 + sequences * per_sequence))
        random.Random(seed).shuffle(free)
        self.pages = torch.tensor(free, dtype=torch.int32).view(sequences, per_sequence)
        self.slots = torch.randperm(sequences, generator=torch.Generator().manual_seed(seed)).int()
        self.cache = allocate_cache(decoder.spec, 1 + len(free), sequences, kv_dtype, device)
        self.lengths = [0] * sequences

    def step(self, work: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Feed each sequence its next tokens in one forward; returns logits [tokens, V] of each."""
        who = list(work)
        counts = [len(work[s]) for s in who]
        cu = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
        start = torch.tensor([self.lengths[s] for s in who], dtype=torch.int32)
        positions = torch.cat([torch.arange(self.lengths[s], self.lengths[s] + len(work[s])) for s in who]).int()
        pages = torch.full((len(who), self.pages.shape[1]), -1, dtype=torch.int32)
        for i, s in enumerate(who):
            held = -(-(self.lengths[s] + counts[i]) // PAGE)
            pages[i, :held] = self.pages[s, :held]
            self.lengths[s] += counts[i]
        segments = Segments(cu, start, pages, self.slots[who].contiguous())
        tokens = torch.tensor([t for s in who for t in work[s]], dtype=torch.int32)
        logits = self.decoder.forward(
            Batch(tokens, positions, segments, torch.arange(len(tokens), dtype=torch.int32)), self.cache
        )
        return dict(zip(who, logits.split(counts), strict=True))

    def chunks(self, sequence: int, tokens: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Feed one sequence chunk by chunk (the last size repeats) -> logits of all tokens."""
        out, at, sizes = [], 0, list(sizes)
        while at < len(tokens):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            out.append(self.step({sequence: tokens[at : at + size]})[sequence])
            at += size
        return torch.cat(out)


def across_a_recording(driver: Driver, recording: Recording, ids: list[int]) -> torch.Tensor:
    """Logits of nine tokens in three steps; what the router chooses in the second is recorded."""
    got = [driver.step({0: ids[:3]})[0]]
    recording.start()
    got.append(driver.step({0: ids[3:6]})[0])
    assert recording.progress()["tokens"] == 3
    recording.stop()
    got.append(driver.step({0: ids[6:]})[0])
    return torch.cat(got)
