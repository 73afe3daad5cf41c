"""The plot of `rootward bench distance` (matplotlib, dev extra): measured points, predicted lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rootward.bench.distance_model import Fit

if TYPE_CHECKING:
    from rootward.bench.distance import Point

COLOURS = {"plain": "#000000", "waiting": "#D55E00", "traversal": "#0072B2", "coupled": "#CC79A7"}
LABELS = {
    "plain": "plain decoding",
    "waiting": "wait for each tree",
    "traversal": "living tree, traversal",
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
        mine = [point for point in found if point.system == name]
        x, y = [point.rtt_ms for point in mine], [point.rate for point in mine]
        axis.plot(x, y, "o", color=colour, ms=6, label=LABELS[name])
    axis.set_xlabel("round-trip time between verifier and drafter, ms")
    axis.set_ylabel("tokens per second and session")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    title = f"Distance: verify {given.verify_ms:g} ms, draft level {given.draft_ms:g} ms, {given.nodes} nodes"
    axis.set_title(f"{title}\npoints measured, lines predicted from zero distance", loc="left", fontsize=11)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _predictions(fits: dict[str, Fit]) -> dict[str, Callable[[float], float]]:
    return {
        "plain": lambda _: fits["waiting"].plain(),
        "waiting": fits["waiting"].waiting,
        "traversal": fits["traversal"].living,
        "coupled": fits["coupled"].living,
    }
