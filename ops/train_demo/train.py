"""Train the demo model for a given number of minutes on a few CPU processes; killed at any time, it resumes.

python -m ops.train_demo.train --out RUN_DIR --minutes 80
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from tokenizers import Tokenizer

from .export import write_checkpoint
from .init import init_weights
from .model import Model, Pack
from .optim import SharedOptimizer
from .packing import Batch, Packer
from .shape import Shape
from .tail import forward_tail, read
from .text import Encoder, train_tokenizer

BALANCE = 0.1  # weight of the router loss; at 0.01 the first layers fell onto four experts
WARMUP = 60  # steps
LONG_FROM, LONG_EVERY = 0.5, 4  # progress at which long rows join, and how many steps apart
LONG_ROWS = ((4096, False), (8192, True), (4096, False), (16384, True))  # tokens, and whether only the end is learned from
PAUSE = 40.0  # seconds; a longer step means that the process was stopped for somebody's measurement
START_AT = 0.8  # a run that goes on from a checkpoint starts here: the rate of the last stretch, the data of the end
LOG_EVERY, HELD_EVERY, HELD_SEED = 20, 100, 999
# One thread a process; and glibc keeps freed memory, else every large activation is paged in anew at every step.
CHILD_ENV = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Plan:
    out: Path
    minutes: float
    world: int
    rows: int
    length: int
    seed: int
    save_every: float
    compile: bool
    start: Path | None


def lr_scale(step: int, progress: float) -> float:
    """Warm up, stay, and from 55 % of the time fall linearly: bounded by the clock, not by steps."""
    return min(1.0, (step + 1) / WARMUP) * min(1.0, max(0.02, (1.0 - progress) / 0.45))


def batches(packer: Packer, step: int, progress: float) -> list[Batch]:
    """The batches of one step: short rows, and now and then a long one."""
    short = [packer.batch(progress)]
    if progress < LONG_FROM or step % LONG_EVERY:
        return short
    length, far = LONG_ROWS[step // LONG_EVERY % len(LONG_ROWS)]
    return short + [packer.far_batch(length) if far else packer.long_batch(length, progress)]


class VocabularyLoss(torch.autograd.Function):
    """Mean cross entropy through the tied output matrix; the gradient is formed at once, in the logits' own memory."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        narrow, table = hidden.to(torch.bfloat16), weight.to(torch.bfloat16)
        p = (narrow @ table.t()).float()
        top, best = p.max(-1, keepdim=True)
        p.sub_(top).exp_()
        mass = p.sum(-1, keepdim=True)
        p.div_(mass)
        index = target.unsqueeze(1)
        loss = -p.gather(1, index).clamp(min=1e-30).log().mean()
        p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
        slope = p.div_(target.shape[0]).to(torch.bfloat16)
        ctx.save_for_backward((slope @ table).to(hidden.dtype), (slope.t() @ narrow).to(weight.dtype))
        right = best.squeeze(1) == target
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx, grad: torch.Tensor, _):
        to_hidden, to_weight = ctx.saved_tensors
        return to_hidden * grad, to_weight * grad, None


