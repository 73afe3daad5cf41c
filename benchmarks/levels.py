"""Growth under a limit of draft forwards: a serving default picks (law, acceptance, draws per level), and each level
costs one draft forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.lockstep import Drafted, View, build, first, grow
from benchmarks.outcomes import Coins, outcome, rounds
from benchmarks.ranked import Floats, RankedRows
from benchmarks.reporting import LevelCell
from benchmarks.shapes import FAMILIES
from rootward.core import drafting
from rootward.core.growth import Policy
from rootward.core.requests import DraftMode
from rootward.core.tree import TokenTree

DRAWS, LEVELS, MOST_NODES = (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8, 12), 32
ACCEPTANCES, FEWER_ACCEPTANCES = (0.5, 0.6, 0.7, 0.8), (0.6, 0.7, 0.8)
RULE = {DraftMode.TOP_K.value: "match", DraftMode.COUPLED.value: "coupled"}  # the others: traversal


class Setting(NamedTuple):
    """What a serving default fixes about growth; `law` may instead name a fixed shape of `draws` nodes a level."""

    law: DraftMode | str
    acceptance: float | None
    family: int
    draws: int


SHAPES: dict[str, Callable[[View, np.random.Generator, int, int], tuple[TokenTree, Floats]]] = {
    "beam": lambda row, rng, width, depth: drafting.rsd_s(row, width, depth, rng),
    "greedy_root": lambda row, rng, width, depth: drafting.greedy(row, [width] + [1] * (depth - 1), rng),
}


def settings(temperature: float) -> list[Setting]:
    """What is tried. At temperature 0 every law is verified by the longest match and chosen trees are the ones that
    matter; shared noise decides nothing there."""
    laws = [Setting(DraftMode.TOP_K, None, 0, d) for d in DRAWS]
    by_law = {DraftMode.SAMPLED: ACCEPTANCES, DraftMode.GREEDY: FEWER_ACCEPTANCES, DraftMode.COUPLED: FEWER_ACCEPTANCES}
    if temperature == 0:
        by_law = {DraftMode.SAMPLED: (0.7,), DraftMode.GREEDY: (0.7,)}
    for law, acceptances in by_law.items():
        laws += [Setting(law, a, 3 if law is DraftMode.GREEDY else 0, d) for a in acceptances for d in DRAWS]
    return laws + [Setting(name, None, 0, d) for name in SHAPES for d in DRAWS]


def level_cells(
    rows: RankedRows, wanted: list[Setting], num_contexts: int, done: Callable[[str], None] = lambda _: None
) -> Iterator[LevelCell]:
    """Tokens a round after each number of levels, in closed form."""
    few = min(num_contexts, len(rows))
    for setting in wanted:
        up_to = [level for level in LEVELS if level == 1 or level * setting.draws <= MOST_NODES]
        after = (
            _grown(rows, setting, up_to, few)
            if isinstance(setting.law, DraftMode)
            else _shaped(rows, setting, up_to, few)
        )
        for level, trees in zip(up_to, after, strict=True):
            yield _cell(rows, setting, trees, level)
        rows.release()
        done(str(setting.law))


def _grown(rows: RankedRows, setting: Setting, up_to: list[int], num_contexts: int) -> list[list[Drafted]]:
    """The trees of `Growth` after each number of levels: one growth, cut in draw order."""
    law, deepest = DraftMode(setting.law), max(up_to)
    policy = Policy(law, MOST_NODES, deepest, 8, setting.draws, setting.acceptance or 0.5)
    if setting.family:
        policy = replace(policy, family=FAMILIES[setting.family])
    trees = grow(rows, policy, deepest, num_contexts)
    return [[first(one.drafted, one.after_level[level - 1]) for one in trees] for level in up_to]


def _shaped(rows: RankedRows, setting: Setting, up_to: list[int], num_contexts: int) -> list[list[Drafted]]:
    """The trees of a fixed shape of so many levels."""
    make = SHAPES[setting.law]

    def trees(level: int) -> list[Drafted]:
        def builder(view: View, rng: np.random.Generator) -> tuple[TokenTree, Floats]:
            return make(view, rng, setting.draws, level)

        return build(rows, builder, num_contexts=num_contexts)

    return [trees(level) for level in up_to]


def _cell(rows: RankedRows, setting: Setting, trees: list[Drafted], level: int) -> LevelCell:
    law = setting.law.value if isinstance(setting.law, DraftMode) else setting.law
    rule = RULE.get(law, "traversal") if rows.temperature > 0 else "match"
    samples, nodes, coins = [], [], Coins(rows.seed, rows.first_context)
    for context, one in enumerate(trees):
        nodes.append(len(one.tree) - 1)
        samples.append(outcome(rule, rows, rounds(rows, context, one), False, coins, 0).tokens)
    return LevelCell(
        rows.temperature,
        law,
        setting.acceptance,
        setting.family,
        setting.draws,
        level,
        float(np.mean(nodes)),
        np.array(samples),
    )
