"""Growth under a limit of draft forwards: a serving default picks (law, acceptance, draws per level), and each level
costs one draft forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from rootward.bench.lockstep import Grown, first, grow
from rootward.bench.outcomes import Coins, outcome, rounds
from rootward.bench.ranked import RankedRows
from rootward.bench.results import LevelCell
from rootward.core.growth import Policy
from rootward.core.requests import Law

DRAWS, LEVELS, MOST_NODES = (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8, 12), 32
ACCEPTANCES, FEWER_ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9), (0.6, 0.7, 0.8)
RULE = {Law.SAMPLED: "traversal", Law.GREEDY: "traversal", Law.TOP_K: "match", Law.COUPLED: "coupled"}


class Setting(NamedTuple):
    """What a serving default fixes about growth."""

    law: Law
    acceptance: float | None
    family: int
    draws: int


def settings(temperature: float) -> list[Setting]:
    """What is tried. At temperature 0 every law is verified by the longest match and chosen trees are the ones that
    matter; shared noise decides nothing there."""
    laws = [Setting(Law.TOP_K, None, 1, d) for d in DRAWS]
    by_law = {Law.SAMPLED: ACCEPTANCES, Law.GREEDY: FEWER_ACCEPTANCES, Law.COUPLED: FEWER_ACCEPTANCES}
    if temperature == 0:
        by_law = {Law.SAMPLED: (0.7,), Law.GREEDY: (0.7,)}
    for law, acceptances in by_law.items():
        laws += [Setting(law, a, 2 if law is Law.GREEDY else 1, d) for a in acceptances for d in DRAWS]
    return laws


def level_cells(
    rows: RankedRows, wanted: list[Setting], num_contexts: int, done: Callable[[str], None] = lambda _: None
) -> Iterator[LevelCell]:
    """Tokens a round after each number of levels, in closed form."""
    for setting in wanted:
        deepest = max(level for level in LEVELS if level == 1 or level * setting.draws <= MOST_NODES)
        policy = Policy(setting.law, MOST_NODES, deepest, 8, setting.draws, setting.acceptance or 0.5, setting.family)
        trees = grow(rows, policy, deepest, min(num_contexts, len(rows)))
        for level in (level for level in LEVELS if level <= deepest):
            yield _cell(rows, setting, trees, level)
        rows.release()
        done(setting.law.value)


def _cell(rows: RankedRows, setting: Setting, trees: list[Grown], level: int) -> LevelCell:
    rule = RULE[setting.law] if rows.temperature > 0 else "match"
    samples, nodes, coins = [], [], Coins(rows.seed, rows.first_context)
    for context, grown in enumerate(trees):
        one = first(grown.drafted, grown.after_level[level - 1])
        nodes.append(len(one.tree) - 1)
        samples.append(outcome(rule, rows, rounds(rows, context, one), False, coins, 0).tokens)
    return LevelCell(
        rows.temperature,
        setting.law.value,
        setting.acceptance,
        setting.family,
        setting.draws,
        level,
        float(np.mean(nodes)),
        np.array(samples),
    )
