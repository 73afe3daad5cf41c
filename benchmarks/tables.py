"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from benchmarks.golden_share import golden_share
from benchmarks.reporting import Cell, LevelCell, Results, interval, ratio
from benchmarks.winners import comparisons, disagreeing, pairs_of_rules, traversal_below_token

ROBUST_LAWS = ("sampled", "greedy", "beam", "greedy_root")
LEVEL_LIMITS, LEVEL_BUDGETS = (2, 3, 4, 6, 8, 12), (8, 16, 32)


def report(results: Results, plots: Sequence[str]) -> str:
    """acceptance.md."""
    parts = [_head(results), _checks(results), _winners(results)]
    parts += [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots]
    parts += [_efficiency(results, temperature) for temperature in results.temperatures]
    if results.level_cells:
        parts.append(_levels(results))
    if share := golden_share():
        parts.append(share)
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _head(results: Results) -> str:
    m = results.metadata
    return "\n".join(
        [
            f"# Acceptance: {m['target']['name']} with {m['draft']['name']}",
            "",
            f"{m['date']}, {m['hardware']}, commit {m['commit'] or 'unknown'}. Target {_size(m['target'])}, draft "
            f"{_size(m['draft'])}, V = {m['vocab']}. {m['num_contexts']} contexts per temperature (positions in the "
            f"target's own continuations of {m['num_prompts']} held-out prompts, the same for every cell), one tree per "
            f"context, draft rows of K = {m['num_atoms']} atoms, seed {m['seed']}.",
            "",
            "Block efficiency = expected tokens of a round, the bonus token included, **in closed form** on the drawn trees "
            "(no coin noise; under traversal what is drawn below a node is integrated out of the node's own part: the same "
            "mean, less noise). Intervals: 95 % bootstrap over contexts. *Measured* = mean of verdicts drawn with fresh "
            "coins, held against the closed form given the whole trees. Budget = nodes below the root. At temperature 0 "
            "every rule takes the longest match.",
        ]
    )


def _size(model: dict[str, Any]) -> str:
    number = model["num_parameters"]
    return f"{number / 1e6:.2f} M parameters" if number else "a table"


def _checks(results: Results) -> str:
    wrong, below = disagreeing(results), traversal_below_token(results)
    largest = max((abs(cell.z) for cell in results.cells), default=0.0)
    pairs = pairs_of_rules(results)
    lines = [
        "## Checks",
        "",
        f"- Closed form and measured agree within 4 standard errors in {len(results.cells) - len(wrong)} of "
        f"{len(results.cells)} cells (largest |z| {largest:.2f}).",
        f"- Traversal is at least token-level on the same trees in {pairs - len(below)} of {pairs} cells.",
    ]
    lines += [f"  - **disagrees**: T = {c.temperature:g}, {c.budget} nodes, {c.name}, z = {c.z:.2f}" for c in wrong]
    for ours, theirs in below:
        change = _ratio(ratio(ours.samples, theirs.samples), digits=5)
        lines.append(
            f"  - **below**: T = {ours.temperature:g}, {ours.budget} nodes, {ours.construction}: ratio {change}"
        )
    return "\n".join(lines)


def _winners(results: Results) -> str:
    header = [
        "T",
        "nodes",
        "best of Rootward",
        "tokens",
        "best RSD-S + token",
        "ratio [95 %]",
        "best RSD + traversal",
        "ratio [95 %]",
        "best of all",
    ]
    rows = []
    for c in comparisons(results):
        rows.append(
            [
                f"{c.best.temperature:g}",
                str(c.best.budget),
                f"**{c.best.name}**",
                f"**{c.best.efficiency:.3f}**",
                f"{c.rsd_s_token.construction} {c.rsd_s_token.efficiency:.3f}",
                _ratio(c.over_token),
                f"{c.rsd_traversal.construction} {c.rsd_traversal.efficiency:.3f}",
                _ratio(c.over_traversal),
                f"{c.overall.name} {c.overall.efficiency:.3f}",
            ]
        )
    note = "Each side is the best of its kind at that temperature and budget, chosen on the same contexts."
    return f"## Winners at equal node budget\n\n{note}\n\n" + table(header, rows)


