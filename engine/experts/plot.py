"""The miss-rate curve as a PNG. matplotlib is needed for this alone and imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.experts.replay import Result


class NoPlotting(Exception):
    """matplotlib is not installed; one line for the user."""


def draw_miss_rates(results: Sequence[Result], path: Path, title: str) -> None:
    """One line a policy, capacity in experts on a logarithmic axis. Raises NoPlotting, OSError."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as problem:
        raise NoPlotting("drawing needs matplotlib: pip install matplotlib, or leave --png away") from problem
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for policy in dict.fromkeys(r.policy for r in results):
        points = sorted((r.capacity, 100 * r.miss_rate) for r in results if r.policy == policy)
        bound = policy == "belady"
        style = {"color": "black", "linestyle": ":", "label": "Belady's bound"} if bound else {"marker": "o", "label": policy}
        axes.plot(*zip(*points, strict=True), **style)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="experts that fit in fast memory", ylabel="misses, % of expert uses", ylim=(0, 102), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")  # whatever its name ends in
    pyplot.close(figure)
