"""Plots of a run (matplotlib, dev extra): efficiency against budget, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reporting import Cell, Results
from benchmarks.winners import best

GREY = "#666666"
BY_DEPTH_BUDGETS = (16, 32)
NARROWEST = 7.8  # inches: the legend needs them


class Series(NamedTuple):
    """A family of cells shown by its best member, in a colour of the palette of Okabe and Ito."""

    label: str
    colour: str
    style: str
    has: Callable[[Cell], bool]


def _is(prefixes: tuple[str, ...], rule: str) -> Callable[[Cell], bool]:
    def has(cell: Cell) -> bool:
        return cell.construction.startswith(prefixes) and cell.rule == (rule if cell.temperature > 0 else "match")

    return has


SERIES = (
    Series("best-first + traversal", "#0072B2", "-", _is(("best_first_0", "calibrated"), "traversal")),
    Series("GREEDY families + traversal", "#009E73", "-", _is(("greedy_",), "traversal")),
    Series("coupled best-first", "#CC79A7", "-", _is(("coupled",), "coupled")),
    Series("chosen best-first + match", "#E69F00", "-", _is(("top_k",), "match")),
    Series("RSD + traversal", "#56B4E9", "--", _is(("rsd_",), "traversal")),
    Series("RSD-S + token", "#D55E00", "--", _is(("rsd_s",), "token")),
    Series("chain + block", "#000000", ":", lambda c: c.construction == "chain" and c.rule == "block"),
)


def draw(results: Results, folder: Path) -> list[str]:
    """Write the plots; their file names. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    names = ["efficiency_by_budget.png"]
    _efficiency(results, folder / names[0])
    budgets = [b for b in BY_DEPTH_BUDGETS if b in results.budgets] or results.budgets[-1:]
    for budget in budgets:
        names.append(f"acceptance_by_depth_{budget}_nodes.png")
        _by_depth(results, budget, folder / names[-1])
    return names


def _panels(results: Results, height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    num = len(results.temperatures)
    figure, axes = plt.subplots(1, num, figsize=(max(3.3 * num + 1.2, NARROWEST), height), sharey=True, squeeze=False)
    for axis, temperature in zip(axes[0], results.temperatures, strict=True):
        axis.set_title(f"temperature {temperature:g}", fontsize=11, loc="left")
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(color=GREY, labelcolor="#333333")
    return figure, axes[0]


def _efficiency(results: Results, path: Path) -> None:
    figure, axes = _panels(results, 4.4)
    for axis, temperature in zip(axes, results.temperatures, strict=True):
        for series in SERIES:
            line = [_best_of(results, series, temperature, budget) for budget in results.budgets]
            shown = [cell for cell in line if cell is not None]
            if shown:
                x, y = [cell.budget for cell in shown], [cell.efficiency for cell in shown]
                axis.plot(x, y, series.style, color=series.colour, label=series.label, marker="o", ms=4, lw=1.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(results.budgets, [str(b) for b in results.budgets])
        axis.minorticks_off()
        axis.set_xlabel("nodes per round")
    axes[0].set_ylabel("tokens per round (bonus included)")
    _finish(figure, axes, f"Block efficiency at equal node budget{_pair(results)}", path)


def _by_depth(results: Results, budget: int, path: Path) -> None:
    figure, axes = _panels(results, 4.4)
    for axis, temperature in zip(axes, results.temperatures, strict=True):
        for series in SERIES:
            cell = _best_of(results, series, temperature, budget)
            if cell is not None:
                survival = cell.survival[:17]
                axis.plot(
                    range(len(survival)),
                    survival,
                    series.style,
                    color=series.colour,
                    label=series.label,
                    marker="o",
                    ms=3,
                    lw=1.6,
                )
        axis.set_xlabel("depth d")
        axis.set_ylim(0, 1.02)
    axes[0].set_ylabel("P(at least d draft tokens accepted)")
    _finish(figure, axes, f"Acceptance by depth, {budget} nodes{_pair(results)}", path)


def _best_of(results: Results, series: Series, temperature: float, budget: int) -> Cell | None:
    cells = [cell for cell in results.select(temperature=temperature, budget=budget) if series.has(cell)]
    return best(cells) if cells else None


def _pair(results: Results) -> str:
    """The end of a title; on a line of its own where the figure is narrow."""
    between = " · " if len(results.temperatures) > 2 else "\n"
    return f"{between}{results.metadata['target']['name']} with {results.metadata['draft']['name']}"


def _finish(figure: Any, axes: Any, title: str, path: Path) -> None:
    """One legend for all panels, below them."""
    from matplotlib import pyplot as plt

    found = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    ordered = [series.label for series in SERIES if series.label in found]
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    columns = min(4 if len(axes) > 2 else 3, len(ordered))
    figure.legend([found[o] for o in ordered], ordered, loc="lower center", ncols=columns, frameon=False, fontsize=9.5)
    figure.tight_layout(rect=(0, 0.06 + 0.05 * (-(-len(ordered) // columns) - 1), 1, 0.98))
    figure.savefig(path, dpi=130)
    plt.close(figure)
