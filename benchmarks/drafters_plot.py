"""The plot of `rootward bench drafters` (matplotlib, dev extra): latency, use, and hits against sessions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.drafters import Point

COLOURS = {"sampled": "#0072B2", "coupled": "#CC79A7"}
PANELS = (
    ("latency_ms", "commit to first growth, ms"),
    ("used", "nodes verified / nodes arrived"),
    ("kept", "commits whose root was grown"),
    ("wire_bytes", "bytes per round"),
)


def draw(found: Sequence[Point], path: Path) -> None:
    """Write the plot. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(3.1 * len(PANELS), 3.4))
    lines = sorted({(point.law, point.ahead) for point in found})
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        for law, ahead in lines:
            mine = [point for point in found if (point.law, point.ahead) == (law, ahead)]
            x, y = [point.sessions for point in mine], [getattr(point, name) for point in mine]
            style = "o-" if ahead else "o:"
            axis.plot(x, y, style, color=COLOURS[law], ms=4, lw=1.5, label=f"{law}, {ahead} ahead")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({point.sessions for point in found}), sorted({str(p.sessions) for p in found}, key=int))
        axis.minorticks_off()
        axis.set_xlabel("sessions at one drafter")
        axis.set_title(label, loc="left", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
