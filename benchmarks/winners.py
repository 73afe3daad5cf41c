"""The comparisons the project promises: the best combination of Rootward against RSD-S with token-level verification
and against traversal on RSD trees, at equal node budgets; and traversal against token-level on equal trees."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.reporting import Cell, Results, ratio


@dataclass(frozen=True)
class Comparison:
    """One temperature and budget. Every side is the best of its kind; ratios with 95 % intervals over contexts."""

    best: Cell
    rsd_s_token: Cell
    rsd_traversal: Cell
    overall: Cell  # of everything measured, baselines included

    @property
    def over_token(self) -> tuple[float, float, float]:
        return ratio(self.best.samples, self.rsd_s_token.samples)

    @property
    def over_traversal(self) -> tuple[float, float, float]:
        return ratio(self.best.samples, self.rsd_traversal.samples)


def comparisons(results: Results, *, ours: str = "") -> list[Comparison]:
    """Per temperature and budget where all sides were measured; `ours` fixes our construction (a prefix of its name).

    At temperature 0 all rules take the longest match, and `match` stands for each of them.
    """
    found = []
    for temperature in results.temperatures:
        token, traversal = ("token", "traversal") if temperature > 0 else ("match", "match")
        for budget in results.budgets:
            here = results.select(temperature=temperature, budget=budget)
            mine = [c for c in here if not c.baseline and c.construction.startswith(ours)]
            beams = [c for c in here if c.construction.startswith("rsd_s") and c.rule == token]
            trees = [c for c in here if c.construction.startswith("rsd_") and c.rule == traversal]
            if mine and beams and trees:
                found.append(Comparison(best(mine), best(beams), best(trees), best(here)))
    return found


def best(cells: list[Cell]) -> Cell:
    return max(cells, key=lambda cell: cell.efficiency)


def traversal_below_token(results: Results) -> list[tuple[Cell, Cell]]:
    """(traversal, token) cells on the same trees where traversal falls short; there should be none."""
    token = {(c.temperature, c.budget, c.construction): c for c in results.cells if c.rule == "token"}
    return [
        (cell, other)
        for cell in results.select(rule="traversal")
        if (other := token.get((cell.temperature, cell.budget, cell.construction)))
        and cell.efficiency < other.efficiency - 1e-9
    ]


def pairs_of_rules(results: Results) -> int:
    """Cells of traversal that have a token-level twin."""
    token = {(c.temperature, c.budget, c.construction) for c in results.cells if c.rule == "token"}
    return sum((c.temperature, c.budget, c.construction) in token for c in results.select(rule="traversal"))


def disagreeing(results: Results) -> list[Cell]:
    """Cells whose drawn verdicts are more than 4 standard errors from the closed form; there should be none."""
    return [cell for cell in results.cells if not cell.agrees]