def loss_of(model: Model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean cross entropy over the assistant's tokens, the balance loss, and where the prediction was right."""
    with torch.autocast("cpu", torch.bfloat16):
        if batch.read:
            past = read(model, batch.ids[:, : batch.read])
            hidden, load = forward_tail(model, batch.ids[:, batch.read :], past)
        else:
            hidden, load = model(batch.ids, Pack.of(batch.doc))
    wanted = batch.target[:, batch.read :].flatten()
    asked = (wanted >= 0).nonzero().squeeze(1)
    loss, right = VocabularyLoss.apply(
        hidden.flatten(0, 1).index_select(0, asked), model.model.embed_tokens.weight, wanted[asked]
    )
    return loss, load, right


def learn(model: Model, parts: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the gradients of one step, every asked token alike; returns the figures of the first part."""
    asked = [int((b.target >= 0).sum()) for b in parts]
    figures = []
    for batch, count in zip(parts, asked, strict=True):
        stance = "default" if batch is parts[0] else "force_eager"
        with torch.compiler.set_stance(stance):
            loss, load, right = loss_of(model, batch)
            ((loss + BALANCE * load) * (count / sum(asked))).backward()
        figures.append((loss.detach(), load.detach(), right))
    return figures[0]


def held_out_turns(model: Model, batch: Batch, enc: Encoder) -> dict:
    """Share of held-out assistant turns predicted right token by token, which is what greedy decoding would write.

    Gradients stay on: switching them off would make the compiler build every layer a second time.
    """
    loss, load, right = loss_of(model, batch)
    target = batch.target.flatten()
    asked = target >= 0
    end, call = enc.id["<|im_end|>"], enc.id["<tool_call>"]
    turns, current, is_call = {"call": [], "text": []}, True, False
    for token, ok in zip(target[asked].tolist(), right.tolist(), strict=True):
        current, is_call = current and ok, is_call or token == call
        if token == end:
            turns["call" if is_call else "text"].append(current)
            current, is_call = True, False
    share = {f"turn_{k}": round(sum(v) / max(1, len(v)), 4) for k, v in turns.items()}
    return {
        "held_loss": round(loss.item(), 4),
        "held_token": round(right.float().mean().item(), 4),
        "load": round(load.item(), 3),
    } | share


def save(plan: Plan, model: Model, tok: Tokenizer, meta: dict) -> None:
    write_checkpoint(plan.out / "latest", model.state_dict(), model.shape, tok)
    part = plan.out / "params.pt.part"
    torch.save({"model": model.state_dict(), "meta": meta}, part)
    part.rename(plan.out / "params.pt")


def save_state(plan: Plan, opt: SharedOptimizer, rank: int) -> None:
    part = plan.out / f"optim{rank}.pt.part"
    torch.save({"state": opt.state, "steps": opt.steps}, part)
    part.rename(plan.out / f"optim{rank}.pt")


class Recorder:
    """Means of the last steps, one JSON line each; what a person watches while it trains."""

    def __init__(self, path: Path):
        self.path, self.tokens = path, 0
        self.rows: list[tuple[float, float, float]] = []
        self.since = time.time()

    def add(self, loss: torch.Tensor, right: torch.Tensor, load: torch.Tensor, tokens: int) -> None:
        self.tokens += tokens
        self.rows.append((loss.item(), right.float().mean().item(), load.item()))

    def write(self, step: int, seconds: float, extra: dict) -> None:
        loss, token, load = (round(sum(x) / len(x), 4) for x in zip(*self.rows, strict=True))
        speed = self.tokens / (time.time() - self.since)
        row = {
            "step": step,
            "min": round(seconds / 60, 2),
            "loss": loss,
            "token": token,
            "load": load,
            "tok_s": round(speed),
        } | extra
        with self.path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        self.rows, self.tokens, self.since = [], 0, time.time()


def resume(plan: Plan, opt: SharedOptimizer, rank: int, step: int) -> None:
    path = plan.out / f"optim{rank}.pt"
    if step and path.exists():
        kept = torch.load(path)
        opt.state, opt.steps = kept["state"], kept["steps"]


def worker(rank: int, plan: Plan, model: Model, grads: list[torch.Tensor], clock: torch.Tensor, barrier, start: int) -> None:
    """One process: its own batches, its share of the optimizer. `clock` holds the seconds trained so far."""
    os.setsid()  # the kernel shares the CPU between sessions first: without this both processes count as one
    torch.set_num_threads(1)
    tok = Tokenizer.from_file(str(plan.out / "tokenizer.json"))
    enc, step = Encoder(tok), start
    opt = SharedOptimizer(list(model.named_parameters()), grads, rank)
    resume(plan, opt, rank, step)
    packer = Packer(enc, plan.seed * 1000 + step * 10 + rank, plan.rows, plan.length)
    held = Packer(enc, HELD_SEED, plan.rows, plan.length, held_out=True).batch(0.5)
    if plan.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    if rank:
        barrier.wait()  # the first process fills the compiler's cache
    record = Recorder(plan.out / "log.jsonl")
    last = saved = None
    while (progress := clock.item() / (plan.minutes * 60)) < 1:
        parts = batches(packer, step, progress)
        loss, load, right = learn(model, parts)
        opt.publish()
        if last is None:
            if rank == 0:
                barrier.wait()
            last = saved = time.time()  # compiling is not training time
        barrier.wait()
        opt.step(lr_scale(step, progress))
        step += 1
        record.add(loss, right, load, plan.world * sum(b.ids.numel() for b in parts))
        if rank == 0:
            now = time.time()
            clock += now - last if now - last < PAUSE else 0
            last = now
        barrier.wait()
        if rank == 0 and step % LOG_EVERY == 0:
            record.write(step, clock.item(), held_out_turns(model, held, enc) if step % HELD_EVERY == 0 else {})
        if step % LOG_EVERY == 0 and time.time() - saved > plan.save_every:
            saved = time.time()
            save_state(plan, opt, rank)
            if rank == 0:
                save(plan, model, tok, {"step": step, "seconds": clock.item()})
    if rank == 0:
        save(plan, model, tok, {"step": step, "seconds": clock.item()})


def train(plan: Plan) -> None:
    plan.out.mkdir(parents=True, exist_ok=True)
    if plan.start and not (plan.out / "tokenizer.json").exists():
        shutil.copy(plan.start / "tokenizer.json", plan.out / "tokenizer.json")
    if not (plan.out / "tokenizer.json").exists():
        train_tokenizer(plan.seed).save(str(plan.out / "tokenizer.json"))
    model, meta = Model(Shape()), {"step": 0, "seconds": 0.0}
    init_weights(model, plan.seed)
    if (plan.out / "params.pt").exists():
        kept = torch.load(plan.out / "params.pt")
        model.load_state_dict(kept["model"])
        meta = kept["meta"]
    elif plan.start:
        model.load_state_dict(load_file(plan.start / "model.safetensors"))
        meta["seconds"] = START_AT * plan.minutes * 60
    model.share_memory()
    total = sum(p.numel() for p in model.parameters())
    grads = [torch.zeros(total).share_memory_() for _ in range(plan.world)]
    clock = torch.tensor([meta["seconds"]], dtype=torch.float64).share_memory_()
    for name, value in CHILD_ENV.items():
        os.environ.setdefault(name, value)
    context = mp.get_context("spawn")
    barrier = context.Barrier(plan.world)
    mp.spawn(worker, (plan, model, grads, clock, barrier, meta["step"]), nprocs=plan.world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=80)
    parser.add_argument("--world", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--rows", type=int, default=3, help="rows a step in each process")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--save-every", type=float, default=240, help="seconds between checkpoints")
    parser.add_argument("--start", type=Path, help=f"go on from this checkpoint, at {START_AT:.0%} of the minutes")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    a = parser.parse_args()
    train(Plan(a.out, a.minutes, a.world, a.rows, a.length, a.seed, a.save_every, not a.eager, a.start))


if __name__ == "__main__":
    main()
