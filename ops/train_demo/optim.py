"""Muon for the matrices, Adam for the rest, split over the training processes.

Parameters live in shared memory. Each process owns some of them: it averages everybody's gradients for those, steps them in
place, and keeps only their state. Two processes of one thread each beat one process of two threads by far on a busy machine,
where every parallel loop waits for whichever thread was descheduled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MUON_LR = 0.02
ADAM_LR = 4e-3
NS_STEPS = 5


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat gradient buffer, who owns it and how it is stepped."""

    name: str
    start: int
    size: int
    owner: int
    muon: bool


def wants_muon(name: str, p: torch.Tensor) -> bool:
    small = ("embed_tokens", "conv1d", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b")
    return p.dim() >= 2 and not any(part in name for part in small)


def plan(named: list[tuple[str, torch.Tensor]], world: int) -> list[Slot]:
    """Slots in parameter order; the largest parameters are dealt out first so that owners carry like loads."""
    load, owner = [0] * world, {}
    for name, p in sorted(named, key=lambda item: (-item[1].numel(), item[0])):
        owner[name] = load.index(min(load))
        load[owner[name]] += p.numel() * (4 if wants_muon(name, p) else 1)
    slots, start = [], 0
    for name, p in named:
        slots.append(Slot(name, start, p.numel(), owner[name], wants_muon(name, p)))
        start += p.numel()
    return slots


def orthogonalize(m: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz (quintic) towards the nearest orthogonal matrix, batched, bf16."""
    x = m.flatten(0, -3) if m.dim() > 3 else m.unsqueeze(0) if m.dim() == 2 else m
    tall = x.shape[-2] > x.shape[-1]
    x = (x.transpose(-1, -2) if tall else x).to(torch.bfloat16).contiguous()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(NS_STEPS):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    x = x.transpose(-1, -2) if tall else x
    return x.float().view_as(m) * max(1.0, m.shape[-2] / m.shape[-1]) ** 0.5


class SharedOptimizer:
    def __init__(self, named: list[tuple[str, torch.Tensor]], grads: list[torch.Tensor], rank: int):
        self.params, self.grads, self.rank = dict(named), grads, rank
        self.slots = plan(named, len(grads))
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.steps = 0

    def publish(self) -> None:
        """Copy this process's gradients where the others can read them."""
        for slot in self.slots:
            grad = self.params[slot.name].grad
            target = self.grads[self.rank][slot.start : slot.start + slot.size]
            target.zero_() if grad is None else target.copy_(grad.flatten())
            self.params[slot.name].grad = None

    @torch.no_grad()
    def step(self, scale: float) -> None:
        self.steps += 1
        for slot in self.slots:
            if slot.owner == self.rank:
                p = self.params[slot.name]
                grad = sum(g[slot.start : slot.start + slot.size] for g in self.grads).view_as(p) / len(self.grads)
                (self.muon if slot.muon else self.adam)(slot.name, p, grad, scale)

    def muon(self, name: str, p: torch.Tensor, grad: torch.Tensor, scale: float) -> None:
        s = self.state.setdefault(name, {"m": torch.zeros_like(p)})
        s["m"].lerp_(grad, 0.05)
        p.mul_(1 - MUON_LR * scale * 0.01)
        p.add_(orthogonalize(grad.lerp(s["m"], 0.95)), alpha=-MUON_LR * scale)

    def adam(self, name: str, p: torch.Tensor, grad: torch.Tensor, scale: float) -> None:
        s = self.state.setdefault(name, {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": torch.zeros(1)})
        grad = grad / max(1.0, grad.norm().item())
        s["t"] += 1
        t = s["t"].item()
        s["m"].lerp_(grad, 0.1)
        s["v"].lerp_(grad.square(), 0.03)
        rate = ADAM_LR * scale * (1.0 if "embed" in name else 0.5)
        p.addcdiv_(s["m"] / (1 - 0.9**t), (s["v"] / (1 - 0.97**t)).sqrt() + 1e-8, value=-rate)
