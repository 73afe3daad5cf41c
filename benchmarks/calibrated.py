"""The shape that is optimal for measured acceptances, by rank and depth.

Acceptances are measured on the contexts of the other half (even or odd), so no tree is shaped by its own context.
"""

from __future__ import annotations

import numpy as np

from benchmarks import shapes
from benchmarks.lockstep import Drafted, View, build
from benchmarks.outcomes import rounds
from benchmarks.ranked import Floats, RankedRows
from rootward.core import verification
from rootward.core.calibration import Calibration
from rootward.core.drafting.sequoia import Shape, sequoia_shape
from rootward.core.tree import TokenTree

PROBE_NODES, PROBE_ACCEPTANCE = 64, 0.6  # deep and wide enough to meet the places a budget is spent on
PRIOR = ((0.6, 0.4, 0.3, 0.25, 0.2, 0.2),)
DEEPEST, STRENGTH = 24, 4.0


def trees(rows: RankedRows, budget: int, make: shapes.Maker) -> list[Drafted]:
    """One tree per context in the best shape of `budget` nodes."""
    by_half = [parents(shape(rows, half, budget)) for half in (1, 0)]  # for even contexts: measured on odd ones

    def builder(view: View, rng: np.random.Generator) -> tuple[TokenTree, Floats]:
        return shapes.drawn_in_shape(view, by_half[view.context % 2], make, rng)

    return build(rows, builder)


def shape(rows: RankedRows, half: int, budget: int) -> Shape:
    """Sequoia's shape for the acceptances under traversal of the even (0) or odd (1) contexts."""
    return sequoia_shape(acceptances(rows, half), budget, min(DEEPEST, budget), len(PRIOR[0]))


def acceptances(rows: RankedRows, half: int) -> Floats:
    """float64[D, R]: acceptance by depth − 1 and rank."""
    probe = shapes.best_first(PROBE_NODES, PROBE_ACCEPTANCE)
    learned = Calibration(PRIOR, strength=STRENGTH, decay=1.0, max_depth=DEEPEST, max_rank=len(PRIOR[0]))
    drawn = build(rows, lambda view, rng: shapes.drawn_in_shape(view, probe, shapes.drawn, rng))
    for context, drafted in enumerate(drawn):
        if context % 2 == half or len(rows) == 1:
            one = rounds(rows, context, drafted)
            learned.learn(verification.law("traversal", one.tree, one.target, one.draft))
    return learned.table()


def parents(sizes: Shape) -> tuple[int, ...]:
    """Family sizes, level by level, as parents in index order."""
    found = [-1]
    for node, size in enumerate(sizes):
        found += [node] * size
    return tuple(found)
