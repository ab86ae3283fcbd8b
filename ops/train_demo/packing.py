"""Rows of fixed length filled with whole dialogues, endlessly, from one seed per process."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from .agents import agent_dialogue
from .copying import copy_example
from .dialogues import EARLY, LONG, MAIN, Mix, make_dialogue, make_drill
from .text import Encoder

NOISE = 0.3  # share of names made of random letters
CHARS_PER_TOKEN = 2.6  # of filler, measured; a longer dialogue is made anew, shorter
TAIL = 2048  # tokens of a very long dialogue that are learned from
GAP = 3  # padding after a dialogue: the reach of the convolution


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor  # [B, T]
    doc: torch.Tensor  # [B, T], -1 = padding
    target: torch.Tensor  # [B, T] next token, -100 where the assistant does not speak next
    read: int = 0  # tokens at the row's beginning that are read without gradients


def pick_mix(rng: random.Random, progress: float) -> Mix:
    """Dense copying first, then the real mix, and longer prompts towards the end."""
    if progress < 0.2:
        return EARLY
    roll = rng.random()
    if progress > 0.7:
        return LONG if roll < 0.12 else EARLY if roll < 0.25 else MAIN
    return LONG if roll < 0.03 else EARLY if roll < 0.35 else MAIN


def copy_share(progress: float) -> float:
    """Share of rows that only teach copying."""
    return 0.3 if progress < 0.06 else 0.06


def drill_share(progress: float) -> float:
    """Share of dialogues that practise one hard skill."""
    return 0.0 if progress < 0.3 else 0.4


class Packer:
    def __init__(self, enc: Encoder, seed: int, rows: int, length: int, held_out: bool = False):
        self.enc, self.rng = enc, random.Random(seed)
        self.rows, self.length, self.held_out = rows, length, held_out
        self.separators = tuple(enc.tok.encode(s, add_special_tokens=False).ids[0] for s in ("\n", "`", '"', " "))
        self.waiting: list[tuple[list[int], list[int]]] = []

    def example(self, progress: float) -> tuple[list[int], list[int]]:
        while True:
            noise = 0.0 if self.held_out else NOISE
            if not self.held_out and self.rng.random() < drill_share(progress):
                dialogue = make_drill(self.rng, noise)
            else:
                dialogue = make_dialogue(self.rng, pick_mix(self.rng, progress), self.held_out, noise=noise)
            ids, mask = self.enc.example(dialogue)
            if len(ids) + GAP <= self.length:
                return ids, mask

    def row(self, progress: float) -> list[tuple[list[int], list[int]]]:
        """First fit from a small pool, longest first, so that rows end nearly full."""
        if self.rng.random() < copy_share(progress) and not self.held_out:
            return self.copy_row()
        self.refill(progress)
        return self.filled([self.waiting.pop(0)], self.length)

    def refill(self, progress: float) -> None:
        while len(self.waiting) < 24:
            self.waiting.append(self.example(progress))

    def filled(self, chosen: list[tuple[list[int], list[int]]], length: int) -> list[tuple[list[int], list[int]]]:
        room = length - len(chosen[0][0]) - GAP
        while True:
            fits = [i for i, (ids, _) in enumerate(self.waiting) if len(ids) + GAP <= room]
            if not fits:
                return chosen
            best = max(fits, key=lambda i: len(self.waiting[i][0]))
            chosen.append(self.waiting.pop(best))
            room -= len(chosen[-1][0]) + GAP

    def long_row(self, length: int, progress: float) -> list[tuple[list[int], list[int]]]:
        """One dialogue of an agent that fills most of the row, short ones behind it."""
        self.refill(progress)
        return self.filled([self.long_example(length)], length)

    def long_example(self, length: int) -> tuple[list[int], list[int]]:
        size = int(length * self.rng.uniform(0.4, 1) * CHARS_PER_TOKEN)
        while True:
            noise = 0.0 if self.held_out else NOISE
            ids, mask = self.enc.example(agent_dialogue(self.rng, size, self.held_out, noise))
            if len(ids) + GAP <= length:
                return ids, mask
            size = int(size * 0.9)

    def far_batch(self, length: int) -> Batch:
        """One very long dialogue alone in its row; only its last TAIL tokens are learned from."""
        batch = packed([[self.long_example(length)]], length)
        count = int((batch.doc >= 0).sum())
        start = max(0, count - TAIL)
        target = batch.target[:, :count].clone()
        target[:, :start] = -100
        return Batch(batch.ids[:, :count], batch.doc[:, :count], target, start)

    def copy_row(self) -> list[tuple[list[int], list[int]]]:
        chosen, room = [], self.length
        while True:
            ids, mask = copy_example(self.rng, self.separators)
            if len(ids) + GAP > room:
                return chosen
            chosen.append((ids, mask))
            room -= len(ids) + GAP

    def batch(self, progress: float) -> Batch:
        return packed([self.row(progress) for _ in range(self.rows)], self.length)

    def long_batch(self, length: int, progress: float) -> Batch:
        return packed([self.long_row(length, progress)], length)


def packed(rows: list[list[tuple[list[int], list[int]]]], length: int) -> Batch:
    shape = (len(rows), length)
    ids, doc, target = torch.zeros(shape, dtype=torch.long), torch.full(shape, -1), torch.full(shape, -100)
    for r, row in enumerate(rows):
        at = 0
        for number, (tokens, mask) in enumerate(row):
            n = len(tokens)
            t, m = torch.tensor(tokens), torch.tensor(mask, dtype=torch.bool)
            ids[r, at : at + n], doc[r, at : at + n] = t, number
            target[r, at : at + n - 1] = torch.where(m[1:], t[1:], -100)
            at += n + GAP
    return Batch(ids, doc, target)