def _ratio(values: tuple[float, float, float], digits: int = 3) -> str:
    middle, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} [{low}, {high}]"


def _efficiency(results: Results, temperature: float) -> str:
    """One table: construction and rule against budget; best of each column in bold."""
    cells = results.select(temperature=temperature)
    names = list(dict.fromkeys((c.construction, c.rule) for c in cells))
    best = {b: max((c.efficiency for c in cells if c.budget == b), default=0.0) for b in results.budgets}
    by_key = {(c.construction, c.rule, c.budget): c for c in cells}
    header = ["construction", "rule", *(f"{b} nodes" for b in results.budgets)]
    rows = []
    for construction, rule in names:
        found = [by_key.get((construction, rule, b)) for b in results.budgets]
        rows.append([construction, rule, *(_entry(c, best) for c in found)])
    title = f"## Temperature {temperature:g}\n\nBlock efficiency ± half the 95 % interval; mean of the drawn verdicts in brackets.\n\n"
    return title + table(header, rows)


def _entry(cell: Cell | None, best: dict[int, float]) -> str:
    if cell is None:
        return "–"
    low, high = interval(cell.samples)
    text = f"{cell.efficiency:.3f}"
    if cell.efficiency >= best[cell.budget] - 1e-9:
        text = f"**{text}**"
    return f"{text} ± {(high - low) / 2:.2f} ({cell.measured:.2f})"


def _levels(results: Results) -> str:
    """The best growth setting for each limit of levels and nodes, per temperature and law."""
    parts = [
        "## Growth under a limit of draft forwards",
        "",
        "Best setting of `Growth` per law for at most so many levels (draft forwards) and nodes; draws = draws per level. "
        "Beside it two fixed shapes of so many nodes a level: *beam* (RSD-S) and *greedy_root* (a GREEDY family at the root, "
        "single draws below), both with traversal.",
    ]
    for temperature in sorted({cell.temperature for cell in results.level_cells}):
        here = [c for c in results.level_cells if c.temperature == temperature]
        laws = sorted({c.law for c in here})
        rows = []
        for budget in LEVEL_BUDGETS:
            for limit in LEVEL_LIMITS:
                row = [f"{budget}", f"{limit}"]
                inside = [c for c in here if c.levels <= limit and c.draws_per_level * c.levels <= budget]
                rows.append(row + [_setting([c for c in inside if c.law == law]) for law in laws])
        parts += ["", f"Temperature {temperature:g}:", "", table(["nodes", "levels", *laws], rows)]
    parts += ["", _robust(results.level_cells)]
    return "\n".join(parts)


def _setting(cells: list[LevelCell]) -> str:
    if not cells:
        return "–"
    top = max(cells, key=lambda c: (c.efficiency, -c.levels))
    a = "" if top.acceptance is None else f"a {top.acceptance:g}, "
    return f"{top.efficiency:.3f} ({a}draws {top.draws_per_level}, levels {top.levels})"


def _robust(cells: list[LevelCell]) -> str:
    """For every number of draws per level: tokens by acceptance, after a few levels."""
    rows = []
    ordered = sorted((c for c in cells if c.law in ROBUST_LAWS and c.levels in (2, 3, 4, 6, 8)), key=_key)
    for key, group in groupby(ordered, key=_key):
        by_level = {c.levels: f"{c.efficiency:.3f}" for c in group}
        rows.append([*map(str, key), *(by_level.get(level, "–") for level in (2, 3, 4, 6, 8))])
    header = ["T", "law", "draws per level", "a", *(f"{level} levels" for level in (2, 3, 4, 6, 8))]
    return "All settings of drawn growth:\n\n" + table(header, rows)


def _key(cell: LevelCell) -> tuple[float, str, int, float]:
    return cell.temperature, cell.law, cell.draws_per_level, cell.acceptance or 0.0
