"""Constructions × rules × budgets at one temperature, all on the same contexts. All rules of a tree share the tree.

Legend: C contexts, N nodes, D depths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from benchmarks.constructions import Construction
from benchmarks.outcomes import Coins, Outcome, Round, outcome, rounds
from benchmarks.ranked import Floats, RankedRows
from benchmarks.reporting import Cell
from rootward.core.tree import TokenTree

NUM_VERDICTS = 4  # drawn per tree


def cells(
    rows: RankedRows,
    constructions: Iterable[Construction],
    budgets: Sequence[int],
    rules: Sequence[str],
    done: Callable[[str], None] = lambda _: None,
) -> Iterator[Cell]:
    """Every valid cell. At temperature 0 every rule takes the longest match, so only `match` is shown.

    done(construction) is called after each construction and budget.
    """
    for construction in constructions:
        for budget in sorted(budgets):
            drafted = construction.trees(rows, budget)
            made = [rounds(rows, context, one) for context, one in enumerate(drafted)]
            for rule in valid(construction, rules, rows.temperature):
                yield cell(rows, construction, budget, rule, made)
            done(construction.name)
        rows.release()


def valid(construction: Construction, rules: Sequence[str], temperature: float) -> list[str]:
    if temperature == 0:
        return [] if construction.coupled or "match" not in rules else ["match"]
    return [rule for rule in construction.rules if rule in rules]


def cell(rows: RankedRows, construction: Construction, budget: int, rule: str, made: Sequence[Round]) -> Cell:
    """One rule on one tree per context."""
    coins = Coins(rows.seed, rows.first_context)
    one_by_one = [outcome(rule, rows, one, construction.replacement, coins, NUM_VERDICTS) for one in made]
    depths = [one.tree.depth for one in made]
    given = [1.0 + float(result.stop @ depth) for result, depth in zip(one_by_one, depths, strict=True)]
    measured, error, num = _measured(one_by_one, depths)
    return Cell(
        temperature=rows.temperature,
        budget=budget,
        construction=construction.name,
        rule=rule,
        baseline=construction.baseline,
        samples=np.array([result.tokens for result in one_by_one]),
        given_trees=float(np.mean(given)),
        survival=survival([one.tree for one in made], [result.reach for result in one_by_one]),
        measured=measured,
        measured_error=error,
        num_measured=num,
        nodes=float(np.mean([len(one.tree) - 1 for one in made])),
        levels=float(np.mean([int(depth.max()) for depth in depths])),
    )


def survival(trees: Sequence[TokenTree], reaches: Sequence[Floats]) -> Floats:
    """float64[D]: P(at least d draft tokens are accepted), the mean over contexts."""
    deepest = max(int(tree.depth.max()) for tree in trees)
    total = np.zeros(deepest + 1)
    for tree, reach in zip(trees, reaches, strict=True):
        total += np.bincount(tree.depth, weights=reach, minlength=deepest + 1)
    return total / len(trees)


def _measured(one_by_one: Sequence[Outcome], depths: Sequence[np.ndarray]) -> tuple[float, float, int]:
    """(mean tokens of the drawn verdicts, its standard error given the trees, number of verdicts). The variance of
    a verdict is known: it is that of the closed form."""
    total, variance, num = 0.0, 0.0, sum(len(result.drawn) for result in one_by_one)
    for result, depth in zip(one_by_one, depths, strict=True):
        total += sum(result.drawn)
        mean = float(result.stop @ depth)
        spread = float(result.stop @ (depth.astype(np.float64) - mean) ** 2)
        variance += len(result.drawn) * max(spread, 0.0)
    return 1.0 + total / num, float(np.sqrt(variance)) / num, num
