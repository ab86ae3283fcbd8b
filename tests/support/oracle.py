"""What logits are compared with, and how closely."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.kernels.reference import ReferenceOps
from engine.models.load import load_model
from engine.models.spec import MoeSpec
from engine.nn.decoder import Decoder
from tests.support.kernels import Kernels
from tests.support.steps import Driver
from tests.support.tiny import VOCAB


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def driver(path: Path, kernels: Kernels) -> Driver:
    loaded = load_model(path, kernels.ops)
    return Driver(Decoder(loaded.spec, loaded.weights, kernels.ops), kernels.kv_dtype)


# Router logits closer than this (they reach about 3) may change places by the rounding of a key: such a row then goes through
# another expert, which says nothing about the kernels.
CLOSE_ROUTER = 5e-4


class RouterWatch(ReferenceOps):
    """Reference kernels that remember how close each row's last chosen expert was to the first one left out."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[torch.Tensor] = []

    def route(self, logits: torch.Tensor, spec: MoeSpec, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits.topk(spec.top_k + 1).values
        self.gaps.append(best[:, -2] - best[:, -1])
        return super().route(logits, spec, bias)

    def close(self, rows: int) -> torch.Tensor:
        """Which of the `rows` rows had a close router in any layer."""
        gaps = torch.stack(self.gaps) if self.gaps else torch.ones(1, rows)
        return gaps.min(0).values < CLOSE_ROUTER


def truth(model: torch.nn.Module, path: Path, kernels: Kernels, prompt: list[int]) -> torch.Tensor:
    """Logits [tokens, V] of one cold prefill: by transformers, which keeps float32 keys; for kernels with narrower KV pages by
    the reference kernels on such pages, with NaN for rows whose router is too close to be compared.
    """
    if kernels.kv_dtype == torch.float32:
        return model(torch.tensor([prompt]), use_cache=False).logits[0]
    watch = RouterWatch()
    want = driver(path, Kernels(watch, 0.0, kernels.kv_dtype)).chunks(0, prompt, [len(prompt)])
    want[watch.close(len(prompt))] = torch.nan
    return want


def assert_close(ours: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Within `tolerance` of the logit scale, and the same greedy token wherever the two best are further apart than that.

    Rows of `want` that are NaN are not compared; they must be the fewer or the test says nothing.
    """
    assert ours.shape == want.shape
    compared = ~want.isnan().any(1)
    assert compared.float().mean() > 0.6
    ours, want = ours[compared], want[compared]
    allowed = tolerance * want.abs().max().item()
    worst = (ours - want).abs().max().item()
    assert worst <= allowed, (
        f"largest difference is {worst / allowed * tolerance:.2e} of the logit scale, allowed {tolerance:.0e}"
    )
    best = want.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * allowed
    assert clear.any() and torch.equal(ours.argmax(1)[clear], want.argmax(1)[clear])
