"""The plot of `rootward bench distance` (matplotlib, dev extra): medians measured, with the range of the turns, and lines predicted."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.distance_model import Fit

if TYPE_CHECKING:
    from benchmarks.distance import Point

COLOURS = {
    "plain": "#000000",
    "traversal waiting": "#56B4E9",
    "traversal": "#0072B2",
    "coupled waiting": "#CC79A7",
    "coupled": "#D55E00",
}
LABELS = {
    "plain": "plain decoding",
    "traversal waiting": "wait for each tree, traversal",
    "traversal": "living tree, traversal",
    "coupled waiting": "wait for each tree, coupled",
    "coupled": "living tree, coupled",
}
STEPS = 200


def draw(found: Sequence[Point], fits: dict[str, Fit], given: argparse.Namespace, path: Path) -> None:
    """Write the plot. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axis = plt.subplots(figsize=(7.8, 4.6))
    farthest = max(point.rtt_ms for point in found)
    line_ms = [farthest * i / STEPS for i in range(STEPS + 1)]
    for name, predicted in _predictions(fits).items():
        colour = COLOURS[name]
        axis.plot(line_ms, [predicted(ms / 1e3) for ms in line_ms], "-", color=colour, lw=1.1, alpha=0.7)
        axis.errorbar(*_measured(found, name), fmt="o", color=colour, ms=6, lw=1, label=LABELS[name])
    axis.set_xlabel("round-trip time between verifier and drafter, ms")
    axis.set_ylabel("tokens per second and session")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    title = f"Distance: verify {given.verify_ms:g} ms, draft level {given.draft_ms:g} ms, {given.nodes} nodes"
    axis.set_title(
        f"{title}\npoints measured (median and range), lines predicted from zero distance", loc="left", fontsize=11
    )
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _measured(found: Sequence[Point], name: str) -> tuple[list[float], list[float], list[list[float]]]:
    """Distances, medians of the turns there, and how far the lowest and the highest are from them."""
    x = sorted({point.rtt_ms for point in found})
    rates = [[point.rate for point in found if (point.system, point.rtt_ms) == (name, rtt_ms)] for rtt_ms in x]
    y = [median(some) for some in rates]
    pairs = list(zip(y, rates, strict=True))
    return x, y, [[at - min(some) for at, some in pairs], [max(some) - at for at, some in pairs]]


def _predictions(fits: dict[str, Fit]) -> dict[str, Callable[[float], float]]:
    lines: dict[str, Callable[[float], float]] = {"plain": lambda _: fits["traversal"].plain()}
    for name, fit in fits.items():
        lines |= {f"{name} waiting": fit.waiting, name: fit.living}
    return lines
